"""The checks themselves: what they measure, and that they stop what they should."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from export.verify import (
    COSINE_MARGIN,
    FP16_COSINE,
    ParityError,
    check_batch_invariance,
    check_half,
    check_int8,
    check_parity,
    compare,
)
from service.core.encode import Encoding
from service.core.manifest import Head

Outputs = list[dict[str, NDArray[np.float32]]]

LABELS = Head(task="classification", labels=("a", "b"))
MANY = Head(task="classification", labels=("a", "b"), problem_type="multi_label_classification")
ONE = Head(task="classification", labels=("a",))
GRADE = Head(task="classification", labels=("a",), problem_type="regression")
TAGS = Head(task="ner", labels=("O", "B-X"))
SPANS = Head(task="qa")
VECTOR = Head(task="embedding", pooling="mean", dimensions=2)


def outputs(*rows: object) -> Outputs:
    """The head's output for each input."""
    return [{"head": np.asarray(row, dtype=np.float32)} for row in rows]


def made(length: int) -> Encoding:
    zeros = np.zeros(length, dtype=np.int64)
    return Encoding(zeros, zeros, np.zeros((length, 2), np.int32), zeros, zeros)


def answering(change: Callable[[int], float]) -> Callable[[Sequence[Encoding]], Outputs]:
    """A run whose answers move by what `change` makes of the batch's size."""

    def run(encodings: Sequence[Encoding]) -> Outputs:
        return outputs(*([len(e) / 10 + change(len(encodings)), 0.5] for e in encodings))

    return run


ENCODINGS = [made(2), made(5), made(3)]
EXPECTED = outputs([0.2, 0.5], [0.5, 0.5], [0.3, 0.5])


def test_parity_is_the_largest_difference():
    """What the check returns is the worst of all inputs."""
    worst = check_parity(EXPECTED, answering(lambda _: 5e-5)(ENCODINGS), "fp32")
    assert 5e-5 == pytest.approx(worst, rel=0.01)


@pytest.mark.parametrize(("moved", "said"), [(2e-3, "2.0e-03"), (np.nan, "nan")])
def test_parity_names_graph_head_and_figure(moved, said):
    """A graph that differs, or gives no number, is refused with what differs by how much."""
    line = f"fp32 packed: head head differs from PyTorch by {said} \\(allowed 1e-04\\)"
    with pytest.raises(ParityError, match=line):
        check_parity(EXPECTED, answering(lambda _: moved)(ENCODINGS), "fp32 packed")


def test_parity_of_large_numbers():
    """Large sums have larger rounding errors; the tolerance is relative to the largest value."""

    def prices(moved):
        return outputs(*([4000.0 + moved] for _ in ENCODINGS))

    expected = prices(0.0)
    assert 5e-5 == pytest.approx(check_parity(expected, prices(0.2), "fp32"), rel=0.01)
    with pytest.raises(ParityError, match=r"differs from PyTorch by 5\.0e-04"):
        check_parity(expected, prices(2.0), "fp32")


def test_results_do_not_depend_on_the_batch():
    """Answers that are the same in a batch as alone pass, wherever they are wrong."""
    run = answering(lambda _: 7.0)
    assert 0 == check_batch_invariance(run, ENCODINGS, run(ENCODINGS), "int8")


@pytest.mark.parametrize("moved", [1e-3, np.nan])
def test_a_batch_dependent_graph_is_refused(moved):
    """Answers that depend on the size of their batch do not."""
    run = answering(lambda size: moved * (size > 1))
    with pytest.raises(
        ParityError, match=r"int8 packed: answers differ by .* alone and in a batch"
    ):
        check_batch_invariance(run, ENCODINGS, run(ENCODINGS), "int8 packed")


@pytest.mark.parametrize(
    ("head", "a", "b", "same"),
    [
        (LABELS, [1, 2], [0, 9], 1.0),
        (LABELS, [1, 2], [2, 1], 0.0),
        (MANY, [1, -2], [9, 2], 0.5),
        (ONE, [1], [9], 1.0),
        (ONE, [1], [-1], 0.0),
        (GRADE, [1], [-1], 1.0),
        (TAGS, [[1, 2], [2, 1]], [[1, 2], [1, 2]], 0.5),
        (SPANS, [[1, 9], [3, 2]], [[2, 3], [4, 9]], 0.5),
        (VECTOR, [1, 2], [-1, -2], 1.0),
    ],
    ids=[
        "label",
        "other label",
        "labels",
        "holds",
        "holds no more",
        "grades decide nothing",
        "tags",
        "ends of a span",
        "vectors decide nothing",
    ],
)
def test_same_decisions(head, a, b, same):
    """Each task has its own decisions: labels, tags, or the tokens where an answer starts and ends."""
    assert same == compare("head", head, outputs(a), outputs(b)).same


def test_agreement_is_the_worst_input_s():
    """Difference and cosine are of the input that agrees least; a NaN is never averaged or compared away."""
    found = compare("head", None, outputs([1, 0], [1, 0]), outputs([1, 0], [0, 1]))
    assert (1.0, 0.0) == (found.difference, found.cosine)
    found = compare("head", None, outputs([1, 0], [1, 0]), outputs([1, 0], [np.nan, 0]))
    assert np.isnan([found.difference, found.cosine]).all()


def test_half_is_held_over_all_inputs():
    """A head of one number, which has no cosine of its own, may round across zero."""
    demanded = check_half(outputs([4.0], [1e-4]), outputs([4.0], [-1e-4]), "fp16 packed")
    assert {"head": FP16_COSINE} == demanded


def test_int8_leaves_a_margin():
    """The goldens' tolerance is the cosine over all inputs, less a margin for other processors."""
    demanded = check_int8(outputs([3, 4], [0, 0]), outputs([3, 4], [0, 0]), "int8 packed")
    assert {"head": pytest.approx(1 - COSINE_MARGIN)} == demanded


@pytest.mark.parametrize(
    ("check", "name", "found", "said"),
    [
        (check_half, "fp16 packed", [3, 5], "0.9947"),
        (check_half, "fp16 packed", [np.nan, 4], "nan"),
        (check_int8, "int8 packed", [4, 0], "0.6000"),
        (check_int8, "int8 packed", [np.nan, 4], "nan"),
    ],
)
def test_a_low_cosine_names_graph_head_and_figure(check, name, found, said):
    """What is further off than the precision rounds, or no number, is refused."""
    with pytest.raises(ParityError, match=f"{name}: head head has cosine {said} with PyTorch"):
        check(outputs([3, 4]), outputs(found), name)
