"""The quality loss of int8 on labelled data: points of the head's metric, and the share of changed answers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from export.verify import RunGraph
from service.core.encode import Encoder
from service.core.manifest import Head

if TYPE_CHECKING:
    from model.evaluate import Evaluation

MAX_LOSS = 1.0  # points of the head's metric


class QualityError(Exception):
    """int8 loses more quality than allowed; the message has the head, the loss and the limit."""


def measure_head(
    name: str,
    head: Head,
    file: Path,
    encoder: Encoder,
    runs: Mapping[str, RunGraph],
    max_changed: float,
    show: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Return the metrics of one head on one file by precision, in points (shares and correlations times 100).

    show: called with the comparison of int8 and fp32 as a line of text
    Raises QualityError when int8 loses more than a point of the main metric, or changes too many answers.
    """
    from model.evaluate import judge  # which imports torch and scikit-learn

    results = {precision: judge(run, encoder, head, name, file) for precision, run in runs.items()}
    if {"fp32", "int8"} <= set(results):
        _check_loss(name, results["fp32"], results["int8"], max_changed, show)
    return {precision: _points(result) for precision, result in results.items()}


def _points(result: "Evaluation") -> dict[str, float]:
    shares = {key: value for key, value in result.metrics.items() if "threshold" not in key}
    return {key: round(100 * value, 2) for key, value in shares.items()}


def _check_loss(
    name: str,
    exact: "Evaluation",
    rounded: "Evaluation",
    max_changed: float,
    show: Callable[[str], None],
) -> None:
    metric = next(iter(exact.metrics))
    loss = 100 * (exact.metrics[metric] - rounded.metrics[metric])
    pairs = zip(exact.answers, rounded.answers, strict=True)
    changed = sum(a != b for a, b in pairs) / max(len(exact.answers), 1)
    show(
        f"{name}: {metric} {100 * exact.metrics[metric]:.2f} at fp32,"
        f" {100 * rounded.metrics[metric]:.2f} at int8; {changed:.1%} of answers changed"
    )
    if not loss <= MAX_LOSS:
        raise QualityError(f"{name}: int8 loses {loss:.2f} points of {metric}, allowed {MAX_LOSS}")
    if changed > max_changed:
        raise QualityError(
            f"{name}: int8 changes {changed:.1%} of answers, allowed {max_changed:.1%} (--max-changed)"
        )
