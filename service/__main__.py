"""`python -m service BUNDLE...`: read settings from flags, variables and a file, then serve until SIGTERM."""

if __name__ == "__main__":
    # Before the other imports, because they start threads, and process 1 would lose signals during the imports.
    import sys

    from service.processes.child_process import start_early
    from service.processes.process_signals import at_start

    at_start()
    start_early(sys.argv[1:])

import argparse
import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

import structlog
from pydantic.fields import FieldInfo

from service import __version__
from service.core.addresses import address, full_name
from service.core.device_places import Place, device_places
from service.core.program_name import program_name
from service.engines.memory_limit import memory_limit
from service.observability import logs
from service.processes.child_process import child_python, drop_early
from service.processes.supervisor import Processes
from service.server.connection_limits import LEAST_FILES, allowed_files
from service.server.sockets import reuse_address
from service.server.unix_socket import UnixListener
from service.settings import Settings, flag, ignored_variables, unknown_variables, usable_cores
from service.settings_sources import ConfigError, KeySource, configure, report
from service.variables import NOT_FLAGS, variable

# The variable of ONNX Runtime; service.core.session sets it to 1 where it is unset.
TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"

# The groups of flags in `--help`, each with its first setting.
GROUPS = {
    "host": "addresses and APIs",
    "http_workers": "device and batches",
    "max_inputs_per_request": "limits of requests and connections",
    "hang_s": "health and stopping",
    "api_keys": "access",
    "runtime_telemetry": "telemetry and logs",
}

