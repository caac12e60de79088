"""The load generator counts what a server answered, and the padded server is fed the same weights."""

import asyncio
import gzip
import json
import lzma
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks import bench, plot, tables, tune
from benchmarks.bench import only_portable
from benchmarks.lib import onnxruntime_baseline, rounds, servers
from benchmarks.lib.goal_checks import Check
from benchmarks.lib.load_generator import Measured, closed_loop, open_loop, request_bytes
from benchmarks.lib.servers import NOOP, Running
from benchmarks.lib.traffic import MIXES, NEWS, texts
from benchmarks.limit import flops_per_token
from benchmarks.training import pretraining
from export.passes.row_steps import OUTLIERS
from model.data import checksums
from service.core import bundle
from service.core.encode import Encoder
from tests import samples

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


@pytest.mark.exclusive
async def test_closed_loop() -> None:
    """Every connection keeps asking, in turn; what is answered within the window is counted and timed."""
    async with listening(ANSWER) as (port, seen):
        found = await closed_loop(port, REQUESTS, connections=3, seconds=1.0, warm_s=0.05)

    assert seen[:3] == [b"1", b"22", b"333"]
    assert 3 < found.requests == len(found.latencies) <= len(seen)
    assert found.rate == found.requests / 1.0
    assert 0 < found.percentile(50) <= found.percentile(99) < 250


@pytest.mark.exclusive
async def test_closed_loop_waits_until_all_were_answered() -> None:
    """The window begins when every connection was answered once; each response has the index of its request."""
    turns = asyncio.Semaphore()

    async def one_at_a_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


async def test_closed_loop_stops_at_an_error() -> None:
    """An answer that is no success is no throughput."""
    async with listening(b"HTTP/1.1 429 Too Many Requests\r\n\r\n") as (port, _):
        with pytest.raises(RuntimeError, match="answered 429"):
            await closed_loop(port, REQUESTS, connections=1, seconds=0.2)


@pytest.mark.exclusive
async def test_open_loop() -> None:
    """Requests are sent at their own moments, and each is counted once."""
    async with listening(ANSWER) as (port, seen):
        found = await open_loop(port, REQUESTS, rate=300, seconds=0.5, warm_s=0.1)

    assert found.offered is not None
    assert 100 < found.requests < 200  # 150 on average, by Poisson's law
    assert found.requests == found.offered * 0.5 < len(seen)
    assert not found.others
    assert 0 < found.percentile(10) < 250


async def test_open_loop_counts_what_was_refused() -> None:
    """Another status is no success, and no error of the generator's either."""
    async with listening(b"HTTP/1.1 429 Too Many Requests\r\n\r\n") as (port, _):
        found = await open_loop(port, REQUESTS, rate=200, seconds=0.5, warm_s=0)
    assert found.requests == 0
    assert found.others.keys() == {429}


@pytest.mark.exclusive
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
@pytest.mark.slow
@pytest.mark.exclusive
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
    options = {"connections": [1, 4], "rates": [30], "rounds": 2, "seconds": 1.0}
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
    loads = ["1 connections", "4 connections", "30/s"]
    expected = [f"round {number} of 2: {load}" for number in (1, 2) for load in loads]
    assert expected == [line for line in said if "round" in line]


def test_answers_count_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate counts responses of mean size, independent of the responses in the window."""
    found = Measured(1, 2.0, np.full(3, 0.1), numbers=np.array([0, 1, 1]))
    monkeypatch.setattr(rounds, "run_load", lambda _, load: (load.close(), (found, 0.6))[1])
    one = rounds.measure_closed(Running(0, None, 0.0), REQUESTS, np.array([0.5, 1.5]), 1, 2.0)
    assert (one.rate, one.cpu_ms) == (3.5 / 2, 200)


@pytest.mark.exclusive
async def test_self_measured_with_a_noop_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a contender measures itself, the no-op server gets requests at the given rate, and none afterwards."""
    window = rounds.Window(8, 1.0, 1.0, 2.0, 3.0, 0.0)
    monkeypatch.setattr(rounds, "self_measured", lambda *_: (time.sleep(1.0), window)[1])
    async with listening(ANSWER) as (port, seen):
        noop = Running(port, None, 0.0)
        assert window is await rounds.self_measured_with_noop(
            noop, REQUESTS, 200, Running(0, None, 0.0), 8, 1
        )
        asked = len(seen)
        assert 100 < asked < 300
        await asyncio.sleep(0.1)
        assert asked == len(seen)


