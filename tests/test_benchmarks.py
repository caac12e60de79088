"""The load generator counts what a server answered, and the padded server is fed the same weights."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plot, rounds, servers, tune
from benchmarks.bench import only_portable
from benchmarks.limit import flops_per_token, texts_per_second
from benchmarks.load import closed_loop, open_loop, request_bytes
from benchmarks.traffic import MIXES, NEWS, texts
from service import bundle
from service.encode import Encoder

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


async def test_closed_loop() -> None:
    """Every connection keeps asking, in turn; what is answered within the window is counted and timed."""
    async with listening(ANSWER) as (port, seen):
        found = await closed_loop(port, REQUESTS, connections=3, seconds=0.2, warm_s=0.05)

    assert seen[:3] == [b"1", b"22", b"333"]
    assert 3 < found.requests == len(found.latencies) <= len(seen)
    assert found.rate == found.requests / 0.2
    assert 0 < found.percentile(50) <= found.percentile(99) < 250


async def test_closed_loop_stops_at_an_error() -> None:
    """An answer that is no success is no throughput."""
    async with listening(b"HTTP/1.1 429 Too Many Requests\r\n\r\n") as (port, _):
        with pytest.raises(RuntimeError, match="answered 429"):
            await closed_loop(port, REQUESTS, connections=1, seconds=0.2)


async def test_open_loop() -> None:
    """Requests are sent at their own moments, and each is counted once."""
    async with listening(ANSWER) as (port, seen):
        found = await open_loop(port, REQUESTS, rate=300, seconds=0.5, warm_s=0.1)

    assert found.offered is not None
    assert 100 < found.requests < 200  # 150 on average, by Poisson's law
    assert found.requests == found.offered * 0.5 < len(seen)
    assert not found.others
    assert 0 < found.percentile(99) < 250


async def test_open_loop_counts_what_was_refused() -> None:
    """Another status is no success, and no error of the generator's either."""
    async with listening(b"HTTP/1.1 429 Too Many Requests\r\n\r\n") as (port, _):
        found = await open_loop(port, REQUESTS, rate=200, seconds=0.5, warm_s=0)
    assert found.requests == 0
    assert found.others.keys() == {429}


