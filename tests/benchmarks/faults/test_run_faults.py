"""The benchmark of faults reports what happened, for a server that recovers and for a server that does not."""

import json
import os
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import uvloop

from benchmarks.faults import overload, run_faults
from benchmarks.faults.run_faults import Site
from benchmarks.lib import rounds, servers
from benchmarks.lib.load_generator import REFUSED, Measured, request_bytes
from benchmarks.lib.servers import Call, Server

TEXTS = ["Ada Lovelace met the board of Siemens in Berlin.", "A quiet, generous film."]

# One process that answers each POST after a delay with 200 or a given status. It has no handler of SIGTERM.
LONE = """
import http.server, json, sys, time

class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.say(200)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        time.sleep(0.05 + len(body) / 5e7)  # so long that a look at the memory falls into it
        try:
            good = isinstance(json.loads(body)["inputs"], str)
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        self.say(200 if good else 500)

    def say(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256

Server(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def lone() -> Server:
    def command(python, model, port):
        return [sys.executable, "-c", LONE, str(port)]

    call = Call("/embed", lambda text: {"inputs": text}, lambda said: said)
    return Server("lone", command, calls={"embed": call}, ready="/")


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch):
    """Faults are over soon, and slow clients are few."""
    for name, value in {"CALM_S": 0.5, "WATCH_S": 2.0, "HANG_S": 3.0, "SLOW": 3}.items():
        monkeypatch.setattr(run_faults, name, value)


@contextmanager
def site(server, model, scratch):
    with servers.serving(server, model, scratch) as running:
        yield Site(server, running, rounds.encode_requests(server, "embed", TEXTS), slow_s=1.0)


def suffered(fault, server, model, scratch):
    """What a fault does to a server."""
    with site(server, model, scratch) as at:
        return uvloop.run(fault(at))


@pytest.mark.slow
@pytest.mark.exclusive
def test_a_server_without_restart_is_reported(tmp_path):
    """A killed process without a supervisor loses all requests that it had accepted."""
    found = suffered(run_faults.killed, lone(), tmp_path, tmp_path)

    assert "not restarted" == found["answers again after, s"]
    assert found["asked before, and told"]["cut off"] > 0


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.exclusive
def test_a_restarted_server_answers_again(tiny_bundle, tmp_path, monkeypatch):
    """Quartet loses no request when its inference process is killed, and the benchmark finds that process."""
    monkeypatch.setattr(run_faults, "WATCH_S", 20.0)
    found = suffered(run_faults.killed, servers.quartet("fp32"), tiny_bundle, tmp_path)

    assert 0 < found["answers again after, s"] < 20
    assert found["asked before, and told"]["200"] > 0
    assert not {"cut off", "no answer"} & found["asked before, and told"].keys()


@pytest.mark.slow
@pytest.mark.exclusive
def test_requests_that_are_lost_at_the_end_are_counted(tmp_path):
    """A server that ends at once closes the connections of requests in flight."""
    found = suffered(run_faults.terminated, lone(), tmp_path, tmp_path)

    assert found["ended after, s"] < 20
    assert found["lost"] > 0
    assert {"cut off"} == found["how"].keys()


@pytest.mark.slow
@pytest.mark.exclusive
def test_silence_is_noticed_by_its_probe(tmp_path, monkeypatch):
    """A stopped process sends nothing, and no supervisor restarts it."""
    monkeypatch.setattr(run_faults, "PROBE_S", 0.3)
    found = suffered(run_faults.stopped, lone(), tmp_path, tmp_path)

    assert "no answer" == found["as"]
    assert 0.3 <= found["readiness says no after, s"] < 2
    assert "not restarted" == found["answers again after, s"]


@pytest.mark.slow
@pytest.mark.exclusive
def test_each_bad_body_gets_an_error(tmp_path):
    """What a server answers is shown as it is, and so is what it makes of the next good one."""
    found = suffered(run_faults.malformed, lone(), tmp_path, tmp_path)

    assert "500" == found["half of it"] == found["an empty list"] == found["100,000 brackets"]
    assert "200" == found["then a good one"]


def test_bad_texts_are_put_where_texts_are():
    """Each server is asked in its own words, with something else for the text."""
    for name in ("quartet fp32", "infinity torch"):
        one = servers.named(name)
        body = Site(one, None, []).request_with([1]).partition(b"\r\n\r\n")[2]
        assert [1] in json.loads(body).values()
        assert one.calls["embed"].body("x").keys() == json.loads(body).keys()


@pytest.mark.slow
@pytest.mark.exclusive
def test_others_are_watched_meanwhile(tmp_path):
    """The report contains responses to a long text and to an invalid list, and to ordinary clients meanwhile."""
    found = suffered(run_faults.one_bad, lone(), tmp_path, tmp_path)

    assert ("200", "500", "200") == (
        found["a long text is told"],
        found["a list with a number is told"],
        found["then a good one"],
    )
    assert found["others before it, slowest ms"] >= 50


@pytest.mark.slow
@pytest.mark.exclusive
def test_a_large_body_takes_memory(tmp_path, monkeypatch):
    """What a server keeps of it is seen."""
    monkeypatch.setattr(run_faults, "LARGE_BYTES", 50_000_000)
    found = suffered(run_faults.large, lone(), tmp_path, tmp_path)

    assert "200" == found["told"]
    assert found["more at most, MB"] > 40


@pytest.mark.slow
@pytest.mark.exclusive
def test_slow_clients_are_counted(tmp_path):
    """A server that has patience with everybody holds them all."""
    found = suffered(run_faults.slow, lone(), tmp_path, tmp_path)

    assert 3 == found["held of 3 that send headers"] == found["held of 3 that send a body"]
    assert {"200"} == found["others meanwhile"].keys()


def test_a_missing_server_is_no_answer():
    """The report says that no server accepts connections."""

    async def found():
        return await run_faults.send_request(servers.free_port(), b"GET / HTTP/1.1\r\n\r\n")

    assert "nobody" == run_faults.status_name(uvloop.run(found()).status)


def test_the_table_has_a_column_for_each(capsys):
    """What one server has no figure for is left open."""
    run_faults.show({"a": {"x": 1.2345, "y": {"200": 3}}, "b": {"x": "never"}})

    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [["a", "b"], ["x", "1.23", "never"], ["y", "3", "200", "-"]] == lines


def test_answers_in_time_are_counted_apart():
    """Responses after the deadline are counted separately from responses in time."""
    late = overload.DEADLINE_MS / 1000 + 1
    stream = Measured(1, 2.0, np.array([0.1, 0.2, late]), 10.0, Counter())
    found = overload.Flooded(1.0, stream, (1.0, 1.0), 0.0, 0.0, {})

    assert (1.5, 1.0) == (found.figures()["goodput"], found.figures()["goodput_in_time"])


def test_a_client_disconnected_while_retrying_is_counted(tmp_path):
    """A crowd that the server ends has no goodput, and no figure is made up for it."""
    requests = [request_bytes("/embed", b"{}")]
    found = overload.retry_at_once(servers.free_port(), requests, 2, 0.2)

    assert (0, 1) == (found.requests, found.others[REFUSED])


def test_what_cannot_be_had_is_said(tmp_path, monkeypatch):
    """A server that does not start leaves a reason where its figures would be."""
    broken = replace(lone(), command=lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    found = run_faults.measure(broken, "faults", tmp_path, short=True)

    assert "ended at start" in found["not measured"]
    assert os.path.isdir(tmp_path)
