"""Checks of a graph: parity with PyTorch, batch invariance, and the loss of rounding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from service.core.bundle import Bundle
from service.core.cpu import CPU
from service.core.cuda import CUDA
from service.core.encode import Window
from service.core.goldens import cosine, deviation
from service.core.manifest import Graph, Head
from service.core.packing import Packed, pack, row_starts, split
from service.core.session import BatchOutputs, Session, SessionOptions, device_problem

RunGraph = Callable[[Sequence[Window]], list[BatchOutputs]]

FP32_TOLERANCE = 1e-4  # PyTorch and ONNX Runtime sum in different orders
BATCH_TOLERANCE = 1e-5  # an answer does not depend on its batch; attention kernels block by length
# Cosine of a head's outputs for all goldens. fp16 costs 1.3e-6 at most (MiniLM 4e-7). An error, such as tokens in
# wrong slots or positions of a neighbor, costs 2e-2 and more. Deeper models round more often.
FP16_COSINE = 0.999
# Rounding to eight bits cost a head 0.012 at most, with trained and with random weights.
INT8_COSINE = 0.9
COSINE_MARGIN = 0.02  # other CPUs round differently; errors that the goldens detect are far larger


class ParityError(Exception):
    """A graph whose outputs differ from the model's; the message has graph, head, difference and limit."""


@dataclass(frozen=True)
class Agreement:
    """How two runs' outputs of one head agree over some inputs."""

    difference: float  # the largest, see `service.core.goldens.deviation`
    cosine: float  # the smallest of any input's flattened output
    same: float  # the share of equal decisions (labels, tags, span ends)


def graph_runner(bundle: Bundle, graph: Graph, threads: int) -> RunGraph:
    """Return a function that runs a graph on the CPU, as serving does; a graph for CUDA is emulated."""
    if graph.provider not in CPU.graphs:
        from export.cuda_emulator import emulated  # which imports torch

        mask_token_id = bundle.manifest.mask_token_id
        return _runner(bundle, emulated(bundle.file(graph.file), mask_token_id))
    return _runner(bundle, Session(bundle, graph, CPU, SessionOptions(threads)).run)


def gpu_runner(bundle: Bundle, graph: Graph) -> RunGraph:
    """Return a function that runs a graph on the GPU, as serving does. Raises the runtime's error where it cannot."""
    return _runner(bundle, Session(bundle, graph, CUDA, SessionOptions(threads=1)).run)


def _runner(bundle: Bundle, run_packed: Callable[[Packed], BatchOutputs]) -> RunGraph:

    def run(encodings: Sequence[Window]) -> list[BatchOutputs]:
        packed = pack(encodings)
        starts = row_starts(packed, bundle.manifest.heads)
        return split(run_packed(packed), encodings, starts)

    return run


def check_parity(
    expected: Sequence[BatchOutputs],
    outputs: Sequence[BatchOutputs],
    what: str,
    reference: str = "PyTorch",
) -> float:
    """Return the largest difference from the reference's outputs. Raises ParityError beyond 1e-4."""
    worst = 0.0
    for name in expected[0]:
        difference = compare(name, None, expected, outputs).difference
        worst = max(worst, difference)
        if not difference <= FP32_TOLERANCE:
            raise ParityError(
                f"{what}: head {name} differs from {reference} by {difference:.1e}"
                f" (allowed {FP32_TOLERANCE:.0e})"
            )
    return worst


def check_half(
    expected: Sequence[BatchOutputs], outputs: Sequence[BatchOutputs], what: str
) -> dict[str, float]:
    """Return the cosine with PyTorch that the goldens require of each head. Raises ParityError for a lower one."""
    _check_cosines(expected, outputs, FP16_COSINE, what)
    return dict.fromkeys(expected[0], FP16_COSINE)


