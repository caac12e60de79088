"""`quartet compare A B`: whether two servers, bundles or checkpoints answer alike, and if not, why."""

import argparse
import asyncio
import json
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from quartet.comparison.sides import Item, Side, SideError, Task
from service.core.bundle_versions import MANIFEST

if TYPE_CHECKING:
    from quartet.comparison.report import Limits, Reply, Report, Row

EXPLAINED = 16  # texts that the search for a cause computes
FIELDS = {"answers": ("question", "context"), "reranking": ("query", "documents")}
OPTIONS = (
    ("--head", "NAME", "the head of bundles and of Quartet's servers; default: the task's first"),
    ("--dialect-a", "NAME", "the API of the server A; default: found by asking"),
    ("--dialect-b", "NAME", "the API of the server B; default: found by asking"),
    ("--model", "NAME", "the model's name in requests; default: the first that a server lists"),
    ("--explain", "BUNDLE", "the model, by which causes are found; default: A or B; no for none"),
    ("--limits", "FILE", "TOML, tables min and max of figures; default: same 0.99, failed 0"),
    ("--json", "FILE", "write the report as JSON"),
    ("--html", "FILE", "write the report as a page"),
)


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
    of = parser.add_mutually_exclusive_group(required=True)
    texts = (
        "a text a line; .jsonl for objects with text, question and context, or query and documents"
    )
    of.add_argument("--texts", type=Path, metavar="FILE", help=texts)
    watch = "compare copies of live requests, which a proxy mirrors to this port, and export figures at /metrics"
    of.add_argument("--watch", metavar="[HOST:]PORT", help=watch)
    share = "--watch: the share of the copies to compare; default: 1"
    parser.add_argument("--share", type=float, default=1.0, metavar="SHARE", help=share)
    first = "default: the first that A and B have in common"
    parser.add_argument("--task", choices=get_args(Task), help=first)
    for name, metavar, text in OPTIONS:
        parser.add_argument(name, default="", metavar=metavar, help=text)
    header = "a header of each request, such as Authorization"
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help=header)
    most = "requests at the same time; default: 1"
    parser.add_argument("--connections", type=int, default=1, metavar="N", help=most)
    return parser


def main() -> int:
    """Compare, and print the report. Returns the exit status."""
    arguments = parser().parse_args()
    from quartet.comparison.report import LIMITS, check, page, render
    from service.core.bundle import BundleError

    try:
        limits = LIMITS
        if arguments.limits:
            limits = tomllib.loads(Path(arguments.limits).read_text(encoding="utf-8"))
        report = asyncio.run(compare(arguments, limits))
        report.beyond = check(report.figures, limits)
    except (SideError, BundleError) as error:
        print(f"quartet: {error}", file=sys.stderr)
        return 3
    except (OSError, ValueError) as error:
        print(f"quartet: compare: {error}", file=sys.stderr)
        return 2
    print(render(report))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(asdict(report), indent=2) + "\n", "utf-8")
    if arguments.html:
        Path(arguments.html).write_text(page(report), encoding="utf-8")
    return 1 if report.beyond else 0


async def compare(arguments: argparse.Namespace, limits: "Limits") -> "Report":
    """Ask both sides, and return the report. Raises SideError, BundleError, OSError and ValueError."""
    from quartet.comparison.report import Row, summarize

    async with AsyncExitStack() as stack:
        a, b = [await open_side(stack, arguments, side) for side in "ab"]
        common = [task for task in a.tasks if task in b.tasks]
        if not (arguments.task or common):
            raise SideError(f"{a.name} and {b.name} have no task in common")
        task: Task = arguments.task or common[0]
        if arguments.watch:
            from quartet.comparison.watch import watch

            return await watch(a, b, task, arguments, limits)
        items = read_items(arguments.texts, task)
        sent = [await send(side, task, items, arguments.connections) for side in (a, b)]
        rows = [*map(Row, [" | ".join(item) for item in items], *(replies for replies, _ in sent))]
        report = summarize(a.name, b.name, task, rows)
        report.figures |= {
            f"{name}_processor_ms": used
            for name, side, (_, used) in zip("ab", (a, b), sent, strict=True)
            if side.is_local
        }
        if report.worst and arguments.explain != "no":
            await find_causes(stack, report, arguments, items, rows, (a, b))
        return report


async def find_causes(
    stack: AsyncExitStack,
    report: "Report",
    arguments: argparse.Namespace,
    items: Sequence[Item],
    rows: "Sequence[Row]",
    sides: Sequence[Side],
) -> None:
    """Add the causes of differences to a report, or note that a bundle is needed. Raises SideError and BundleError."""
    from quartet.comparison.bundle_side import BundleSide
    from quartet.comparison.causes import explain

    lab = next((side for side in sides if isinstance(side, BundleSide)), None)
    if arguments.explain:
        lab = await stack.enter_async_context(BundleSide(arguments.explain, arguments.head))
    if lab is None:
        report.notes.append("name the model as a bundle by --explain to find the cause")
        return
    places = [n for n, row in enumerate(rows) if row.is_answered]
    half = EXPLAINED // 2
    chosen = sorted(places, key=lambda n: -rows[n].distance)[:half]
    chosen += places[:: max(1, len(places) // half)][:half]
    for name, side in zip("ab", sides, strict=True):
        if side is not lab:
            theirs = [getattr(rows[n], name).answer for n in chosen]
            found = await explain(lab, report.task, [items[n] for n in chosen], theirs)
            report.explanations[name] = asdict(found)


async def open_side(stack: AsyncExitStack, arguments: argparse.Namespace, name: str) -> Side:
    """Open A or B. Raises SideError, BundleError and ValueError."""
    address: str = getattr(arguments, name)
    if address.startswith(("http://", "https://")):
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
        server = Server(address, dialect, headers, arguments.model, arguments.head)
        stack.callback(server.close)
        return server
    path = Path(address if Path(address).exists() else address.rpartition(":")[0] or address)
    if (path / MANIFEST).is_file():
        from quartet.comparison.bundle_side import BundleSide

        return await stack.enter_async_context(BundleSide(address, arguments.head))
    from quartet.comparison.reference import Reference

    return Reference(address)


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


async def send(
    side: Side, task: Task, items: Sequence[Item], connections: int
) -> "tuple[list[Reply], float]":
    """Send all items, some at the same time. Returns the replies, and the processor time per item in milliseconds."""
    from quartet.comparison.report import wait

    free = asyncio.Semaphore(connections)

    async def ask(item: Item) -> "Reply":
        async with free:
            return await wait(side.answer(task, item))

    await ask(items[0])  # the first request is slower
    began = time.process_time()
    replies = await asyncio.gather(*map(ask, items))
    return [*replies], 1000 * (time.process_time() - began) / len(items)
