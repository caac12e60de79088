"""Predict a file: `python -m service.predict BUNDLE INPUT OUTPUT [--head NAME] [--options JSON]`.

The rows of INPUT become requests to the service in this process, without a network: results are the served ones.
INPUT is a table or a JSON file that training reads, with `text` and `text_pair`, or `question` and `context`, under
any of their recognized names, or .txt with a text a line. OUTPUT is .jsonl (each row with its `result`), or .csv for
classification (each row with `predicted_label` and `score`). A row that cannot be predicted has an `error` instead.
"""

import argparse
import asyncio
import csv
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from starlette.types import ASGIApp

from service.core.bundle import BundleError, Head, Manifest
from service.core.bundle import load as load_bundle
from service.core.data_files import columns, rows, sources
from service.core.data_files.columns import Needs
from service.core.data_files.text_files import DataError, read_lines
from service.core.program_name import program_name
from service.observability import logs
from service.settings import Settings

ROWS = 64  # of a request
IN_FLIGHT = 4  # requests at a time
BUSY = 429  # the status of a request that a full queue refuses
DAY_MS = 24 * 3600 * 1000
LARGEST_BODY = 2**31
# The route of each task, and its fields in a request by the column that they are from; the first is required.
ROUTES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "classification": ("/classify", {"text": "inputs", "text_pair": "text_pair"}),
    "ner": ("/ner", {"text": "inputs"}),
    "qa": ("/qa", {"question": "question", "context": "context"}),
    "embedding": ("/embed", {"text": "inputs"}),
    "sparse-embedding": ("/embed-sparse", {"text": "inputs"}),
    "late-interaction": ("/embed-tokens", {"text": "inputs"}),
    "fill-mask": ("/fill-mask", {"text": "inputs"}),
}
# The columns of the results, by the end of the output's name. Where a row has one of them, all get a number.
OUTPUTS = {".jsonl": ("result", "error"), ".csv": ("predicted_label", "score", "error")}

# A spreadsheet computes a cell that begins so, as OWASP's page on CSV injection has it; but not a number.
FORMULA = re.compile(r"[=@\t\r\n\uff1d\uff0b\uff0d\uff20]|[+\-](?!\d*[.,]?\d+([eE][+\-]?\d+)?\Z)")

T = TypeVar("T")


class Row(NamedTuple):
    """A row of the input.

    where: its place, for messages
    names, values: its columns, as they stand
    texts: the texts of a request, by their fields
    error: why it cannot be predicted; empty if it can
    """

    where: str
    names: Sequence[str]
    values: Sequence[Any]
    texts: Mapping[str, str]
    error: str


class Outcome(NamedTuple):
    """The result of a row, or its error."""

    result: Any
    error: str