def test_as_many_as_another_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The no-op server gets as many requests as the service has answered; before that, the service is first."""
    one = rounds.Contender(NOOP, Running(0, None, 0.0), REQUESTS, np.ones(3), rounds.Tested("one"))
    first = rounds.Window(8, 70.0, 1.0, 2.0, 3.0, 0.1)
    monkeypatch.setattr(rounds, "working", lambda _: nullcontext())
    monkeypatch.setattr(rounds, "measure_closed", lambda *_: first)
    assert rounds.rate_of(one, 8, 1.0) == 70
    one.result.closed[8] = [replace(first, rate=rate) for rate in (10, 30, 90)]
    assert rounds.rate_of(one, 8, 1.0) == 30


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that is slow for a round is slow for both."""

    def windows(*rates: float) -> list[rounds.Window]:
        return [rounds.Window(8, rate, 1.0, 2.0, 3.0, 0.1) for rate in rates]

    found = rounds.summary(windows(20, 200, 60), windows(10, 100, 20))
    assert (found["rate"], found["ratio"], found["spread"]) == (60, 2, [2, 3])


def test_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers get the first cores, the load generator the others; few cores are shared."""
    kept: list[list[int]] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: kept.append(cores))
    for cores, asking in (({4, 5, 6}, [6]), ({4, 5}, [4, 5])):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
        (one,) = bench.share_cores([servers.named("quartet fp32")], 2)
        assert one.command(Path("python"), Path("model"), 1)[:4] == [
            *["taskset", "--cpu-list", "4,5"],
            "python",
        ]
        assert kept.pop() == asking


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
    """Counted from the graph, they are what the model's shape says; int8 has a number more in each head's queries and
    keys, which fp32 has when it is opened, and products of the outlier channels that its calibration chose.
    """
    full = bundle.load(tiny_bundle)
    encoder = Encoder.from_file(full.file("tokenizer.json"), full.manifest.max_length)
    encodings = [item.windows[0] for item in encoder.texts(["Ada drew a comet.", "Ada"])]
    config = json.loads((tiny_checkpoint / "config.json").read_text())

    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    lengths = [len(encoding) for encoding in encodings]
    attention = 4 * hidden * sum(n * n for n in lengths) / sum(lengths)
    products = 2 * (4 * hidden**2 + 2 * hidden * config["intermediate_size"])
    more = 2 * hidden * 2 * config["num_attention_heads"]
    graph = onnx.load(full.file(onnxruntime_baseline.packed_graph(full, "int8").file)).graph
    weights = [one.dims for one in graph.initializer if one.name.endswith(".outliers")]
    assert all(0 < channels <= OUTLIERS for _, channels in weights)
    extra = {"fp32": 0, "int8": layers * more + sum(2 * outputs * k for outputs, k in weights)}
    for precision, wider in extra.items():
        found = flops_per_token(full, precision, encodings)
        assert found == pytest.approx(layers * (products + attention) + wider)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exclusive
def test_bench(tiny_bundle: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """The sessions of the ONNX Runtime baseline take turns with the servers; goals are shown next to the results."""
    monkeypatch.setattr(onnxruntime_baseline, "TRIAL_S", 0.01)
    monkeypatch.setattr(rounds, "WARM_S", 0.05)
    texts = tmp_path / "texts"
    texts.write_text("Ada drew a comet.\nAda\n" * 20)
    options = {"--rounds": 1, "--seconds": 0.2, "--open-seconds": 0.4, "--out": tmp_path / "out"}
    given = [str(part) for pair in options.items() for part in pair]
    argv = ["bench", "--bundle", str(tiny_bundle), "--texts", str(texts), *given]
    monkeypatch.setattr(sys, "argv", [*argv, "--beside-noop", "--connections", "1", "8", "32"])
    bench.main()

    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out").read_text())
    assert found == json.loads(printed.splitlines()[-1])
    rows = {row["server"]: row for row in found["contenders"]}
    assert {"bare fp32", "bare int8", "packed fp32", "packed int8"} < rows.keys()
    assert not [row["skipped"] for row in rows.values() if "skipped" in row]
    assert ["1", "8", "32"] == [*rows["bare fp32"]["closed"]]
    assert ["80%"] == [*rows["packed int8"]["open"]]
    assert not rows["bare fp32"]["open"]
    assert all(check["rounds"] == 1 for check in found["checks"])
    for check in found["checks"]:
        assert f"{check['what']:<58}" in printed


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
    assert tune.advice(chosen, rows, 1) == "QUARTET_ARENA=true (1.10 times the default)"
    assert tune.advice(chosen[:2], rows[:2], 1) == "leave the default"


def test_a_picture_of_a_comparison(tmp_path: Path) -> None:
    """The picture has a line for each server that was measured."""
    load = {"rate": 3.0, "p99_ms": 4.0}
    rows = [
        {"server": "quartet fp32", "closed": {"8": load, "1": load}},
        {"server": "absent", "closed": {}, "skipped": "not here"},
    ]
    plot.draw(rows, tmp_path / "picture.png", "two servers")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_runs_side_by_side() -> None:
    """A row for each wish of any run, what was missed in bold; nothing where a run has no figure of it."""
    speed = Check("speed", [0.8, 0.7, 0.9], 0.9).as_json()
    tail = Check("tail", [np.inf], 4, at_most=True, unit="ms").as_json()
    added = Check("added", [-0.5, 1.0], 1.5, at_most=True).as_json()
    unknown = Check("threads", [], 0, at_most=True).as_json()
    runs = {
        "here": {"checks": [speed, tail]},
        "there": {"parts": {"a": {"checks": [added, unknown]}, "b": {"failed": "no such luck"}}},
    }
    assert tables.side_by_side(runs).splitlines() == [
        "|  | wanted | here | there |",
        "| --- | --- | --- | --- |",
        "| speed | ≥ 0.9 | **0.80** (0.70–0.90) |  |",
        "| tail | ≤ 4 ms | **∞** |  |",
        "| added | ≤ 1.5 |  | 0.25 (\N{MINUS SIGN}0.50–1.00) |",
        "| threads | ≤ 0 |  |  |",
    ]


@pytest.mark.slow
def test_pretraining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family is pretrained, evaluated and fine-tuned; a second run reads the results for table and picture."""
    monkeypatch.setattr(checksums, "LOCK", tmp_path / "datasets.toml")
    checksums.LOCK.touch()  # or these files would have to be those that have their names
    data = tmp_path / "data"
    for name in ("pretrain", "classification/sst2", "classification/ag_news"):
        (data / name).mkdir(parents=True)
    for name in ("wiki_en_00", "wiki_en_07"):
        with lzma.open(data / f"pretrain/{name}.txt.xz", "wt") as file:
            file.write("\n\n".join(samples.text(30, seed=i) for i in range(60)))
    rows = [
        {"text": f"as {mood} as {i}", "label": mood} for i in range(20) for mood in ("ill", "well")
    ]
    for name in ("sst2/train_sentences", "sst2/test", "ag_news/train", "ag_news/test"):
        with gzip.open(data / f"classification/{name}.jsonl.gz", "wt") as file:
            file.write("\n".join(map(json.dumps, rows)))

    found = pretraining.measure("electra", 1, 2 * pretraining.STEP, data, tmp_path / "scratch")
    again = pretraining.measure("electra", 1, 2 * pretraining.STEP, data, tmp_path / "scratch")

    assert found == again
    assert [tokens for tokens, _ in found["curve"]] == [1024, 2048]
    assert 0 < found["held_out"] < 10
    assert {
        0 <= found[f"{task}, {kind}"] <= 1
        for task in pretraining.TASKS
        for kind in ("fresh", "pretrained")
    } == {True}
    head, _, row = pretraining.table([found])
    assert head.count("|") == row.count("|")
    assert row.startswith("| electra | ")
    pretraining.draw([found], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