async def test_open_loop_waits_for_no_one() -> None:
    """A server that stalls is still sent what is due, and its clients' wait is counted."""

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.CancelledError):
            while await reader.read(2**16):
                await asyncio.sleep(0.3)
                writer.write(ANSWER)

    async with await asyncio.start_server(stall, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        found = await open_loop(port, REQUESTS, rate=100, seconds=0.5, warm_s=0, most=4)

    assert found.connections == 4
    assert (
        found.percentile(99) > 1000
    )  # four at a time, one in 0.3 s each: the last waits for seconds


@pytest.mark.e2e
def test_rounds(tiny_bundle: Path, tmp_path: Path) -> None:
    """Each server is asked under each load in each round; one that cannot run is left out with its reason."""
    fp32 = servers.named("quartet fp32")
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    chosen = [
        fp32,
        replace(fp32, name="broken", command=lambda *_: command),
        replace(fp32, name="silent", calls={}),
    ]
    said: list[str] = []
    texts = ["Ada drew a comet.", "Ada"]
    options = {"connections": [1, 4], "rates": [30], "rounds": 2, "seconds": 0.5}
    tested = rounds.measure(
        chosen, "embed", tiny_bundle, texts, tmp_path, say=said.append, **options
    )
    rows = rounds.summaries(tested)

    assert [len(windows) for windows in tested[0].closed.values()] == [2, 2]
    assert [*rows[0]["closed"], *rows[0]["open"]] == [1, 4, 30]
    assert all(found["ratio"] == 1 and found["rate"] > 10 for found in rows[0]["closed"].values())
    assert 0 < rows[0]["closed"][4]["cpu_ms"] < 50
    assert rows[0]["peak_mb"] > 20
    assert "no such model" in rows[1]["skipped"]
    assert rows[2]["skipped"] == "does not offer it"
    assert [line for line in said if "round" in line] == [
        f"round {number} of 2: quartet fp32" for number in (1, 2)
    ]


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that is slow for a round is slow for both."""

    def windows(*rates: float) -> list[rounds.Window]:
        return [rounds.Window(8, rate, 1.0, 2.0, 3.0, 0.1) for rate in rates]

    found = rounds.summary(windows(20, 200, 60), windows(10, 100, 20))
    assert (found["rate"], found["ratio"], found["spread"]) == (60, 2, [2, 3])


def test_only_portable(tiny_bundle: Path, tmp_path: Path) -> None:
    """The padded server's bundle has the portable graph and no other, with the same weights."""
    full = bundle.load(tiny_bundle)
    padded = bundle.load(only_portable(full, tmp_path / "padded"))

    (graph,) = padded.manifest.graphs
    assert (graph.layout, graph.precision) == ("portable", "fp32")
    assert graph in full.manifest.graphs


@pytest.mark.parametrize("source", [NEWS, Path("nowhere")])
def test_texts(source: Path) -> None:
    """The same texts every time, of real words or generated ones, in the lengths of the mix."""
    mixes = {name: texts(mix, source=source) for name, mix in MIXES.items()}

    lengths = {name: [len(text.split()) for text in found] for name, found in mixes.items()}
    means = {name: sum(found) / len(found) for name, found in lengths.items()}
    assert mixes == {name: texts(mix, source=source) for name, mix in MIXES.items()}
    assert 8 < means["short"] < 13 < 28 < means["news"] < 38 < 150 < means["documents"]
    assert min(lengths["news"]) < 10 < 150 < max(lengths["news"])


def test_operations_per_token(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    """Counted from the graph, they are what the model's shape says, and the same for both precisions."""
    full = bundle.load(tiny_bundle)
    encoder = Encoder.from_file(full.file("tokenizer.json"), full.manifest.max_length)
    encodings = [item.windows[0] for item in encoder.texts(["Ada drew a comet.", "Ada"])]
    config = json.loads((tiny_checkpoint / "config.json").read_text())

    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    lengths = [len(encoding) for encoding in encodings]
    attention = 4 * hidden * sum(n * n for n in lengths) / sum(lengths)
    products = 2 * (4 * hidden**2 + 2 * hidden * config["intermediate_size"])
    for precision in ("fp32", "int8"):
        found = flops_per_token(full, precision, encodings)
        assert found == pytest.approx(layers * (products + attention))


def test_bare_sessions_share_the_work() -> None:
    """Every text is run once, whoever of the sessions runs it."""
    ran: list[int] = []
    assert texts_per_second([ran.extend, ran.extend], range(100), size=8) > 0
    assert sorted(ran[-100:]) == [*range(100)]


def test_layouts_to_tune() -> None:
    """The default comes first, and nothing comes twice."""
    for cores in (1, 2, 16):
        found = [server.env for server in tune.layouts("auto", cores)]
        assert found[0] == {}
        assert len({tuple(env.items()) for env in found}) == len(found)
        assert {"QUARTET_REPLICAS": str(cores)} in found


def test_only_what_was_better_in_every_round_is_advised() -> None:
    """A gain that comes and goes is noise."""
    chosen = tune.layouts("auto", 2)[:3]
    figures = [(1.0, 1.0), (1.3, 0.9), (1.1, 1.05)]  # ratio, worst of the rounds
    rows = [{"closed": {1: {"ratio": best, "spread": [least, 2]}}} for best, least in figures]
    assert tune.advice(chosen, rows, 1) == "QUARTET_REPLICAS=1 (1.10 times the default)"
    assert tune.advice(chosen[:2], rows[:2], 1) == "leave the default"


def test_a_picture_of_a_comparison(tmp_path: Path) -> None:
    """Of whoever answered; who was left out has no line."""
    load = {"rate": 3.0, "p99_ms": 4.0}
    rows = [
        {"server": "quartet fp32", "closed": {"8": load, "1": load}},
        {"server": "absent", "closed": {}, "skipped": "not here"},
    ]
    plot.draw(rows, tmp_path / "picture.png", "two servers")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
