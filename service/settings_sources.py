"""Settings from flags, environment variables and a file, with the origin of each value.

A flag overrides a variable, a variable overrides the file, and the file overrides the default.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from service.core.addresses import address
from service.core.token_table import read_token_table
from service.keys import ONLY, Key, Keys, digest, join_keys, read_keys
from service.settings import Settings, Variables, did_you_mean, flag
from service.variables import variable

FILE = Path("quartet.toml")  # read when no other file is named
BUNDLES = Path("bundles")  # searched when no bundle is named
STARTER = "quartet-starter"  # in a checkout's `bundles/`, next to the default model; served by its name only
DEFAULT_BUNDLE = Path(__file__).parent / "default_bundle"  # exists in an installed wheel only
NOT_IN_FILES = frozenset({"api_key", "config", "receipt_key"})
CANNOT_GO_ON = 4  # the exit status of a service in a state from which it cannot recover
PATHS = frozenset({"api_keys", "bundles", "models_dir", "tiktoken_file", "uds"})

Given = Mapping[str, Any]


class ConfigError(Exception):
    """Invalid settings; the message names every fault and its origin."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The final settings and their origins.

    settings: with all bundles and keys that were found, and without plain keys
    given: the settings before these were added
    origins: the origin of each setting that is not a default
    key_files: the files that contain API keys
    """

    settings: Settings
    given: Settings
    origins: Mapping[str, str]
    key_files: Sequence[Path]


def configure(flags: Given) -> Configuration:
    """Read the settings from flags, by field names, from the environment and from a file. Raises ConfigError."""
    given, origins, path = gather(flags)
    folder = given.models_dir
    if folder is not None and not (address(folder) or folder.is_dir()):
        raise ConfigError(f"{origins['models_dir']}: {given.models_dir} is no directory")
    if given.tiktoken_file is not None:
        check_token_table(given.tiktoken_file)
    bundles, keys = given.bundles, find_keys(given)
    if given.memory_budget is None:
        bundles = bundles or find_bundles()
    found = {"config": path, "bundles": bundles, "keys": keys, "api_keys": None, "api_key": None}
    settings = given.model_copy(update=found)
    return Configuration(settings, given, origins, key_files(given, origins, path))


def gather(flags: Given) -> tuple[Settings, Mapping[str, str], Path | None]:
    """Return the settings of all sources, the origin of each, and the path of the settings file. Raises ConfigError."""
    variables = Variables(Settings)()
    refuse_empty(flags, {name: flag(name) for name in flags} | {"bundles": "arguments"})
    path = config_file({**variables, **flags})
    filed = read_file(path) if path else {}
    refuse_empty(filed, dict.fromkeys(filed, str(path)))
    origins = {
        **dict.fromkeys(filed, str(path)),
        **{name: variable(name) for name in variables},
        **{name: "arguments" if name == "bundles" else flag(name) for name in flags},
    }
    try:
        given = Settings(**{**filed, **variables, **flags})
    except ValidationError as error:
        faults = (fault_of(fault, origins, path) for fault in error.errors())
        raise ConfigError("; ".join(faults)) from None
    if "keys" in origins and not given.keys:
        raise ConfigError(f"{origins['keys']}: there is no key in keys")
    return given, origins, path


def key_files(given: Settings, origins: Mapping[str, str], path: Path | None) -> Sequence[Path]:
    in_file = path is not None and str(path) in (origins.get("keys"), origins.get("api_keys"))
    return [*filter(None, (path if in_file else None, given.api_keys))]


class KeySource:
    """The source of API keys, which can read them again; files: the files that contained keys at the last read."""

    def __init__(self, flags: Given, files: Sequence[Path]) -> None:
        self._flags = flags
        self.files = files

    def read(self) -> Keys:
        """Read all keys.

        Raises ConfigError, also where no key is left, because that would turn access control off.
        """
        given, origins, path = gather(self._flags)
        keys = find_keys(given)
        self.files = key_files(given, origins, path)
        if not keys:
            raise ConfigError("no key is left")
        return keys


# -- the file of settings -----------------------------------------------------------------------------


def config_file(given: Given) -> Path | None:
    if "config" in given:
        return Path(given["config"])
    return FILE if FILE.is_file() else None


def read_file(path: Path) -> Given:
    """Read the settings in a file; paths are relative to the file's directory. Raises ConfigError."""
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if faults := [*strange(read)]:
        raise ConfigError("; ".join(f"{path}: {fault}" for fault in faults))
    return {
        name: beside(path, value) if name in PATHS and not is_empty(value) else value
        for name, value in read.items()
    }


def refuse_empty(given: Given, origins: Mapping[str, str]) -> None:
    """Raise ConfigError for settings that are set to an empty value."""
    if empty := [f"{origins[name]}: {name}" for name in given if is_empty(given[name])]:
        raise ConfigError(f"{', '.join(empty)}: is empty; leave it out for the default")


