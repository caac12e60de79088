"""From SIGTERM to the end: the service accepts no new client and loses no request."""

import http.client
import itertools
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest

from tests.e2e.calls import Call, embed_calls, same_answer
from tests.e2e.conftest import Server, children, readiness, serving, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Half of them in the dialects of other servers.
CALLS = embed_calls(["Ada drew a comet."] * 10)
HALF = 9  # bytes of a body
STANDARD_FILES = 3  # with this limit, a process can open no file


@contextmanager
def half_sent(server: Server, call: Call = CALLS[0]) -> Iterator[socket.socket]:
    """A request of which the service has the head and a part of the body."""
    path, body = call[0].encode(), body_of(call)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(
            b"POST %s HTTP/1.1\r\nHost: quartet\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n%s" % (path, len(body), body[:HALF])
        )
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")  # it is being answered
        yield client


def body_of(call: Call) -> bytes:
    return json.dumps(call[1]).encode()


def begin_drain(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    until(lambda: any('"draining"' in line for line in server.log))


@pytest.mark.promise("After SIGTERM the service becomes unready and completes accepted requests.")
def test_request_under_way_is_answered(tiny_bundle):
    """Requests whose bodies were incomplete are answered, in every dialect; no new ones are accepted."""
    replies = []
    with serving(tiny_bundle) as server:
        alone = [server.answer(*call) for call in CALLS]
        with ExitStack() as stack:
            clients = [stack.enter_context(half_sent(server, call)) for call in CALLS]
            begin_drain(server)
            assert readiness(server) in (503, None)
            until(lambda: readiness(server) is None)
            assert server.process.poll() is None
            for client, call in zip(clients, CALLS, strict=True):
                client.sendall(body_of(call)[HALF:])
                with client.makefile("rb") as wire:
                    replies.append(wire.read().partition(b"\r\n\r\n"))
        assert 0 == server.process.wait(30)

    for expected, (head, _, body) in zip(alone, replies, strict=True):
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close" in head.lower()
        assert same_answer(expected, json.loads(body))


@pytest.mark.promise(
    "After SIGTERM, a process without free descriptors still answers the requests that it accepted."
)
def test_a_drain_without_free_descriptors(tiny_bundle):
    """No process of the service can open a file from just before SIGTERM on, and a connection waits."""
    with serving(tiny_bundle) as server:
        (http_process,) = children(server)["http"]
        with half_sent(server) as client:
            os.kill(http_process, signal.SIGSTOP)
            with socket.create_connection(("127.0.0.1", server.port)):
                for pid in (http_process, server.process.pid):
                    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, (STANDARD_FILES, hard))
                server.process.send_signal(signal.SIGTERM)
                os.kill(http_process, signal.SIGCONT)
                until(lambda: any('"draining"' in line for line in server.log))
                time.sleep(0.5)
                client.sendall(body_of(CALLS[0])[HALF:])
                with client.makefile("rb") as wire:
                    assert wire.read().startswith(b"HTTP/1.1 200 ")
        assert 0 == server.process.wait(30)


def test_drain_ends_in_time(tiny_bundle):
    """A client that never completes its request gets an error at the end, and does not delay the end."""
    with serving(tiny_bundle, "--drain-s", "1") as server, half_sent(server) as client:
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        with client.makefile("rb") as wire:
            head, _, body = wire.read().partition(b"\r\n\r\n")
        server.process.wait(30)

    assert time.monotonic() - began < 30  # which is `drain_s` by default
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: " in head.lower()
    assert "draining" == json.loads(body)["error"]["code"]


class Call(NamedTuple):
    """When a call began and ended, in seconds, and what it returned."""

    began: float
    ended: float
    got: object


@contextmanager
def asking(*asked: Callable[[], object]) -> Iterator[list[list[Call]]]:
    """Call each function again and again while the block runs; yields the list of its calls."""
    over = threading.Event()
    came: list[list[Call]] = [[] for _ in asked]

    def ask(one: Callable[[], object], into: list[Call]) -> None:
        while not over.is_set():
            began = time.monotonic()
            got = one()
            into.append(Call(began, time.monotonic(), got))
            time.sleep(0.01)

    threads = [threading.Thread(target=ask, args=both) for both in zip(asked, came, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield came
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


def ask_over(
    client: http.client.HTTPConnection, call: Call, expected: object
) -> tuple[int, str, bool] | None:
    """Send a call, and return its status, its header `Connection`, and whether its answer is the expected one.

    Returns None where the connection is refused or closed.
    """
    try:
        client.request("POST", call[0], body_of(call), {"Content-Type": "application/json"})
        answer = client.getresponse()
        found = json.loads(answer.read())
        return answer.status, answer.headers.get("Connection", ""), same_answer(expected, found)
    except (ConnectionError, http.client.HTTPException):
        client.close()
        return None


@pytest.mark.promise("A client that connects during the drain delay is served.")
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.exclusive
def test_nobody_is_refused_before_the_delay_is_over(tiny_bundle, workers):
    """New connections and kept ones are served as ever while readiness says no; only then it ends."""
    delay_s = 3.0
    options = ["--drain-delay-s", str(delay_s), "--http-workers", workers]
    with serving(tiny_bundle, *options) as server:
        alone = [(call, server.answer(*call)) for call in CALLS]
        anew, again = itertools.cycle(alone), itertools.cycle(alone)
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)

        def ask_anew():
            client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            try:
                return ask_over(client, *next(anew))
            finally:
                client.close()

        def ask_again():
            return ask_over(kept, *next(again))

        with asking(ask_anew, ask_again, lambda: readiness(server)) as came:
            until(lambda: all(len(each) > 3 for each in came))
            told = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert 0 == server.process.wait(60)
            assert delay_s <= time.monotonic() - told
        kept.close()
    for each in came[:2]:
        during = [call.got for call in each if told <= call.began and call.ended < told + delay_s]
        assert during
        assert {(200, "", True)} == set(during)
    noticed = told + delay_s / 2
    late = [call.got for call in came[2] if noticed <= call.began and call.ended < told + delay_s]
    assert {503} == set(late)
    assert {call.got for call in came[2] if call.ended < told} <= {200}


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM] * 2])
def test_an_urgent_signal_skips_the_delay(tiny_bundle, workers, signals):
    """SIGINT drains at once, and so does a second SIGTERM; what was accepted is answered."""
    options = ["--drain-delay-s", "60", "--http-workers", workers]
    with serving(tiny_bundle, *options) as server, half_sent(server) as client:
        for earlier, number in enumerate(signals):
            time.sleep(0.5)
            if earlier:
                until(lambda: readiness(server) == 503)  # two at once would be one
            server.process.send_signal(number)
        until(lambda: any('"draining"' in line for line in server.log))
        client.sendall(body_of(CALLS[0])[HALF:])
        with client.makefile("rb") as wire:
            assert wire.readline().startswith(b"HTTP/1.1 200 ")
        assert 0 == server.process.wait(30)
