"""The bare session runs what a server would be asked, in its fastest layout, and counts it by its tokens."""

import itertools

import numpy as np
import pytest

from benchmarks.lib import onnxruntime_baseline
from benchmarks.lib.onnxruntime_baseline import Bare
from service.core import bundle

TEXTS = ["Ada drew a comet.", "Ada", "The river and the town of a north station."]


@pytest.fixture(scope="module")
def full(tiny_bundle):
    return bundle.load(tiny_bundle)


@pytest.fixture(scope="module")
def session(full):
    return Bare(
        full, "fp32", [(item,) for item in onnxruntime_baseline.encode(full, TEXTS * 20)], 0.01
    )


@pytest.mark.parametrize("connections", [1, 8])
def test_window(session, connections):
    """A window tells how many inputs of mean length were run in a second, and how long each batch took."""
    found = session.window(connections=connections, seconds=0.1, warm_s=0.05)

    assert found.keys() == {"rate", "ran", "p50_ms", "p99_ms"}
    assert 0 < found["rate"] < found["ran"] / 0.1
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
    assert 1 == len(part.spent)
