"""Keys and the metrics' own port, over real sockets and processes."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from time import monotonic

import pytest

from service.api.receipts import HEADER, unseal
from service.keys import make_key, record
from tests.e2e.conftest import Server, serving, until
from tests.e2e.test_processes import children

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY, PLAIN, SIGNING = make_key(), make_key(), make_key()
HEAD = "POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{}\r\n"
BODY = {"inputs": "Ada drew a comet."}


@pytest.fixture(scope="module", params=["0", "2"], ids=["one process", "two http processes"])
def locked(
    request: pytest.FixtureRequest, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with a key in a file, one in a variable, and a port for metrics."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(record("filed", KEY))
    flags = ["--metrics-port", "0", "--http-workers", request.param, "--api-keys", keys]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("QUARTET_API_KEY", PLAIN)
        monkeypatch.setenv("QUARTET_RECEIPT_KEY", SIGNING)
        with serving(tiny_bundle, *flags) as server:
            yield server


def metrics(server: Server) -> Server:
    """The server as seen through its port for metrics."""
    (url, *_) = re.findall(r'"metrics": ?"(http://[^"]+)"', "".join(server.log))
    return Server(server.process, url)


@pytest.mark.promise(
    "With keys, only the health checks and the pages are open to clients without a key."
)
@pytest.mark.parametrize(
    ("key", "tenant"), [(KEY, "filed"), (PLAIN, "default")], ids=["of a file", "of a variable"]
)
def test_a_key_opens_every_process(locked, key, tenant):
    """Keys of a file and of a variable reach all processes, but no command line; the log has only names of keys.

    All processes sign receipts.
    """
    headers = {"Authorization": f"Bearer {key}"}
    headers[HEADER] = "1"
    replies = [locked.post("/embed", BODY, headers) for _ in range(20)]
    assert [200] * 20 == [reply.status for reply in replies]
    assert all(unseal(reply.headers[HEADER.lower()], SIGNING)[1] for reply in replies)
    assert 401 == locked.post("/embed", BODY).status
    until(lambda: any(f'"tenant":"{tenant}"' in line for line in locked.log))
    assert not any(key in line for line in locked.log)
    pids = [locked.process.pid, *chain(*children(locked).values())]
    assert not any(key in Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


def test_both_ports_are_drained(tiny_bundle):
    """From SIGTERM on, both ports answer the requests in flight and accept no new connection."""
    with serving(tiny_bundle, "--metrics-port", "0", "--http-workers", "2") as server:
        until(lambda: sum('"serving"' in line for line in server.log) == 2, 60)
        ports = [server.port, metrics(server).port]
        with socket.create_connection(("127.0.0.1", server.port)) as under_way:
            under_way.sendall(HEAD.format(17, "").encode())
            os.kill(server.process.pid, signal.SIGTERM)
            until(lambda: all(map(refused, ports)))
            assert server.process.poll() is None
        assert 0 == server.process.wait(60)


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.promise("A key that is removed stops working within seconds, without a restart.")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_keys_change_while_the_service_runs(workers, tiny_bundle, tmp_path):
    """Every process takes the keys of a changed file, keeps them when it breaks, and counts rates on."""
    path = tmp_path / "keys.toml"
    slow, old, new = make_key(), make_key(), make_key()
    rate = "requests_per_minute = 2\n"  # one for each of two processes
    path.write_text(record("slow", slow) + rate + record("old", old))
    flags = ["--api-keys", path, "--http-workers", workers]
    with serving(tiny_bundle, *flags) as server:

        def answers(key):
            headers = {"Authorization": f"Bearer {key}"}
            return [server.post("/embed", BODY, headers).status for _ in range(20)]

        def statuses(key):
            return set(answers(key))

        assert {200} == statuses(old)
        assert {401} == statuses(new)
        began = monotonic()
        before = answers(slow)
        assert {200, 429} == set(before)
        pids = sorted(chain(*children(server).values()))

        path.write_text(record("slow", slow) + rate + record("new", new))
        until(lambda: statuses(old) == {401}, 5)
        assert {200} == statuses(new)
        # The kernel chooses the process that takes a connection: one of them may not have counted a request yet.
        after = answers(slow)
        assert {200, 429} >= set(after)
        refilled = (monotonic() - began) / 30
        assert 2 + refilled >= (before + after).count(200)

        path.write_text("[keys.new")
        until(lambda: any("cannot read API keys" in line for line in server.log), 5)
        until(lambda: any("keys.toml: " in line for line in server.log if "cannot read" in line), 5)
        assert {200} == statuses(new)

        path.write_text(record("old", old))
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: statuses(old) == {200}, 5)
        assert {401} == statuses(new)

        if workers == "2":
            os.kill(children(server)["http"][0], signal.SIGKILL)  # the next has the keys of now
            until(lambda: sum('"serving"' in line for line in server.log) == 3, 60)
            assert {200} == statuses(old)
        else:
            assert pids == sorted(chain(*children(server).values()))


def test_children_do_not_have_the_key(tiny_bundle):
    """The environment of the other processes is readable for their user, and has no key."""
    env = {**os.environ, "QUARTET_API_KEY": make_key(), "QUARTET_MAX_WAIT_MS": "0"}
    with serving(tiny_bundle, env=env) as server:
        for pid in [*children(server)["http"], *children(server)["inference"]]:
            assert b"QUARTET_API_KEY" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert 401 == server.post("/embed", {"inputs": "a"}).status
        key = {"Authorization": f"Bearer {env['QUARTET_API_KEY']}"}
        assert 200 == server.post("/embed", {"inputs": "a"}, key).status
