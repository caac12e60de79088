"""The report of a comparison, for a terminal, a page and a file."""

import html
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quartet.comparison.figures import EQUAL, compare
from quartet.comparison.sides import SideError, Task
from service.core.agreement import distance

Limits = Mapping[str, Mapping[str, float]]

LIMITS: Limits = {"min": {"same": 0.99}, "max": {"failed": 0}}
WORST = 5  # answers that differ most
SHOWN = 160  # characters of a text and of an answer


@dataclass
class Report:
    """What a comparison found. figures: by name, as `--limits` has them; beyond: a line for each exceeded limit"""

    a: str
    b: str
    task: Task
    figures: dict[str, float]
    explanations: dict[str, Any] = field(default_factory=dict)
    beyond: list[str] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Reply(NamedTuple):
    """A side's answer, or the error in its place, and its time."""

    answer: Any
    error: str
    ms: float


class Row(NamedTuple):
    """A text, and what both sides replied."""

    text: str
    a: Reply
    b: Reply

    @property
    def is_answered(self) -> bool:
        return not (self.a.error or self.b.error)

    @property
    def distance(self) -> float:
        return distance(self.a.answer, self.b.answer)


async def wait(answer: Awaitable[Any]) -> Reply:
    """Return a side's answer with its time."""
    began, made, error = time.perf_counter(), None, ""
    try:
        made = await answer
    except SideError as failure:
        error = str(failure)
    return Reply(made, error, 1000 * (time.perf_counter() - began))


def summarize(a: str, b: str, task: Task, rows: Sequence[Row]) -> Report:
    """Return the report of rows. a, b: the names of the sides. Raises SideError if none has both answers."""
    pairs = [(row.a.answer, row.b.answer) for row in rows if row.is_answered]
    if not pairs:
        raise SideError(next((row.a.error or row.b.error for row in rows), "no request was sent"))
    report = Report(a, b, task, compare(task, pairs))
    report.figures["failed"] = len(rows) - len(pairs)
    for name in "ab":
        replies: list[Reply] = [getattr(row, name) for row in rows]
        times = sorted(reply.ms for reply in replies)
        for share in (50, 99):
            report.figures[f"{name}_p{share}_ms"] = times[len(times) * share // 100]
        report.notes += [reply.error for reply in replies if reply.error][:WORST]
    found = sorted((row for row in rows if row.is_answered), key=lambda row: -row.distance)[:WORST]
    report.worst = [
        {
            "text": row.text[:SHOWN],
            "distance": row.distance,
            "a": shown(row.a.answer),
            "b": shown(row.b.answer),
        }
        for row in found
        if row.distance > EQUAL
    ]
    return report


def shown(answer: Any) -> str:
    """Return an answer as a short text."""
    if hasattr(answer, "tolist"):
        return f"[{', '.join(f'{number:.4f}' for number in answer[:6].tolist())}, ...]"
    if hasattr(answer, "indices"):
        best = sorted(zip(answer.values.tolist(), answer.indices.tolist(), strict=True))[:-6:-1]
        return ", ".join(f"{token}: {value:.3f}" for value, token in best)
    parts = (
        " ".join(f"{p:.4f}" if isinstance(p, float) else str(p) for p in one) for one in answer
    )
    return "; ".join(parts)[:SHOWN] or "nothing"


def check(figures: Mapping[str, float], limits: Limits) -> list[str]:
    """Return a line for each figure beyond its limit. Raises ValueError for an unknown figure."""
    unknown = {name for table in limits.values() for name in table} - figures.keys()
    if unknown or limits.keys() - {"min", "max"}:
        raise ValueError(
            f"--limits: no figure {', '.join(unknown) or [*limits]}: tables min and max may have {', '.join(figures)}"
        )
    low, high = limits.get("min", {}), limits.get("max", {})
    return [
        *(f"{n} is {figures[n]:.6g}, at least {v:g}" for n, v in low.items() if figures[n] < v),
        *(f"{n} is {figures[n]:.6g}, at most {v:g}" for n, v in high.items() if figures[n] > v),
    ]


def conclusions(report: Report) -> list[str]:
    """Return the sentences that explain the report and name exceeded limits."""
    lines = [] if report.worst else ["A and B answer alike at fp32"]
    for name, found in report.explanations.items():
        side = f"{name.upper()} {getattr(report, name)}"
        lines += [f"{side}: {cause}: {text}" for cause, text in found["causes"].items()]
        if not found["equal"]:
            what = f"{found['tried']} ways were tried" + (
                "" if found["causes"] else ", without one that helps"
            )
            lines.append(f"{side}: a distance of {found['distance']:.2g} is not explained; {what}")
    return [*lines, *report.notes, *(f"beyond its limit: {line}" for line in report.beyond)]


def render(report: Report) -> str:
    """Return the report for a terminal."""
    worst = [
        f"  {one['distance']:.2g}  {one['text']}\n    A: {one['a']}\n    B: {one['b']}"
        for one in report.worst
    ]
    parts = [
        f"{report.task}: A {report.a}, B {report.b}",
        *(f"  {name:<22} {value:.6g}" for name, value in report.figures.items()),
        *(["largest differences:", *worst] if worst else []),
        "conclusions:",
        *(f"  {line}" for line in conclusions(report)),
    ]
    return "\n".join(parts)


def page(report: Report) -> str:
    """Return the report as a page."""
    from model.report import page as pages

    lines = "".join(f"<p>{html.escape(line)}</p>" for line in conclusions(report))
    figures = pages.table(["", ""], [*map(list, report.figures.items())])
    rows = [[one["distance"], one["text"], one["a"], one["b"]] for one in report.worst]
    worst = pages.table(["distance", "text", "A", "B"], rows, (1, 2, 3))
    sections = [
        pages.Section("conclusions", "Conclusions", lines),
        pages.Section("figures", "Figures", figures),
        pages.Section("worst", "Largest differences", worst),
    ]
    return pages.Report(f"{report.task}: {report.a} and {report.b}", sections).render()
