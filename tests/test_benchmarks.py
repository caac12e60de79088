"""The load generator counts what a server answered, and the padded server is fed the same weights."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench, revisions, tune
from benchmarks.bench import only_portable
from benchmarks.lib import onnxruntime_baseline, rounds, servers
from benchmarks.lib.environments import ROOT
from benchmarks.lib.load_generator import Measured, closed_loop, open_loop, request_bytes
from benchmarks.lib.servers import Running
from benchmarks.lib.traffic import MIXES, NEWS, texts
from service.core import bundle

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
REQUESTS = [request_bytes("/embed", body) for body in (b"1", b"22", b"333")]


@asynccontextmanager
async def listening(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that gives one answer to everything: its port, and the bodies that it saw."""
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                seen.append(await reader.readexactly(int(head.split(b"Content-Length: ")[1])))
                writer.write(answer)

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


@pytest.mark.nightly
@pytest.mark.exclusive
async def test_closed_loop():
    """Every connection keeps asking, in turn; what is answered within the window is counted and timed."""
    async with listening(ANSWER) as (port, seen):
        found = await closed_loop(port, REQUESTS, connections=3, seconds=1.0, warm_s=0.05)

    assert seen[:3] == [b"1", b"22", b"333"]
    assert 3 < found.requests == len(found.latencies) <= len(seen)
    assert found.rate == found.requests / 1.0
    assert 0 < found.percentile(50) <= found.percentile(99) < 250


