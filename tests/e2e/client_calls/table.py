"""The clients with their records, and why one cannot run here."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from benchmarks.lib.environments import Unavailable
from tests.e2e.client_calls.environments import environment
from tests.e2e.client_calls.isolated import ClientError, installed_version, isolated
from tests.e2e.client_calls.records import (
    CLIENTS,
    ISOLATED,
    Call,
    Failure,
    KeyUse,
    error_class,
    key_uses,
    load,
)


@dataclass(frozen=True)
class Client:
    """An unmodified client.

    missing: why it cannot run here; empty if it can
    options: further flags of its service
    """

    name: str
    version: str
    missing: str
    calls: list[Call]
    failures: list[Failure]
    key_uses: list[KeyUse]
    options: tuple[str, ...] = ()
    is_isolated: bool = False


def clients() -> Iterator[Client]:
    """Yield all clients, whether or not they are installed."""
    for name in CLIENTS:
        installed = importlib.util.find_spec(name) is not None
        missing = "" if installed else f"the client {name} is not installed"
        yield client(name, load(name), missing, version(name) if installed else "")
    for name, own in ISOLATED.items():
        try:
            environment(own).python()
            missing = ""
        except Unavailable as error:
            missing = f"the client {name} cannot run: {error}"
        yield client(name, isolated(name), missing, installed_version(name), is_isolated=True)


def client(
    name: str, module: Any, missing: str, found: str, *, is_isolated: bool = False
) -> Client:
    options = getattr(module, "OPTIONS", ())
    records = (module.CALLS, module.FAILURES, key_uses(module))
    return Client(name, found, missing, *records, options=options, is_isolated=is_isolated)


def is_class(error: Exception, name: str) -> bool:
    """Return whether an error has exactly this class; that of an isolated client by its name."""
    return (
        error.name == name if isinstance(error, ClientError) else type(error) is error_class(name)
    )
