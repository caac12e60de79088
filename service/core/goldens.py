"""Goldens of a bundle: inputs with their expected outputs, and how outputs are compared with them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.manifest import Tolerance


@dataclass(frozen=True, slots=True)
class Golden:
    """Goldens as one packed batch: inputs `[T]`, `lengths` `[B]`, and each head's expected output."""

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    outputs: dict[str, NDArray[np.float32]]


def save_golden(path: Path, golden: Golden) -> None:
    outputs: dict[str, Any] = {f"output.{head}": value for head, value in golden.outputs.items()}
    np.savez_compressed(
        path,
        input_ids=golden.input_ids,
        token_type_ids=golden.token_type_ids,
        lengths=golden.lengths,
        **outputs,
    )


def disagreement(
    head: str, expected: NDArray[np.float32], found: NDArray[np.float32], tolerance: Tolerance
) -> str | None:
    """Return how a head's outputs differ from the expected ones; None if they are within the tolerance."""
    if found.shape != expected.shape:
        return f"{head} has shape {found.shape}, expected {expected.shape}"
    if tolerance.max_difference is not None:
        difference = deviation(expected, found)
        if not difference <= tolerance.max_difference:
            return f"{head} differs by {difference:.2e}, allowed {tolerance.max_difference:.0e}"
    if head in tolerance.min_cosine:
        found_cosine = cosine(found, expected)
        if not found_cosine >= tolerance.min_cosine[head]:
            return f"{head} has cosine {found_cosine:.4f}, at least {tolerance.min_cosine[head]}"
    return None


def deviation(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Return the largest absolute difference of two arrays.

    It is divided by the largest absolute expected number where that is above 1, because rounding errors grow with it.
    """
    largest = float(np.abs(expected).max(initial=1.0))
    return float(np.abs(found - expected).max(initial=0.0)) / largest


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the cosine of two arrays of one shape, as flat vectors."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / norms if norms else float(np.array_equal(a, b))
