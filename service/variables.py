"""The environment variables of settings, and which of them are secret. This module imports nothing slow."""

from collections.abc import Mapping

PREFIX = "QUARTET_"
NOT_FLAGS = frozenset(
    {"api_key", "keys", "receipt_key"}
)  # everybody on a machine can read command lines


def variable(name: str) -> str:
    """Return the variable of a setting."""
    return PREFIX + name.upper()


def is_ours(variable: str) -> bool:
    return variable.upper().startswith(PREFIX)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of settings that are secret, for a child process."""
    secret = {variable(name) for name in NOT_FLAGS}
    return {name: value for name, value in environ.items() if name.upper() not in secret}
