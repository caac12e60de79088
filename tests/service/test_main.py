import asyncio
import re
import resource
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from service import __main__ as service_main
from service.__main__ import bind, bind_unix, main, reserve, serve
from service.core import device_table
from service.core.cpu import CPU
from service.core.cuda import CUDA
from service.engines.memory_limit import MemoryLimit
from service.processes import single_process
from service.server.server import Server
from service.server.sockets import url_of
from service.settings import Settings
from service.variables import NOT_FLAGS

CLIENTS = 16
BODY = b'{"inputs": "a"}'
REQUEST = (
    b"POST /classify HTTP/1.1\r\nHost: quartet\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


def test_flags_are_settings(capsys):
    """Arguments are bundles, and flags what they say."""
    main(["bundles/a", "bundles/b", "--port", "3", "--spin", "true", "--check-config"])
    said = capsys.readouterr().out
    assert re.search(r"^bundles +bundles/a, bundles/b +arguments$", said, re.M)
    assert re.search(r"^port +3 +--port$", said, re.M)
    assert re.search(r"^spin +true +--spin$", said, re.M)


@pytest.mark.parametrize(
    ("flags", "gpu", "limit_mib", "workers"),
    [
        ([], False, None, 1),
        ([], True, None, 4),
        ([], False, 448, 1),
        ([], False, 447, 0),
        (["--provider", "cpu"], True, None, 1),
        (["--http-workers", "2"], True, 300, 2),
        (["--http-workers", "0"], True, None, 0),
    ],
)
def test_http_workers_follow_the_machine(flags, gpu, limit_mib, workers, monkeypatch):
    """Unless they are set, there are more of them where a GPU computes, and none where memory is scarce."""
    served = []

    class Started:
        def __init__(self, settings: Settings, *_: object) -> None:
            served.append(settings.http_workers)

        async def run(self) -> int:
            return 0

    listener = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1), close=lambda: None)
    limit = MemoryLimit(limit_mib * 2**20, Path()) if limit_mib else None
    monkeypatch.setattr(service_main, "memory_limit", lambda: limit)
    monkeypatch.setattr(service_main, "bind", lambda *_: listener)
    monkeypatch.setattr(
        device_table, "KINDS", (replace(CUDA, is_present=lambda: gpu, number=lambda: 1), CPU)
    )
    monkeypatch.setattr(service_main, "usable_cores", lambda: 16)
    monkeypatch.setattr(service_main, "Processes", Started)
    monkeypatch.setattr(
        single_process, "serve_in_one_process", lambda settings, *_: Started(settings)
    )
    with suppress(SystemExit):
        main(["bundles/a", "--port", "0", *flags])
    assert [workers] == served


@pytest.mark.parametrize("more", [[], ["--check-config"]])
@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "quartet: name a bundle to serve: there is none in bundles/\n"),
        (["x", "--port", "http"], "quartet: --port: Input should be"),
        (["x", "--precision", "int4"], "quartet: --precision: Input should be"),
    ],
)
def test_bad_settings_end_with_one_line(monkeypatch, tmp_path, capsys, argv, line, more):
    """The line names where the setting is from; the status is 2."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main([*argv, *more])
    said = capsys.readouterr()
    assert (caught.value.code, said.err.count("\n"), said.out) == (2, 1, "")
    assert said.err.startswith(line)


@pytest.mark.parametrize("name", sorted(NOT_FLAGS))
def test_keys_are_no_flags(name):
    """Every user of a machine can read command lines."""
    with pytest.raises(SystemExit) as caught:
        main(["x", f"--{name.replace('_', '-')}", "0123456789abcdef"])
    assert caught.value.code == 2


@pytest.mark.parametrize("name", sorted(Settings.model_fields.keys() - NOT_FLAGS - {"bundles"}))
def test_every_setting_is_a_flag(capsys, name):
    """The help text has each setting by both its names, with its choices."""
    schema = Settings.model_json_schema()["properties"][name]
    choices = [word for kind in (schema, *schema.get("anyOf", ())) for word in kind.get("enum", ())]
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    said = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"--{name.replace('_', '-')} {'|'.join(choices)}" in said
    assert f"QUARTET_{name.upper()})" in said.replace("\n", "")


def test_a_free_port_is_taken():
    """Port 0 is one that the system chooses, and the address says which."""
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_grpc_port_needs_its_extra(capsys, monkeypatch):
    """Without the packages, a start with grpc_port ends with one line."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        reserve("127.0.0.1", 0)
    assert 2 == ended.value.code
    assert "pip install grpcio" in capsys.readouterr().err


