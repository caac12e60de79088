"""The bare session runs what a server would be asked, in its fastest layout, and counts it by its tokens."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.lib import onnxruntime_baseline, rounds, servers, traffic
from benchmarks.lib.onnxruntime_baseline import Bare
from service.core import bundle
from service.core.encode import Encoder

TEXTS = ["Ada drew a comet.", "Ada", "The river and the town of a north station."]


@pytest.fixture(scope="module")
def full(tiny_bundle):
    return bundle.load(tiny_bundle)


@pytest.fixture(scope="module")
def session(full):
    return Bare(full, "fp32", onnxruntime_baseline.encode(full, "embed", TEXTS * 20), trial_s=0.01)


def test_encode(full):
    """Texts become the windows that the service makes of them; for qa, behind their question, as many as it takes."""
    encoder = Encoder.from_file(full.file("tokenizer.json"), full.manifest.max_length)
    expected = [list(item.windows[0].input_ids) for item in encoder.texts(TEXTS)]
    assert expected == [
        list(window.input_ids) for (window,) in onnxruntime_baseline.encode(full, "ner", TEXTS)
    ]

    short, long = onnxruntime_baseline.encode(full, "qa", [TEXTS[0], " ".join(TEXTS * 200)])
    (window,) = short
    asked = encoder.tokenizer.encode(traffic.question(TEXTS[0]), TEXTS[0])
    assert asked.ids == list(window.input_ids)
    assert len(long) > 1


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.exclusive
def test_window(session, connections):
    """A window tells how many inputs of mean length were run in a second, and how long each batch took."""
    found = session.window(connections=connections, seconds=0.1, warm_s=0.05)

    each = dict(found.pop("each", ()))
    assert (connections == 1) is bool(each)
    assert each.keys() <= {*range(len(session.items))}
    assert found.keys() == {"rate", "ran", "p50_ms", "p99_ms"}
    assert 10 < found["rate"] < found["ran"] / 0.1
    assert 0 < found["p50_ms"] <= found["p99_ms"]


def test_layout(session):
    """The layout that is kept was the fastest of all."""
    assert max(session.trials, key=session.trials.get) == str(session.layout)
    assert len(session.trials) == len(session.runs) * len(onnxruntime_baseline.BATCHES)


def test_sessions_share_the_work():
    """Batches are given to one session each, and sessions work on, uncounted, until all have had their window."""
    ran = []
    batches = onnxruntime_baseline.shuffled_batches([(range(size),) for size in range(1, 41)], 8)
    one_round = [*itertools.islice(batches, 5)]
    assert sorted(len(item) for batch in one_round for item in batch) == [*range(1, 41)]
    assert all(np.ptp([len(item) for item in batch]) == 7 for batch in one_round)

    other = object()
    batches = iter([*one_round, ()])
    ended = []

    def run(batch):
        ran.append(batch)
        if not batch:
            ended.append(other)

    part = onnxruntime_baseline.run_window(run, batches, 1e-9, 0.0, ended, sessions=2)
    assert [*one_round, ()] == ran
    assert part.tokens == onnxruntime_baseline.tokens(one_round[0])
    assert part.ran == sum(range(1, 41))
    assert (0, 1) == (part.first, len(part.spent))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exclusive
def test_in_the_rounds(tiny_bundle, tmp_path, monkeypatch):
    """It takes turns with the servers, on the given cores, and returns its measurements."""
    monkeypatch.setattr(onnxruntime_baseline, "TRIAL_S", 0.01)
    server = servers.pinned(onnxruntime_baseline.server("qa", "int8", TEXTS, tmp_path), [0])
    (tested,) = rounds.measure(
        [replace(server, name="bare")],
        "qa",
        tiny_bundle,
        TEXTS,
        tmp_path,
        connections=[1, 32],
        rates=[10],
        shares=[0.8],
        rounds=2,
        seconds=0.1,
        say=lambda _: None,
    )

    assert not tested.skipped
    assert [1, 32] == [*tested.closed]
    assert {} == tested.open
    assert all(window.rate > 10 and window.cpu_ms > 0 for window in tested.closed[32])
    assert all(
        {*window.each} <= {*range(len(TEXTS))} and window.each for window in tested.closed[1]
    )
    assert json.loads((tmp_path / "bare-qa.json").read_text()) == TEXTS
    assert "1 x 1 threads" in (tmp_path / "bare.log").read_text()
