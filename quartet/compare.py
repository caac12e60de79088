"""`quartet compare A B --texts FILE`: whether two servers, bundles or checkpoints answer alike, and if not, why."""

import argparse
import asyncio
import html
import json
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from quartet.comparison.sides import Item, Side, SideError, Task
from service.core.bundle_versions import MANIFEST

LIMITS: dict[str, dict[str, float]] = {"min": {"same": 0.99}, "max": {"failed": 0}}
WORST = 5  # answers that differ most, which the report shows
EXPLAINED = 16  # texts that the search for a cause computes
SHOWN = 160  # characters of a text and of an answer
FIELDS = {"answers": ("question", "context"), "reranking": ("query", "documents")}


@dataclass
class Report:
    """What the command found. figures: by name, as `--limits` has them"""

    a: str
    b: str
    task: str
    figures: dict[str, float]
    explanations: dict[str, Any] = field(default_factory=dict)
    beyond: list[str] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        "quartet compare",
        description="Compare the answers of two sides to the texts of a file, and name the cause of a difference. "
        "A and B are URLs of servers, bundles (PATH or PATH:PRECISION), or checkpoints, which sentence-transformers "
        "or transformers run. The exit status is 1 if a figure is beyond its limit.",
    )
    parser.add_argument("a", metavar="A", help="URL, bundle or checkpoint; the one to keep")
    parser.add_argument("b", metavar="B", help="URL, bundle or checkpoint; the new one")
    parser.add_argument(
        "--texts",
        type=Path,
        required=True,
        metavar="FILE",
        help="a text a line; .jsonl for objects with text, question and context, or query and documents",
    )
    parser.add_argument(
        "--task", choices=get_args(Task), help="default: the first that A and B have in common"
    )
    parser.add_argument(
        "--head",
        default="",
        help="the head of bundles and of Quartet's servers; default: the first of the task",
    )
    for side in "ab":
        parser.add_argument(
            f"--dialect-{side}",
            default="",
            metavar="NAME",
            help=f"the API of the server {side.upper()}; default: found by asking",
        )
    parser.add_argument(
        "--model",
        default="",
        help="the model's name in requests; default: the first that a server lists",
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="a header of each request, such as Authorization",
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=1,
        metavar="N",
        help="requests at the same time; default: 1",
    )
    parser.add_argument(
        "--explain",
        metavar="BUNDLE",
        help="the model as a bundle, by which differences of two servers are explained; default: A or B, if one is "
        "a bundle; no for no explanation",
    )
    parser.add_argument(
        "--limits",
        type=Path,
        metavar="FILE",
        help="TOML with tables min and max of figures; default: same at least 0.99, and no text failed",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    return parser


def main() -> int:
    """Compare, and print the report. Returns the exit status."""
    arguments = parser().parse_args()
    from service.core.bundle import BundleError

    try:
        limits = LIMITS
        if arguments.limits:
            limits = tomllib.loads(arguments.limits.read_text(encoding="utf-8"))
        report = asyncio.run(compare(arguments))
        report.beyond = [*check(report.figures, limits)]
    except (SideError, BundleError) as error:
        print(f"quartet: {error}", file=sys.stderr)
        return 3
    except (OSError, ValueError) as error:
        print(f"quartet: compare: {error}", file=sys.stderr)
        return 2
    print(render(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    if arguments.html:
        arguments.html.write_text(page(report), encoding="utf-8")
    return 1 if report.beyond else 0


async def compare(arguments: argparse.Namespace) -> Report:
    """Ask both sides, and return the report. Raises SideError, BundleError, OSError and ValueError."""
    from quartet.comparison import figures
    from quartet.comparison.bundle_side import BundleSide
    from quartet.comparison.causes import explain
    from service.core.agreement import distance

    async with AsyncExitStack() as stack:
        sides = [await open_side(stack, arguments, side) for side in "ab"]
        common = [task for task in sides[0].tasks if task in sides[1].tasks]
        if not (arguments.task or common):
            raise SideError(f"{sides[0].name} and {sides[1].name} have no task in common")
        task: Task = arguments.task or common[0]
        items = read_items(arguments.texts, task)
        loads = [await send(side, task, items, arguments.connections) for side in sides]
        places = [n for n in range(len(items)) if all(n in load.answers for load in loads)]
        if not places:
            raise SideError(next(iter((loads[0].errors or loads[1].errors).values())))
        pairs = [(loads[0].answers[n], loads[1].answers[n]) for n in places]
        report = Report(sides[0].name, sides[1].name, task, figures.compare(task, pairs))
        report.figures["failed"] = len(items) - len(places)
        for name, load in zip("ab", loads, strict=True):
            report.figures |= {f"{name}_{key}": value for key, value in load.figures.items()}
            report.notes += [*{*load.errors.values()}][:WORST]
        apart = {n: distance(*pair) for n, pair in zip(places, pairs, strict=True)}
        order = sorted(places, key=lambda n: -apart[n])
        report.worst = [
            {
                "text": " | ".join(items[n])[:SHOWN],
                "distance": apart[n],
                **{name: shown(load.answers[n]) for name, load in zip("ab", loads, strict=True)},
            }
            for n in order[:WORST]
            if apart[n] > figures.EQUAL
        ]
        if not report.worst or arguments.explain == "no":
            return report
        lab = next((side for side in sides if isinstance(side, BundleSide)), None)
        if arguments.explain:
            lab = await stack.enter_async_context(BundleSide(arguments.explain, arguments.head))
        if lab is None:
            report.notes.append("name the model as a bundle by --explain to find the cause")
            return report
        half = EXPLAINED // 2
        chosen = [*{*order[:half], *places[:: max(1, len(places) // half)][:half]}]
        for name, side, load in zip("ab", sides, loads, strict=True):
            if side is not lab:
                theirs = [load.answers[n] for n in chosen]
                found = await explain(lab, task, [items[n] for n in chosen], theirs)
                report.explanations[name] = asdict(found)
        return report


async def open_side(stack: AsyncExitStack, arguments: argparse.Namespace, name: str) -> Side:
    """Open A or B. Raises SideError and BundleError."""
    given: str = getattr(arguments, name)
    if given.startswith(("http://", "https://")):
        from quartet.comparison.servers import PATHS, Server

        dialect = getattr(arguments, f"dialect_{name}")
        if dialect and dialect not in PATHS:
            raise ValueError(f"--dialect-{name}: {dialect} is none of {', '.join(PATHS)}")
        headers = {}
        for own in arguments.header:
            header, colon, value = own.partition(":")
            if not colon:
                raise ValueError(f"--header: {own!r} is not NAME:VALUE")
            headers[header] = value.strip()
        server = Server(given, dialect, headers, arguments.model, arguments.head)
        stack.callback(server.close)
        return server
    path = Path(given if Path(given).exists() else given.rpartition(":")[0] or given)
    if (path / MANIFEST).is_file():
        from quartet.comparison.bundle_side import BundleSide

        return await stack.enter_async_context(BundleSide(given, arguments.head))
    from quartet.comparison.reference import Reference

    return Reference(given)


def read_items(file: Path, task: Task) -> list[Item]:
    """Return the items of a file. Raises OSError and ValueError."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    items: list[Item] = [(line,) for line in lines]
    if file.suffix == ".jsonl":
        names = FIELDS.get(task, ("text",))
        rows = [[own.get(name) for name in names] for own in map(json.loads, lines)]
        if bad := [number for number, row in enumerate(rows, 1) if None in row]:
            raise ValueError(f"{file}, row {bad[0]}: {task} need {' and '.join(names)}")
        items = [
            tuple(part for own in row for part in (own if isinstance(own, list) else [own]))
            for row in rows
        ]
    elif task == "reranking":  # each text is the query for the ten after it
        items = [tuple(lines[n : n + 11]) for n in range(0, len(lines) - 1, 11)]
    elif task == "answers":
        raise ValueError(f"{file}: answers need .jsonl with question and context")
    if not items:
        raise ValueError(f"{file}: no texts")
    return items


@dataclass
class Load:
    """The answers of a side by the index of their text, its errors, and the figures of its time."""

    answers: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


async def send(side: Side, task: Task, items: Sequence[Item], connections: int) -> Load:
    """Ask a side for all answers, with a number of requests at the same time."""
    load, times, free = Load(), list[float](), asyncio.Semaphore(connections)

    async def ask(place: int) -> None:
        async with free:
            began = time.perf_counter()
            try:
                load.answers[place] = await side.answer(task, items[place])
            except SideError as error:
                load.errors[place] = str(error)
            times.append(1000 * (time.perf_counter() - began))

    await ask(0)  # the first request is slower
    times.clear()
    began = time.process_time()
    await asyncio.gather(*map(ask, range(len(items))))
    used = time.process_time() - began
    times.sort()
    load.figures = {f"p{q}_ms": times[min(len(times) * q // 100, len(times) - 1)] for q in (50, 99)}
    if side.is_local:
        load.figures["processor_ms"] = 1000 * used / len(items)
    return load


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


def check(figures: Mapping[str, float], limits: Mapping[str, Mapping[str, float]]) -> list[str]:
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
    """Return the sentences that explain the report."""
    lines = [] if report.worst else ["A and B answer alike at fp32"]
    for name, found in report.explanations.items():
        side = f"{name.upper()} {getattr(report, name)}"
        lines += [f"{side}: {cause}: {text}" for cause, text in found["causes"].items()]
        if not found["equal"]:
            what = f"{found['tried']} ways were tried" + (
                "" if found["causes"] else ", without one that helps"
            )
            lines.append(f"{side}: a distance of {found['distance']:.2g} is not explained; {what}")
    return [*lines, *report.notes]


def render(report: Report) -> str:
    """Return the report for a terminal."""
    rows = [f"  {name:<22} {value:.6g}" for name, value in report.figures.items()]
    worst = [
        f"  {one['distance']:.2g}  {one['text']}\n    A: {one['a']}\n    B: {one['b']}"
        for one in report.worst
    ]
    parts = [f"{report.task}: A {report.a}, B {report.b}", *rows]
    if worst:
        parts += ["largest differences:", *worst]
    parts += ["conclusions:", *(f"  {line}" for line in conclusions(report))]
    return "\n".join([*parts, *(f"beyond its limit: {line}" for line in report.beyond)])


def page(report: Report) -> str:
    """Return the report as a page."""
    from model.report import page as pages

    lines = [*conclusions(report), *(f"beyond its limit: {line}" for line in report.beyond)]
    rows = [[one["distance"], one["text"], one["a"], one["b"]] for one in report.worst]
    return pages.Report(
        f"{report.task}: {report.a} and {report.b}",
        [
            pages.Section(
                "conclusions", "Conclusions", "".join(f"<p>{html.escape(o)}</p>" for o in lines)
            ),
            pages.Section(
                "figures", "Figures", pages.table(["", ""], [*map(list, report.figures.items())])
            ),
            pages.Section(
                "worst",
                "Largest differences",
                pages.table(["distance", "text", "A", "B"], rows, (1, 2, 3)),
            ),
        ],
    ).render()