def main(argv: Sequence[str] | None = None) -> int:
    """Predict a file. Returns 0; 1 where rows failed; 2 for wrong arguments and files; 3 for a bad bundle."""
    arguments = parse_arguments(argv)
    logs.configure("warning", "auto", sys.stderr)
    try:
        failed, count = asyncio.run(predict(arguments))
    except BundleError as error:
        print(f"predict: {error}", file=sys.stderr)
        return 3
    except (DataError, OSError) as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: {count:,} rows, {failed:,} with an error")
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    summary, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(program_name("service.predict"), description=summary)
    parser.add_argument(
        "bundle", type=Path, help="a bundle's directory. Example: bundles/questions"
    )
    parser.add_argument(
        "input", help="a file that training reads, or .txt with a text a line. Example: new.csv"
    )
    parser.add_argument("output", type=Path, help=f"a file: {', '.join(OUTPUTS)}. Example: out.csv")
    parser.add_argument("--head", help="name of the head; default: the first. Example: --head mood")
    parser.add_argument(
        "--columns",
        type=json.loads,
        default={},
        metavar="JSON",
        help='names of the columns; default: the usual ones. Example: --columns \'{"text": "review"}\'',
    )
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further fields of each request, see docs/reference/api.md; default: none. "
        'Example: --options \'{"top_k": 3, "calibrated": true}\'',
    )
    parser.add_argument(
        "--precision",
        default="auto",
        help="auto, fp32, int8 or fp16; default: auto. Example: --precision fp32",
    )
    parser.add_argument(
        "--escape-formulas",
        action="store_true",
        help="write ' before cells of .csv that a spreadsheet would compute; default: cells are as they were",
    )
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments. Exits with status 2 for wrong ones."""
    arguments = parser().parse_args(argv)
    if arguments.output.suffix.lower() not in OUTPUTS:
        parser().error(f"output: {arguments.output} must end with {', '.join(OUTPUTS)}")
    if arguments.escape_formulas and arguments.output.suffix.lower() != ".csv":
        parser().error(f"--escape-formulas: {arguments.output} must end with .csv")
    for name in ("columns", "options"):
        if not isinstance(getattr(arguments, name), dict):
            parser().error(f"--{name}: must be an object of JSON")
    if not all(isinstance(name, str) for name in arguments.columns.values()):
        parser().error("--columns: each name must be a string")
    return arguments


async def predict(arguments: argparse.Namespace) -> tuple[int, int]:
    """Write the results of all rows, in one rename at the end. Returns the rows with an error, and all rows.

    Raises BundleError and DataError.
    """
    manifest = load_bundle(arguments.bundle).manifest
    name, head = choose_head(manifest, arguments.head)
    suffix = arguments.output.suffix.lower()
    if suffix == ".csv" and head.task != "classification":
        raise DataError(f"{arguments.output}: results of {head.task} are written to .jsonl only")
    settings = Settings(
        bundles=(arguments.bundle,),
        precision=arguments.precision,
        deadline_ms=DAY_MS,
        max_body_bytes=LARGEST_BODY,
    )
    fields = tuple(ROUTES[head.task][1])
    needs = Needs(head.task, fields, (fields if head.task == "qa" else fields[:1],))
    source = sources.with_columns(arguments.input, arguments.columns)
    names, count = survey(source, needs)
    options = {"head": name, "on_error": "null", **arguments.options}
    failed = 0
    async with served(settings) as app:
        with replacing(arguments.output) as file:
            write = writer(file, suffix, names, arguments.escape_formulas)
            for chunks in groups(groups(read_rows(source, needs), ROWS), IN_FLIGHT):
                answers = (answer(app, head.task, options, chunk) for chunk in chunks)
                for chunk, outcomes in zip(chunks, await asyncio.gather(*answers), strict=True):
                    for row, outcome in zip(chunk, outcomes, strict=True):
                        write(row, outcome)
                        failed += bool(outcome.error)
    return failed, count


def choose_head(manifest: Manifest, name: str | None) -> tuple[str, Head]:
    """Return a head and its name, by default the first. Raises DataError for an unknown one."""
    chosen = next(iter(manifest.heads)) if name is None else name
    if chosen not in manifest.heads:
        raise DataError(f"--head: {chosen} is none of {', '.join(manifest.heads)}")
    return chosen, manifest.heads[chosen]


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[ASGIApp]:
    """Yield the service's application, with its engines open, in this process."""
    # Here, so that `--help` does not wait for these imports.
    from service.api.app import create_app
    from service.observability.metrics import Metrics
    from service.processes.single_process import open_local_engines

    metrics = Metrics()
    app = create_app(settings, partial(open_local_engines, metrics), metrics)
    async with app.router.lifespan_context(app):
        yield app


async def post(app: ASGIApp, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the status and the content of the application's response to a request."""
    content = json.dumps(body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ],
        "client": ("local", 0),
        "server": ("local", 0),
    }
    sent = [{"type": "http.request", "body": content, "more_body": False}]
    parts: list[bytes] = []
    status = 0

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await asyncio.Event().wait()  # a client that stays connected
        raise AssertionError

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, json.loads(b"".join(parts))


async def answer(
    app: ASGIApp, task: str, options: Mapping[str, Any], chunk: Sequence[Row]
) -> list[Outcome]:
    """Return the outcome of each row. Rows with a text pair and rows without one are separate requests."""
    outcomes = [Outcome(None, row.error) for row in chunk]
    for fields in {tuple(row.texts) for row in chunk if not row.error}:
        places = [n for n, row in enumerate(chunk) if not row.error and tuple(row.texts) == fields]
        found = await request(app, task, options, [chunk[place] for place in places])
        for place, outcome in zip(places, found, strict=True):
            outcomes[place] = outcome
    return outcomes


async def request(
    app: ASGIApp, task: str, options: Mapping[str, Any], chunk: Sequence[Row]
) -> list[Outcome]:
    """Return the outcomes of rows with the same fields, by one request, or by one for each row where that fails.

    Raises DataError where the options or the service are at fault.
    """
    route, fields = ROUTES[task]
    texts: dict[str, Any] = {
        fields[field]: [r.texts[field] for r in chunk] for field in chunk[0].texts
    }
    if task == "qa":
        texts = {"inputs": [row.texts for row in chunk]}
    while (reply := await post(app, route, {**texts, **options}))[0] == BUSY:
        await asyncio.sleep(1)
    status, content = reply
    if status == 200:
        errors = {each["index"]: each["message"] for each in content.get("errors") or ()}
        results = content.get("results", content.get("embeddings"))
        return [
            Outcome(None, f"{row.where}: {errors[place]}")
            if place in errors
            else Outcome(found, "")
            for place, (row, found) in enumerate(zip(chunk, results, strict=True))
        ]
    if len(chunk) > 1:
        return [outcome for row in chunk for outcome in await request(app, task, options, [row])]
    message, param = content["error"]["message"], content["error"]["param"] or ""
    if status not in (400, 413) and not param.startswith(tuple(texts)):
        raise DataError(message)
    shown = message.replace("inputs[0].", "").replace("[0]", "")
    return [Outcome(None, f"{chunk[0].where}: {shown}")]