def test_processes_share_the_port_of_grpc():
    """The reserved port does not accept; others that allow it can listen there."""
    with reserve("127.0.0.1", 0) as reserved, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(reserved.getsockname())
        listener.listen()
        for _ in range(20):
            with socket.create_connection(reserved.getsockname()):
                listener.accept()[0].close()


@pytest.mark.parametrize("take", [bind, reserve])
def test_a_port_that_no_process_listens_on_yet_is_busy(capsys, take):
    """The second of two services that start at the same time ends, also where their processes share the port."""
    with take("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            take("127.0.0.1", port)
    assert 1 == caught.value.code
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


async def test_a_service_starts_again_on_its_port(app):
    """Connections that an earlier service has closed do not keep the port busy."""
    server = Watched(app)
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    serving = asyncio.create_task(server.serve([listener]))
    await server.serving.wait()
    client = await asyncio.to_thread(connect, address)
    server.service.shutdown.receive_signal(signal.SIGTERM)
    await serving  # the service closes the connection first
    client.close()
    bind(*address).close()


def test_a_busy_port_ends_with_one_line(capsys):
    """The line names the address; the status is 1."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            bind("127.0.0.1", port)
    said = capsys.readouterr().err
    assert (caught.value.code, said) == (
        1,
        f"quartet: cannot listen on 127.0.0.1:{port}: Address already in use\n",
    )


def test_a_unix_socket_in_use_ends_with_one_line(tmp_path, capsys):
    """The line names the path; the status is 1."""
    path = tmp_path / "s"
    with bind_unix(path, 0o600), pytest.raises(SystemExit) as caught:
        bind_unix(path, 0o600)
    expected = f"quartet: cannot listen on {path}: Address already in use\n"
    assert (1, expected) == (caught.value.code, capsys.readouterr().err)


class Watched(Server):
    """A server that says when it serves."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(app, Settings())
        self.serving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()


Address = tuple[str, int] | str  # of a port, or the path of a Unix socket


def connect(address: Address) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def ask(address: Address) -> str:
    """How one request on a connection of its own ends."""
    try:
        connection = connect(address)
    except (ConnectionError, FileNotFoundError):
        return "refused"
    with connection, suppress(ConnectionError):
        connection.sendall(REQUEST)
        if connection.recv(4096).startswith(b"HTTP/1.1 200 OK"):
            return "answered"
    return "lost"


def keep_asking(address: Address) -> Counter[str]:
    ends = Counter[str]()
    while not ends["refused"]:
        ends[ask(address)] += 1
    return ends


@pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])
@pytest.mark.parametrize("kind", ["tcp", "unix", "tcp without filters"])
async def test_a_drain_loses_no_client(kind, app, lines, monkeypatch, tmp_path):
    """From the signal on, every client that could connect is answered, and then none can connect."""
    monkeypatch.setattr("service.server.server.GRACE_S", 1.5)  # a loaded machine's clients are slow
    if kind == "tcp without filters":
        monkeypatch.setattr("service.server.sockets.SO_ATTACH_FILTER", -1)  # as on another system
    listener = bind_unix(tmp_path / "s", 0o600) if kind == "unix" else bind("127.0.0.1", 0)
    server, address = Watched(app), listener.getsockname()
    serving = asyncio.create_task(server.serve([listener]))
    await server.serving.wait()
    with ThreadPoolExecutor(CLIENTS) as clients:
        asking = [clients.submit(keep_asking, address) for _ in range(CLIENTS)]
        await asyncio.to_thread(ask, address)
        server.service.shutdown.receive_signal(signal.SIGTERM)
        await serving
    ends = sum((asked.result() for asked in asking), Counter[str]())
    assert (ends["answered"] > 0, ends["lost"]) == (True, 0)
    assert {"event": "draining", "log_level": "info", "limit_s": 30.0} in lines


def test_few_files(monkeypatch, capsys):
    """A limit of open files with which no process works ends the service at start."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    with pytest.raises(SystemExit) as ended:
        serve(Settings())
    assert 2 == ended.value.code
    expected = "quartet: a process may open 24 files, and needs 64 at least: raise `ulimit -n`\n"
    assert expected == capsys.readouterr().err
