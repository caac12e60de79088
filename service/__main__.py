"""`python -m service BUNDLE...`: settings from flags and variables, then a server until SIGTERM."""

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from service import __version__, logs
from service.keys import ONLY, Key, Keys, digest, join_keys, read_keys
from service.processes import Processes
from service.settings import NOT_FLAGS, PREFIX, Settings, unknown_variables

log = structlog.get_logger()

BUNDLES = Path("bundles")  # looked in when no bundle is named


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until told to stop. Exits: 1 port is busy, 2 bad settings, 3 bad bundle."""
    settings = read_settings(argv)
    logs.configure(settings.log_level, settings.log_format, sys.stderr)
    for line in unknown_variables(os.environ):
        log.warning(line)
    listener = bind(settings.host, settings.port)
    if settings.http_workers:
        sys.exit(asyncio.run(Processes(settings, listener).run()))
    from service.alone import serve_alone  # what the main process of several does not need

    serve_alone(settings, listener)


def read_settings(argv: Sequence[str] | None) -> Settings:
    """Settings from the command line, then the environment. Exits with 2 and one line when bad."""
    given = vars(parser().parse_args(argv))
    try:
        settings = Settings(**given)
    except ValidationError as error:
        faults = "; ".join(f"{name_of(e['loc'])}: {reason(e)}" for e in error.errors())
        raise fail(faults, 2) from None
    bundles = settings.bundles or find_bundles()
    if not bundles:
        raise fail(f"name a bundle to serve: there is none in {BUNDLES}/", 2)
    keys = {"keys": find_keys(settings), "api_keys": None, "api_key": None}
    return settings.model_copy(update={"bundles": bundles, **keys})


def find_keys(settings: Settings) -> Keys:
    """All keys, wherever they are. Exits with 2 and one line when they are not as they should be."""
    plain = settings.api_key
    try:
        return join_keys(
            settings.keys,
            read_keys(settings.api_keys) if settings.api_keys else {},
            {ONLY: Key(sha256=digest(plain.get_secret_value()).hex())} if plain else {},
        )
    except OSError as error:
        raise fail(f"{settings.api_keys}: {error.strerror}", 2) from None
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {reason(e)}" for e in error.errors())
        raise fail(f"{settings.api_keys}: {faults}", 2) from None
    except ValueError as error:
        raise fail(f"keys: {error}", 2) from None


def find_bundles() -> tuple[Path, ...]:
    """Those that lie where bundles are looked for, by name."""
    from service.bundle import (
        MANIFEST,
    )  # what a main process that is told its bundles does not need

    return tuple(sorted(manifest.parent for manifest in BUNDLES.glob(f"[!.]*/{MANIFEST}")))


def name_of(location: Sequence[int | str]) -> str:
    name = str(location[0])
    variable = f"{PREFIX}{name.upper()}"
    return variable if name in NOT_FLAGS else f"{flag(name)} ({variable})"


def reason(fault: Mapping[str, Any]) -> str:
    return str(fault["msg"]).removeprefix("Value error, ")


def parser() -> argparse.ArgumentParser:
    """Every setting as a flag, described by its field."""
    parser = argparse.ArgumentParser(
        "python -m service", description="Serve bundles over HTTP.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"quartet {__version__}")
    for name, field in Settings.model_fields.items():
        if name not in NOT_FLAGS:
            add_argument(parser, name, field)
    return parser


def add_argument(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    if name == "bundles":
        parser.add_argument(
            name, nargs="*", metavar="BUNDLE", default=argparse.SUPPRESS, help=field.description
        )
        return
    default = "unset" if field.default is None else field.default
    parser.add_argument(
        flag(name),
        default=argparse.SUPPRESS,
        metavar="VALUE",
        help=f"{field.description} (default {default}; {PREFIX}{name.upper()})",
    )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything slow is done. Exits with 1 and one line when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise fail(f"cannot listen on {host}:{port}: {reason}", 1) from None
    return listener


def fail(message: str, status: int) -> SystemExit:
    """End the process with one line on standard error: `raise fail(...)`."""
    print(f"quartet: {message}", file=sys.stderr)
    return SystemExit(status)


if __name__ == "__main__":
    main()