def groups(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield consecutive items in lists of `size`; the last may be shorter."""
    while group := list(islice(items, size)):
        yield group


# -- files ------------------------------------------------------------------------------------------------------------


def survey(source: str, needs: Needs) -> tuple[list[str], int]:
    """Return the names of the columns of all rows, and the number of rows.

    Raises DataError for a file that cannot be read to its end, and where no row can be predicted.
    """
    names: list[str] = []
    count, good, first = 0, False, ""
    for row in read_rows(source, needs):
        count += 1
        names = names or list(row.names)
        names += [name for name in row.names if name not in names]
        good, first = good or not row.error, first or row.error
    if not good:
        raise DataError(first or f"{source}: no rows")
    return names, count


def read_rows(source: str, needs: Needs) -> Iterator[Row]:
    """Yield each row of a file. Raises DataError for a file that cannot be read."""
    file, query = sources.split(source)
    path = Path(file)
    match format_of(path):
        case "txt":
            chosen = columns.choose(str(path), needs, ["text"], query)
            for number, line in read_lines(path):
                text = [line.removesuffix("\n")]
                yield read_row(f"{path}:{number}", ["text"], text, chosen, needs)
        case "jsonl" | "json" as kind:
            document = rows.read_document(path) if kind == "json" else None
            for where, fields in rows.read_objects(path, document):
                names = tuple(fields)
                values = list(fields.values())
                try:
                    chosen = columns.choose(where, needs, names, query)
                except DataError as error:
                    yield Row(where, names, values, {}, str(error))
                else:
                    yield read_row(where, names, values, chosen, needs)
        case _:
            table = rows.open_table(path, needs, query)
            chosen = {field: table.names[place] for field, place in table.places.items()}
            for where, cells in table.rows:
                yield read_row(where, table.names, cells, chosen, needs)


def format_of(path: Path) -> str:
    """Return the format of a file: by its name, else by its first line. Raises DataError for one without texts."""
    known = rows.named_format(path)
    if known in ("conll", "parquet"):
        raise DataError(f"{path}: {known} is not predicted: write the texts as CSV, JSON or .txt")
    if known or ".txt" in path.name.lower():
        return known or "txt"
    return "json" if rows.first_line(path).lstrip().startswith(("{", "[")) else "csv"


def read_row(
    where: str,
    names: Sequence[str],
    values: Sequence[Any],
    chosen: Mapping[str, str],
    needs: Needs,
) -> Row:
    """Return a row with the texts of its chosen columns. An empty text is a missing one."""
    texts, error = {}, ""
    for field, name in chosen.items():
        value = values[names.index(name)]
        if value is not None and not isinstance(value, str):
            error = f"{where}: {name} may not be {value!r}"
        elif value and value.strip():
            texts[field] = value
        elif field in needs.required[0]:
            error = f"{where}: no {name}"
    return Row(where, names, values, texts, error)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yield a new file that replaces `path` when the block ends; it is removed when the block fails."""
    partial_file = path.with_name(f"{path.name}.partial")
    try:
        # Half of a surrogate pair, which JSON may contain, is no UTF-8: it is written as JSON does.
        with partial_file.open(
            "w", encoding="utf-8", errors="backslashreplace", newline=""
        ) as file:
            yield file
        os.replace(partial_file, path)
    finally:
        partial_file.unlink(missing_ok=True)


def writer(
    file: TextIO, suffix: str, names: Sequence[str], escape: bool = False
) -> Callable[[Row, Outcome], None]:
    """Return a function that writes a row with its outcome, as JSON lines or as CSV.

    names: of the columns of all rows, which keep their values
    escape: whether cells of CSV are escaped that a spreadsheet would compute
    """
    added, number = OUTPUTS[suffix], 1
    while {*added} & {name.strip() for name in names}:
        number += 1
        added = tuple(f"{name}_{number}" for name in OUTPUTS[suffix])
    if number > 1:
        print(f"The input has columns of these names: results are in {', '.join(added)}")

    def write_object(row: Row, outcome: Outcome) -> None:
        columns = enumerate(zip(row.names, row.values, strict=True), start=1)
        fields = {name or f"column_{n}": value for n, (name, value) in columns if name or value}
        found = zip(added, outcome if outcome.error else outcome[:1], strict=False)
        file.write(json.dumps({**fields, **dict(found)}, ensure_ascii=False) + "\n")

    def write_cells(row: Row, outcome: Outcome) -> None:
        values = row.values
        if [*row.names] != names:
            fields = dict(zip(row.names, row.values, strict=True))
            values = [fields.get(name) for name in names]
        best = outcome.result[0] if outcome.result else {"label": "", "score": ""}
        write_row([*map(cell, values), best["label"], best["score"], outcome.error])

    def write_row(cells: Sequence[Any]) -> None:
        table.writerow([*map(escaped, cells)] if escape else cells)

    if suffix == ".jsonl":
        return write_object
    table = csv.writer(file)
    write_row([*names, *added])
    return write_cells


def cell(value: Any) -> str:
    """Return a value of a row as a cell: text, or JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def escaped(value: Any) -> Any:
    """Return a cell with an apostrophe before it if a spreadsheet would compute it."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


if __name__ == "__main__":
    sys.exit(main())