log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a stop signal.

    Exit status: 1 port busy, 2 bad settings, 3 bad bundle or small memory limit, 4 service cannot recover.
    """
    given = vars(parser().parse_args(argv))
    check = given.pop("check_config")
    try:
        configuration = configure(given)
    except ConfigError as error:
        raise fail(str(error), 2) from None
    settings = configuration.settings
    logs.configure(settings.log_level, settings.log_format, sys.stderr)
    closed = bool(settings.keys)
    for line in [*ignored_variables(os.environ, closed), *unknown_variables(os.environ)]:
        log.warning(line)
    if check:
        print(report(configuration))
    else:
        source = KeySource(given, configuration.key_files) if settings.keys else None
        serve(settings, source)


def serve(settings: Settings, source: KeySource | None = None) -> None:
    """Serve until a stop signal; source: from which API keys are read again."""
    if settings.runtime_telemetry and not os.environ.get(TELEMETRY_OFF):
        os.environ[TELEMETRY_OFF] = "0"  # before a process loads the library; children inherit it
        drop_early()  # it has inherited the former value
    if (files := allowed_files(settings)) < LEAST_FILES:
        raise fail(
            f"a process may open {files} files, and needs {LEAST_FILES} at least: raise `ulimit -n`",
            2,
        )
    reserved: list[socket.socket] = []
    if settings.uds is None:
        listeners = [bind(settings.host, settings.port)]
    else:
        listeners = [bind_unix(settings.uds, int(settings.uds_mode, 8))]
    try:
        if settings.metrics_port is not None:
            listeners.append(bind(settings.host, settings.metrics_port))
            bound = {"metrics_port": listeners[1].getsockname()[1]}  # 0 has become a port
            settings = settings.model_copy(update=bound)
        if settings.grpc_port is not None:
            reserved.append(reserve(settings.host, settings.grpc_port))
            port = reserved[0].getsockname()[1]
            settings = settings.model_copy(update={"grpc_port": port})
        if any(map(address, settings.bundles)):
            settings = settings.model_copy(update={"bundles": download(settings.bundles)})
        limit = memory_limit()
        workers = settings.workers(usable_cores(), limit.size if limit else None)
        devices = places(settings)
        if len(devices) > 1:
            threads = settings.threads or max(usable_cores() // len(devices), 1)
            settings = settings.model_copy(update={"threads": threads})
            workers = workers or 1
        settings = settings.model_copy(update={"http_workers": workers})
        if workers:
            sys.exit(asyncio.run(Processes(settings, listeners, source, devices).run()))
        drop_early()
        # The main process of several processes does not need this module.
        from service.processes.single_process import serve_in_one_process

        serve_in_one_process(settings, listeners, source)
    finally:
        for listener in [*listeners, *reserved]:
            listener.close()  # also removes the file of a Unix socket


def download(bundles: Sequence[Path]) -> tuple[Path, ...]:
    """Return the directories of bundles, some of them at addresses. Exits with status 3 where one is refused.

    A process of its own downloads them, so that the libraries of stores take no memory later.
    """
    command = [*child_python(), "-m", "service.core.bundle_cache", *map(full_name, bundles)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise SystemExit(3)  # the reason is printed
    return tuple(map(Path, run.stdout.splitlines()))


def places(settings: Settings) -> list[Place]:
    """Return the devices of the settings. Exits with status 2 where the machine does not have them."""
    try:
        devices = device_places(settings.devices, settings.provider)
    except ValueError as error:
        raise fail(f"devices: {error}", 2) from None
    if len(devices) > 1 and settings.http_workers == 0:
        raise fail("http_workers 0 has one process, for one device: leave it unset", 2)
    if len(devices) > 1 and settings.memory_budget is not None:
        raise fail(
            "memory_budget is for one device: leave it unset, or set devices to one of them", 2
        )
    return devices


def parser(
    description: str = "Serve bundles over HTTP.", models: tuple[str, str] | None = None
) -> argparse.ArgumentParser:
    """Return a parser with a flag for every setting, whose help text is the field's description.

    models: name and help text of the positional arguments, if they are not bundles alone
    """
    parser = argparse.ArgumentParser(
        program_name("service"),
        description=description,
        usage=f"%(prog)s [options] [{models[0] if models else 'BUNDLE'} ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"quartet {__version__}")
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="print each setting and its origin, and end; the exit status is 2 if a setting is invalid",
    )
    group = parser.add_argument_group("models")
    for name, field in Settings.model_fields.items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        if name not in NOT_FLAGS:
            add_argument(group, name, field, models)
    return parser


def add_argument(
    group: argparse._ArgumentGroup, name: str, field: FieldInfo, models: tuple[str, str] | None
) -> None:
    if name == "bundles":
        metavar, text = models or ("BUNDLE", field.description)
        group.add_argument(name, nargs="*", metavar=metavar, default=argparse.SUPPRESS, help=text)
        return
    default = "unset" if field.default in (None, (), {}) else field.default
    kinds = (field.annotation, *get_args(field.annotation))
    choices = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    group.add_argument(
        flag(name),
        default=argparse.SUPPRESS,
        metavar="|".join(choices) or "VALUE",
        help=f"{field.description} (default {default}; {variable(name)})",
    )


def reserve(host: str, port: int) -> socket.socket:
    """Bind the port of gRPC, on which each HTTP process listens itself. Exits as `bind` does, and without the extra."""
    if importlib.util.find_spec("grpc") is None:
        raise fail(
            "grpc_port needs the extra grpc: pip install grpcio, or leave grpc_port unset", 2
        )
    reserved = bind(host, port)
    # After the bind, which fails where another service has set this option for the port.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return reserved


def bind(host: str, port: int) -> socket.socket:
    """Bind a port before any slow work. Exits with status 1 and one line when the port is busy.

    Only the bind ignores connections of an earlier service that still occupy the port. From then on, the port is also
    busy for a service that starts at the same time, although no process listens yet.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        reuse_address(listener, True)
        listener.bind((host, port))
        reuse_address(listener, False)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise fail(f"cannot listen on {host}:{port}: {reason}", 1) from None
    return listener


def bind_unix(path: Path, mode: int) -> socket.socket:
    """Bind the path of a Unix socket. Exits with status 1 and one line when that fails."""
    try:
        return UnixListener.bind_to(path, mode)
    except OSError as error:
        raise fail(f"cannot listen on {path}: {error.strerror or error}", 1) from None


def fail(message: str, status: int) -> SystemExit:
    """Print one line on standard error, and return the exception that ends the process: `raise fail(...)`."""
    print(f"quartet: {message}", file=sys.stderr)
    return SystemExit(status)


if __name__ == "__main__":
    main()
