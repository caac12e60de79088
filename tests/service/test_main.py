import asyncio
import hashlib
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from fastapi import FastAPI
from structlog.typing import EventDict

from service.__main__ import bind, read_settings
from service.server import Server, url_of
from service.settings import NOT_FLAGS, Settings

CLIENTS = 16
BODY = b'{"inputs": "a"}'
REQUEST = (
    b"POST /classify HTTP/1.1\r\nHost: quartet\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


def test_flags_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags win over variables, and both over defaults."""
    monkeypatch.setenv("QUARTET_PORT", "1")
    monkeypatch.setenv("QUARTET_REPLICAS", "2")
    settings = read_settings(["bundles/a", "bundles/b", "--port", "3", "--spin", "true"])
    assert settings == Settings(
        bundles=(Path("bundles/a"), Path("bundles/b")), port=3, replicas=2, spin=True
    )


def test_bundles_are_found_when_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What lies in `bundles/` is served by default, in the order of names."""
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a", ".a.partial"):
        Path("bundles", name).mkdir(parents=True)
        Path("bundles", name, "manifest.json").touch()
    Path("bundles/notes").mkdir()
    assert read_settings([]).bundles == (Path("bundles/a"), Path("bundles/b"))


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "quartet: name a bundle to serve: there is none in bundles/\n"),
        (["x", "--port", "http"], "quartet: --port (QUARTET_PORT): "),
        (["x", "--precision", "int4"], "quartet: --precision (QUARTET_PRECISION): "),
    ],
)
def test_bad_settings_end_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    line: str,
) -> None:
    """The line names the flag and the variable; the status is 2."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        read_settings(argv)
    said = capsys.readouterr().err
    assert (caught.value.code, said.count("\n")) == (2, 1)
    assert said.startswith(line)


def test_keys_of_all_places_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file's, one variable's and the other's; nothing but hashes is handed on."""
    plain = "0123456789abcdef"
    (tmp_path / "keys.toml").write_text(f'[keys.filed]\nsha256 = "{"a" * 64}"')
    monkeypatch.setenv("QUARTET_API_KEY", plain)
    monkeypatch.setenv("QUARTET_KEYS", f'{{"told": {{"sha256": "{"b" * 64}"}}}}')
    settings = read_settings(["x", "--api-keys", str(tmp_path / "keys.toml")])
    assert {name: key.sha256 for name, key in settings.keys.items()} == {
        "filed": "a" * 64,
        "told": "b" * 64,
        "default": hashlib.sha256(plain.encode()).hexdigest(),
    }
    assert Settings.model_validate_json(settings.model_dump_json()) == settings
    assert plain not in settings.model_dump_json()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("API_KEY", "", "quartet: QUARTET_API_KEY: must be at least 16"),
        ("API_KEY", "0123456789 abcdef", "must be at least 16 visible ASCII characters"),
        ("KEYS", "{", "quartet: QUARTET_KEYS: unexpected end of data"),
        ("KEYS", '{"a": {"sha256": "0"}}', "quartet: QUARTET_KEYS: String should match pattern"),
        ("API_KEYS", "nowhere.toml", "nowhere.toml: No such file or directory"),
        ("API_KEYS", "bad.toml", "bad.toml: keys.a.sha256: Field required"),
    ],
)
def test_bad_keys_keep_the_service_from_starting(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    said: str,
) -> None:
    """A service whose keys cannot be read is not left open."""
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("[keys.a]")
    monkeypatch.setenv(f"QUARTET_{variable}", value)
    with pytest.raises(SystemExit) as caught:
        read_settings(["x"])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", NOT_FLAGS)
def test_keys_are_no_flags(name: str) -> None:
    """Whoever can list processes can read their command lines."""
    with pytest.raises(SystemExit) as caught:
        read_settings(["x", f"--{name.replace('_', '-')}", "0123456789abcdef"])
    assert caught.value.code == 2


@pytest.mark.parametrize("name", Settings.model_fields.keys() - NOT_FLAGS - {"bundles"})
def test_every_setting_is_a_flag(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The help text has each setting by both its names."""
    with pytest.raises(SystemExit) as caught:
        read_settings(["--help"])
    said = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"--{name.replace('_', '-')} " in said
    assert f"QUARTET_{name.upper()})" in said.replace("\n", "")


def test_a_free_port_is_taken() -> None:
    """Port 0 is one that the system chooses, and the address says which."""
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_busy_port_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
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


class Watched(Server):
    """A server that says when it serves."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(app, Settings())
        self.serving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()


def ask(port: int) -> str:
    """How one request on a connection of its own ends."""
    try:
        connection = socket.create_connection(("127.0.0.1", port))
    except ConnectionError:
        return "refused"
    with connection, suppress(ConnectionError):
        connection.sendall(REQUEST)
        if connection.recv(4096).startswith(b"HTTP/1.1 200 OK"):
            return "answered"
    return "lost"


def keep_asking(port: int) -> Counter[str]:
    ends = Counter[str]()
    while not ends["refused"]:
        ends[ask(port)] += 1
    return ends


async def test_a_drain_loses_nobody(
    app: FastAPI, lines: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the signal on, whoever could connect is answered, and then nobody can."""
    monkeypatch.setattr("service.server.GRACE_S", 1.5)  # a loaded machine's clients are slow
    server, listener = Watched(app), bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve([listener]))
    await server.serving.wait()
    with ThreadPoolExecutor(CLIENTS) as clients:
        asking = [clients.submit(keep_asking, port) for _ in range(CLIENTS)]
        await asyncio.to_thread(ask, port)
        server.handle_exit(signal.SIGTERM, None)
        await serving
    ends = sum((asked.result() for asked in asking), Counter[str]())
    assert (ends["answered"] > 0, ends["lost"]) == (True, 0)
    assert {"event": "draining", "log_level": "info", "seconds": 30.0} in lines
