"""The latency of one connection is compared with the bare session, by precision and length."""

import socket
import threading
from pathlib import Path

import pytest

from benchmarks import one_connection
from benchmarks.one_connection import Measured, exchange, goals, limits, show


def answering(*chunks: bytes) -> socket.socket:
    """Return the client's end of a connection whose server sends these chunks after it has received something."""
    client, server = socket.socketpair()

    def answer() -> None:
        with server:
            server.recv(100)
            for chunk in chunks:
                server.sendall(chunk)

    threading.Thread(target=answer, daemon=True).start()
    return client


def test_a_response_in_parts_is_read_to_its_end() -> None:
    head = b"HTTP/1.1 200 OK\r\nServer-Timing: total;dur=1\r\nContent-Length: 4\r\n\r\n"
    with answering(head[:20], head[20:] + b"ab", b"cd") as connection:
        spent, timing = exchange(connection, b"GET")
    assert timing == "total;dur=1"
    assert spent > 0


def test_a_refusal_is_an_error() -> None:
    with (
        answering(b"HTTP/1.1 503 Bad\r\nContent-Length: 3\r\n\r\nnot") as connection,
        pytest.raises(RuntimeError, match=r"503 Bad.*not"),
    ):
        exchange(connection, b"GET")


def found(p50: float) -> one_connection.Rounds:
    parts = {"queue": 0.5, "inference": 2.0, "total": 3.0}
    own = {"5": Measured(p50, 0.5, parts)}
    bare = {precision: {"1": {"5": 4.0}, "2": {"5": 2.0}} for precision in ("fp32", "int8")}
    return {"bare": [bare], "fp32": [own], "int8": [own]}


def test_the_limit_is_of_the_fastest_bare_session(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, best, limit),) = limits(found(3.0), "fp32", "5")
    assert (best, limit) == (2.0, pytest.approx(1.05 * 2.0 + 0.5 + 0.4))
    assert all(check.as_json()["met"] for check in goals(found(3.0)))
    assert not any(check.as_json()["met"] for check in goals(found(3.1)))

    show(found(3.0))
    shown = capsys.readouterr().out
    assert "fp32     5        3.00    2.00    0.50    3.00    0.00   1: 4.00, 2: 2.00" in shown
    assert "      0.50       2.00       3.00       0.50       0.00" in shown  # 0.5 ms has no name


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exclusive
def test_real_processes_are_measured(tiny_bundle: Path, tmp_path: Path) -> None:
    found = one_connection.measure(tiny_bundle, tmp_path, lengths=(5, 9), number=2, requests=3)
    assert found.keys() == {"bare", "fp32", "int8"}
    names = ["parse", "encode", "queue", "inference", "return", "decode", "total"]
    for precision in ("fp32", "int8"):
        assert [own.keys() for own in found[precision]] == [{"5", "9"}] * 2
        for own in found[precision]:
            for one in own.values():
                assert [*one.parts] == names
                assert 0 < one.live < one.p50
                total = one.parts["total"]
                assert 0 < sum(one.parts.values()) - total <= total < one.p50
    assert len([*goals(found)]) == 4