def is_empty(value: object) -> bool:
    """Return whether a value is an empty string or a list with one; as a path it would be the working directory."""
    return value == "" or (isinstance(value, list) and "" in value)


def strange(read: Given) -> Iterator[str]:
    """Yield a fault for each name in a settings file that is not allowed there or unknown."""
    known = Settings.model_fields.keys() - NOT_IN_FILES
    for name in read:
        if name in NOT_IN_FILES:
            yield f"{name}: is not for files"
        elif name not in known:
            yield f"{name}: is not a setting{did_you_mean(name, known)}"


def beside(path: Path, value: object) -> object:
    if isinstance(value, list):
        return [beside(path, item) for item in value]
    return path.parent / value if isinstance(value, str) and not address(value) else value


# -- bundles and keys ---------------------------------------------------------------------------------


def find_bundles() -> tuple[Path, ...]:
    """Return the bundles in `BUNDLES` but STARTER, sorted by name, or else the default bundle of an installed wheel.

    Raises ConfigError when there are none.
    """
    # A main process whose settings name the bundles does not need this import.
    from service.core.bundle import MANIFEST

    folders = (manifest.parent for manifest in BUNDLES.glob(f"[!.]*/{MANIFEST}"))
    found = tuple(sorted(folder for folder in folders if folder.name != STARTER))
    if not found and (DEFAULT_BUNDLE / MANIFEST).is_file():
        return (DEFAULT_BUNDLE,)
    if not found:
        raise ConfigError(f"name a bundle to serve: there is none in {BUNDLES}/")
    return found


def find_keys(given: Settings) -> Keys:
    """Return the keys of all settings and files. Raises ConfigError."""
    plain = given.api_key
    filed = read_key_file(given.api_keys) if given.api_keys else {}
    only = {ONLY: Key(sha256=digest(plain.get_secret_value()).hex())} if plain else {}
    try:
        return join_keys(given.keys, filed, only)
    except ValueError as error:
        raise ConfigError(f"keys: {error}") from None


def read_key_file(path: Path) -> Keys:
    try:
        return read_keys(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def check_token_table(path: Path) -> None:
    """Raise ConfigError for a file of tokens that cannot be read, before a request needs it."""
    try:
        read_token_table(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


# -- messages and the report --------------------------------------------------------------------------


def unreadable(path: Path, error: OSError | ValueError) -> ConfigError:
    if isinstance(error, ValidationError):
        faults = (f"{path}: {dotted(fault['loc'])}{reason(fault)}" for fault in error.errors())
        return ConfigError("; ".join(faults))
    return ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}")


def fault_of(fault: Given, origins: Mapping[str, str], path: Path | None) -> str:
    """Return a message for one fault of a setting: its flag, its variable or the file and field, and the reason."""
    name, *inner = fault["loc"]
    place = fault["loc"] if origins[name] == str(path) else inner
    # Of a number, such as "8000 # the port" from a file of variables; a key is not shown.
    shown = f", not {fault['input']!r}" if fault["type"].endswith("_parsing") else ""
    return f"{origins[name]}: {dotted(place)}{reason(fault)}{shown}"


def dotted(place: Sequence[int | str]) -> str:
    return f"{'.'.join(map(str, place))}: " if place else ""


def reason(fault: Given) -> str:
    if fault["type"] == "extra_forbidden":
        return f"is not known{did_you_mean(str(fault['loc'][-1]), Key.model_fields)}"
    return str(fault["msg"]).removeprefix("Value error, ")


def report(configuration: Configuration) -> str:
    """Return a line for each setting with its name, its value (unless it is a secret) and its origin."""
    settings, given, origins = configuration.settings, configuration.given, configuration.origins
    told = {"api_keys": given, "api_key": given}
    lines = [
        (name, shown(getattr(told.get(name, settings), name)), origin(name, origins))
        for name in Settings.model_fields
    ]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(
        f"{name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in lines
    )


def origin(name: str, origins: Mapping[str, str]) -> str:
    if name == "keys":
        named = [origins[each] for each in ("keys", "api_keys", "api_key") if each in origins]
        return ", ".join(named) or "default"
    return origins.get(name, "default")


def shown(value: object) -> str:
    """Return a value in the notation of a settings file; for keys their names."""
    match value:
        case None:
            return "unset"
        case SecretStr():
            return "(not shown)"
        case bool():
            return str(value).lower()
        case Mapping():
            names = (f"{k}={v}" if isinstance(v, str) else k for k, v in value.items())
            return ", ".join(names) or "none"
        case tuple():
            return ", ".join(map(shown, value)) or "none"
        case Path():
            return address(value) or str(value)
    return str(value)