def check_int8(
    expected: Sequence[BatchOutputs],
    outputs: Sequence[BatchOutputs],
    what: str,
    reference: str = "PyTorch",
) -> dict[str, float]:
    """Return the cosine that the goldens require of each head: the measured one, less a margin.

    Raises ParityError below 0.9, which rounding does not explain.
    """
    measured = _check_cosines(expected, outputs, INT8_COSINE, what, reference)
    return {name: round(value - COSINE_MARGIN, 3) for name, value in measured.items()}


def check_on_gpu(
    bundle: Bundle, graph: Graph, expected: Sequence[BatchOutputs], encodings: Sequence[Window]
) -> str:
    """Compare an emulated graph with PyTorch on the GPU, if there is one, and return the result. Raises ParityError."""
    problem = device_problem(CUDA)
    if problem is None:
        try:
            outputs = gpu_runner(bundle, graph)(encodings)
        except Exception as error:  # a GPU may be there and not work
            problem = " ".join(str(error).split())
        else:
            check_half(expected, outputs, f"{graph.precision} on the GPU")
            return "run on a GPU"
    return f"emulated, not run on a GPU ({problem})"


def check_batch_invariance(
    run: RunGraph, encodings: Sequence[Window], batched: Sequence[BatchOutputs], what: str
) -> float:
    """Return the largest difference of outputs between unbatched and batched runs. Raises ParityError beyond 1e-5.

    batched: outputs of all encodings in one run
    """
    unbatched = [run([encoding])[0] for encoding in encodings]
    worst = float(np.max([compare(n, None, unbatched, batched).difference for n in unbatched[0]]))
    if not worst <= BATCH_TOLERANCE:
        raise ParityError(
            f"{what}: answers differ by {worst:.1e} alone and in a batch"
            f" (allowed {BATCH_TOLERANCE:.0e})"
        )
    return worst


def compare(
    name: str, head: Head | None, expected: Sequence[BatchOutputs], outputs: Sequence[BatchOutputs]
) -> Agreement:
    """Compare one head's outputs, input by input. head: compares decisions too; None for outputs only"""
    pairs = [(a[name], b[name]) for a, b in zip(expected, outputs, strict=True)]
    decisions = [_same(head, a, b) for a, b in pairs] if head else [1.0]
    return Agreement(  # numpy's max and min, unlike Python's, keep a NaN
        difference=float(np.max([deviation(a, b) for a, b in pairs])),
        cosine=float(np.min([cosine(a, b) for a, b in pairs])),
        same=float(np.mean(decisions)),
    )


def _same(head: Head, a: np.ndarray, b: np.ndarray) -> float:
    if head.gives_numbers or not a.size:
        return 1.0
    single = head.width == 1 and head.problem_type != "regression"
    if head.task == "classification" and (
        single or head.problem_type == "multi_label_classification"
    ):
        return float(np.mean((a > 0) == (b > 0)))
    if head.per_pair:
        return float(np.mean((a > 0) == (b > 0)))
    axis = 0 if head.task == "qa" else -1  # which token starts and ends; which label
    return float(np.mean(a.argmax(axis=axis) == b.argmax(axis=axis)))


def _check_cosines(
    expected: Sequence[BatchOutputs],
    outputs: Sequence[BatchOutputs],
    least: float,
    what: str,
    reference: str = "PyTorch",
) -> dict[str, float]:
    measured = _whole_cosines([*expected[0]], expected, outputs)
    for name, value in measured.items():
        if not value >= least:  # a NaN follows from an infinity, that from a value beyond 65,504
            raise ParityError(
                f"{what}: head {name} has cosine {value:.4f} with {reference} (at least {least})"
            )
    return measured


def _whole_cosines(
    heads: Sequence[str], expected: Sequence[BatchOutputs], outputs: Sequence[BatchOutputs]
) -> dict[str, float]:
    """Return the cosine of each head's outputs for all inputs as one vector, which the goldens are compared by."""
    stacked = {
        name: (
            np.concatenate([np.atleast_1d(o[name]).ravel() for o in expected]),
            np.concatenate([np.atleast_1d(o[name]).ravel() for o in outputs]),
        )
        for name in heads
    }
    return {name: cosine(a, b) for name, (a, b) in stacked.items()}
