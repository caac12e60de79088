"""What int8 costs on labelled data: the loss of the head's metric, and the share of answers that changed."""

from collections.abc import Mapping
from pathlib import Path

from export.verify import RunGraph
from model.evaluate import Evaluation, judge
from service.core.bundle import Head
from service.core.encode import Encoder

MAX_LOSS = 1.0  # points of the head's metric


class QualityError(Exception):
    """int8 loses more than it may; the message says where and how much."""


def measure_head(
    name: str,
    head: Head,
    file: Path,
    encoder: Encoder,
    runs: Mapping[str, RunGraph],
    max_changed: float,
) -> dict[str, dict[str, float]]:
    """The metrics of one head on one file by precision, in points (shares and correlations times 100).

    Raises QualityError when int8 loses more than a point of the main metric, or changes too many answers.
    """
    found = {precision: judge(run, encoder, head, name, file) for precision, run in runs.items()}
    if {"fp32", "int8"} <= set(found):
        _gate(name, found["fp32"], found["int8"], max_changed)
    return {precision: _points(result) for precision, result in found.items()}


def _points(result: Evaluation) -> dict[str, float]:
    shares = {key: value for key, value in result.metrics.items() if "threshold" not in key}
    return {key: round(100 * value, 2) for key, value in shares.items()}


def _gate(name: str, exact: Evaluation, rounded: Evaluation, max_changed: float) -> None:
    metric = next(iter(exact.metrics))
    loss = 100 * (exact.metrics[metric] - rounded.metrics[metric])
    pairs = zip(exact.answers, rounded.answers, strict=True)
    changed = sum(a != b for a, b in pairs) / max(len(exact.answers), 1)
    print(
        f"{name}: {metric} {100 * exact.metrics[metric]:.2f} at fp32,"
        f" {100 * rounded.metrics[metric]:.2f} at int8; {changed:.1%} of answers changed"
    )
    if not loss <= MAX_LOSS:
        raise QualityError(f"{name}: int8 loses {loss:.2f} points of {metric}, allowed {MAX_LOSS}")
    if changed > max_changed:
        said = f"{name}: int8 changes {changed:.1%} of answers, allowed {max_changed:.1%}"
        raise QualityError(f"{said} (--max-changed)")