@pytest.mark.nightly
@pytest.mark.exclusive
async def test_closed_loop_waits_until_all_were_answered():
    """The window begins when every connection was answered once; each response has the index of its request."""
    turns = asyncio.Semaphore()

    async def one_at_a_time(reader, writer):
        with closing(writer), suppress(asyncio.CancelledError):
            while await reader.read(2**16):
                async with turns:
                    await asyncio.sleep(0.02)
                    writer.write(ANSWER)

    async with await asyncio.start_server(one_at_a_time, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        found = await closed_loop(port, REQUESTS, connections=10, seconds=1.0, warm_s=0)

    assert 0.2 + 1.0 <= found.lasted < 20
    assert found.percentile(1) > 150  # there was no first one
    assert found.numbers is not None
    assert [0, 1, 2] == sorted({*found.numbers})
    assert found.requests == len(found.numbers)


async def test_closed_loop_stops_at_an_error():
    """An answer that is no success is no throughput."""
    async with listening(b"HTTP/1.1 429 Too Many Requests\r\n\r\n") as (port, _):
        with pytest.raises(RuntimeError, match="answered 429"):
            await closed_loop(port, REQUESTS, connections=1, seconds=0.2)


@pytest.mark.nightly
@pytest.mark.exclusive
async def test_open_loop():
    """Requests are sent at their own moments, and each is counted once."""
    async with listening(ANSWER) as (port, seen):
        found = await open_loop(port, REQUESTS, rate=300, seconds=0.5, warm_s=0.1)

    assert 100 < found.requests < 200  # 150 on average, by Poisson's law
    assert found.requests < len(seen)
    assert not found.others
    assert 0 < found.percentile(10) < 250


async def test_open_loop_counts_what_was_refused():
    """Another status is no success, and no error of the generator's either."""
    async with listening(b"HTTP/1.1 429 Too Many Requests\r\n\r\n") as (port, _):
        found = await open_loop(port, REQUESTS, rate=200, seconds=0.5, warm_s=0)
    assert found.requests == 0
    assert found.others.keys() == {429}


@pytest.mark.nightly
@pytest.mark.exclusive
async def test_open_loop_waits_for_no_one():
    """A server that stalls is still sent what is due, and its clients' wait is counted."""

    async def stall(reader, writer):
        with closing(writer), suppress(asyncio.CancelledError):
            while await reader.read(2**16):
                await asyncio.sleep(0.3)
                writer.write(ANSWER)

    async with await asyncio.start_server(stall, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        found = await open_loop(port, REQUESTS, rate=100, seconds=0.5, warm_s=0, most=4)

    assert (
        found.percentile(99) > 1000
    )  # four at a time, one in 0.3 s each: the last waits for seconds


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.exclusive
def test_rounds(tiny_bundle, tmp_path, capsys):
    """Each server is asked under each load in each round; one that cannot run is left out with its reason."""
    fp32 = servers.named("quartet fp32")
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    chosen = [
        fp32,
        replace(fp32, name="broken", command=lambda *_: command),
        replace(fp32, name="silent", calls={}),
    ]
    texts = ["Ada drew a comet.", "Ada"]
    options = {"connections": [1, 4], "rounds": 2, "seconds": 1.0}
    tested = rounds.measure(chosen, "embed", tiny_bundle, texts, tmp_path, **options)
    rows = rounds.summaries(tested)

    assert [len(windows) for windows in tested[0].closed.values()] == [2, 2]
    assert [*rows[0]["closed"]] == [1, 4]
    assert all(found["ratio"] == 1 and found["rate"] > 10 for found in rows[0]["closed"].values())
    assert 0 < rows[0]["closed"][4]["cpu_ms"] < 50
    assert rows[0]["peak_mb"] > 20
    assert "no such model" in rows[1]["skipped"]
    assert rows[2]["skipped"] == "does not offer it"
    loads = ["1 connections", "4 connections"]
    expected = [f"round {number} of 2: {load}" for number in (1, 2) for load in loads]
    assert expected == [line for line in capsys.readouterr().out.splitlines() if "round" in line]


def test_answers_count_by_their_size(monkeypatch):
    """A rate counts responses of mean size, independent of the responses in the window."""
    found = Measured(2.0, np.full(3, 0.1), numbers=np.array([0, 1, 1]))
    monkeypatch.setattr(rounds, "run_load", lambda _, load: (load.close(), (found, 0.6))[1])
    one = rounds.measure_closed(Running(0, None, 0.0), REQUESTS, np.array([0.5, 1.5]), 1, 2.0)
    assert (one.rate, one.cpu_ms) == (3.5 / 2, 200)


def test_ratios_are_taken_within_a_round():
    """A machine that is slow for a round is slow for both."""

    def windows(*rates):
        return [rounds.Window(8, rate, 1.0, 2.0, 3.0, 0.1) for rate in rates]

    found = rounds.summary(windows(20, 200, 60), windows(10, 100, 20))
    assert (found["rate"], found["ratio"], found["spread"]) == (60, 2, [2, 3])


def test_only_portable(tiny_bundle, tmp_path):
    """The padded server's bundle has the portable graph and no other, with the same weights."""
    full = bundle.load(tiny_bundle)
    padded = bundle.load(only_portable(full, tmp_path / "padded"))

    (graph,) = padded.manifest.graphs
    assert (graph.layout, graph.precision) == ("portable", "fp32")
    assert graph in full.manifest.graphs


@pytest.mark.parametrize("source", [NEWS, Path("nowhere")])
def test_texts(source):
    """The same texts every time, of real words or generated ones, in the lengths of the mix."""
    mixes = {name: texts(mix, source=source) for name, mix in MIXES.items()}

    lengths = {name: [len(text.split()) for text in found] for name, found in mixes.items()}
    means = {name: sum(found) / len(found) for name, found in lengths.items()}
    assert mixes == {name: texts(mix, source=source) for name, mix in MIXES.items()}
    assert 8 < means["short"] < 13 < 28 < means["news"] < 38 < 150 < means["documents"]
    assert min(lengths["news"]) < 10 < 150 < max(lengths["news"])


def test_layouts_to_tune():
    """The default comes first, and nothing comes twice."""
    for cores in (1, 2, 16):
        found = [server.env for server in tune.layouts("auto", cores)]
        assert found[0] == {}
        assert len({tuple(env.items()) for env in found}) == len(found)
        assert {"QUARTET_REPLICAS": str(cores)} in found


def test_only_what_was_better_in_every_round_is_advised():
    """A gain that comes and goes is noise."""
    chosen = tune.layouts("auto", 2)[:3]
    figures = [(1.0, 1.0), (1.3, 0.9), (1.1, 1.05)]  # ratio, worst of the rounds
    rows = [{"closed": {1: {"ratio": best, "spread": [least, 2]}}} for best, least in figures]
    assert tune.advice(chosen, rows, 1) == "QUARTET_ARENA=true (1.10 times the default)"
    assert tune.advice(chosen[:2], rows[:2], 1) == "leave the default"


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.exclusive
@pytest.mark.parametrize("command", [bench, revisions], ids=["bench", "revisions"])
def test_commands(tiny_bundle, tmp_path, monkeypatch, capsys, command):
    """Every server of a command answers under each load, and the last line has its figures as JSON."""
    monkeypatch.setattr(onnxruntime_baseline, "TRIAL_S", 0.01)
    monkeypatch.setattr(rounds, "WARM_S", 0.05)
    options = ["--rounds", "1", "--seconds", "0.2", "--connections", "1", "8"]
    before = [str(ROOT)] if command is revisions else []
    monkeypatch.setattr(sys, "argv", ["x", *before, "--bundle", str(tiny_bundle), *options])
    command.main()

    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = found["contenders"] if command is bench else [*chain(*found["results"].values())]
    assert not [row["skipped"] for row in rows if "skipped" in row]
    assert {("1", "8")} == {tuple(row["closed"]) for row in rows}
