"""Predict a file: `python -m service.predict BUNDLE INPUT OUTPUT [--head NAME] [--options JSON]`.

The rows of INPUT become requests to the service in this process, without a network: results are the served ones.
INPUT is .jsonl, .csv, .tsv, or .txt with a text a line; its columns are `text` and `text_pair`, or `question` and
`context`. OUTPUT is .jsonl (each row with its `result`), or .csv for classification (each row with `predicted_label`
and `score`).
"""

import argparse
import asyncio
import csv
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

from fastapi import FastAPI

from service.api.app import create_app
from service.core.bundle import BundleError, Head, Manifest
from service.core.bundle import load as load_bundle
from service.observability import logs
from service.observability.metrics import Metrics
from service.processes.single_process import open_local_engines
from service.settings import Settings

ROWS = 64  # of a request
IN_FLIGHT = 4  # requests at a time
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
INPUTS = (".jsonl", ".csv", ".tsv", ".txt")
OUTPUTS = (".jsonl", ".csv")

Row = dict[str, Any]
T = TypeVar("T")


class InputError(Exception):
    """A file that cannot be predicted; the message names file, line and reason."""


def main(argv: Sequence[str] | None = None) -> int:
    """Predict a file. Returns 0; 1 where rows failed; 2 for wrong arguments and files; 3 for a bad bundle."""
    arguments = parse_arguments(argv)
    logs.configure("warning", "auto", sys.stderr)
    try:
        failed, count = asyncio.run(predict(arguments))
    except BundleError as error:
        print(f"predict: {error}", file=sys.stderr)
        return 3
    except (InputError, OSError, UnicodeError) as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: {count:,} rows, {failed:,} with an error")
    return 1 if failed else 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments. Exits with status 2 for wrong ones."""
    summary, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser("python -m service.predict", description=summary)
    parser.add_argument(
        "bundle", type=Path, help="a bundle's directory. Example: bundles/questions"
    )
    parser.add_argument("input", type=Path, help=f"a file: {', '.join(INPUTS)}. Example: new.csv")
    parser.add_argument("output", type=Path, help=f"a file: {', '.join(OUTPUTS)}. Example: out.csv")
    parser.add_argument("--head", help="name of the head; default: the first. Example: --head mood")
    parser.add_argument(
        "--columns",
        type=json.loads,
        default={},
        metavar="JSON",
        help='names of the columns; default: as they are. Example: --columns \'{"text": "review"}\'',
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
    arguments = parser.parse_args(argv)
    for name, known in (("input", INPUTS), ("output", OUTPUTS)):
        path: Path = getattr(arguments, name)
        if path.suffix not in known:
            parser.error(f"{name}: {path} must end with {', '.join(known)}")
    for name in ("columns", "options"):
        if not isinstance(getattr(arguments, name), dict):
            parser.error(f"--{name}: must be an object of JSON")
    return arguments


async def predict(arguments: argparse.Namespace) -> tuple[int, int]:
    """Write the results of all rows, in one rename at the end. Returns the rows with an error, and all rows.

    Raises BundleError and InputError.
    """
    manifest = load_bundle(arguments.bundle).manifest
    name, head = choose_head(manifest, arguments.head)
    if arguments.output.suffix == ".csv" and head.task != "classification":
        raise InputError(f"{arguments.output}: results of {head.task} are written to .jsonl only")
    settings = Settings(
        bundles=(arguments.bundle,),
        precision=arguments.precision,
        deadline_ms=DAY_MS,
        max_body_bytes=LARGEST_BODY,
    )
    route, fields = ROUTES[head.task]
    columns = {field: arguments.columns.get(field, field) for field in fields}
    failed = count = 0
    async with served(settings) as app:
        with replacing(arguments.output) as file:
            write = Writer(file, arguments.output.suffix)
            rows = read_rows(arguments.input, columns, required(head.task))
            for chunks in groups(groups(rows, ROWS), IN_FLIGHT):
                bodies = [
                    {**body_of(head.task, [row for _, row in chunk], columns), "head": name}
                    | {"on_error": "null", **arguments.options}
                    for chunk in chunks
                ]
                replies = await asyncio.gather(*(post(app, route, body) for body in bodies))
                for chunk, reply in zip(chunks, replies, strict=True):
                    results, errors = results_of(reply, chunk[0][0])
                    for place, (_, row) in enumerate(chunk):
                        write.row(row, results[place], errors.get(place))
                    failed, count = failed + len(errors), count + len(chunk)
            if not count:
                raise InputError(f"{arguments.input}: no rows")
    return failed, count


def choose_head(manifest: Manifest, name: str | None) -> tuple[str, Head]:
    """Return a head and its name, by default the first. Raises InputError for an unknown one."""
    chosen = next(iter(manifest.heads)) if name is None else name
    if chosen not in manifest.heads:
        raise InputError(f"--head: {chosen} is none of {', '.join(manifest.heads)}")
    return chosen, manifest.heads[chosen]


def required(task: str) -> tuple[str, ...]:
    """Return the fields that each row must have."""
    fields = tuple(ROUTES[task][1])
    return fields if task == "qa" else fields[:1]


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[FastAPI]:
    """Yield the service's application, with its engines open, in this process."""
    metrics = Metrics()
    app = create_app(settings, partial(open_local_engines, metrics), metrics)
    async with app.router.lifespan_context(app):
        yield app


async def post(app: FastAPI, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
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


def body_of(task: str, rows: Sequence[Row], columns: Mapping[str, str]) -> Row:
    """Return a request with the inputs of some rows."""
    if task == "qa":
        return {"inputs": [{field: row[name] for field, name in columns.items()} for row in rows]}
    body: Row = {"inputs": [row[columns["text"]] for row in rows]}
    pair = columns.get("text_pair", "")
    if any(row.get(pair) for row in rows):
        body["text_pair"] = [row.get(pair) or "" for row in rows]
    return body


def results_of(reply: tuple[int, Any], line: int) -> tuple[list[Any], dict[int, str]]:
    """Return the result of each input, and errors by the index of the input. Raises InputError for a failed request.

    line: of the first input, for messages
    """
    status, content = reply
    if status != 200:
        raise InputError(f"rows from line {line}: {content['error']['message']}")
    results = content.get("results", content.get("embeddings"))
    return results, {each["index"]: each["message"] for each in content.get("errors") or ()}


def groups(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield consecutive items in lists of `size`; the last may be shorter."""
    while group := list(islice(items, size)):
        yield group


# -- files ------------------------------------------------------------------------------------------------------------


def read_rows(
    path: Path, columns: Mapping[str, str], required: Sequence[str]
) -> Iterator[tuple[int, Row]]:
    """Yield each row with its line. Raises InputError for a row without a required text."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line, row in READERS[path.suffix](path, file):
            for field in required:
                name = columns[field]
                if not isinstance(row.get(name), str):
                    known = ", ".join(row) or "no column"
                    raise InputError(
                        f"{path}:{line}: column {name!r} is no text; found {known}. "
                        f'Name it: --columns \'{{"{field}": "..."}}\''
                    )
            yield line, row


def read_lines(path: Path, file: TextIO) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, start=1):
        if text := line.strip():
            yield number, {"text": text}


def read_json(path: Path, file: TextIO) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: not a JSON object")
        yield number, row


def read_table(path: Path, file: TextIO) -> Iterator[tuple[int, Row]]:
    sample = file.read(65536)
    file.seek(0)
    dialect: type[csv.Dialect] = csv.excel_tab if path.suffix == ".tsv" else csv.excel
    if path.suffix == ".csv":
        try:
            dialect = csv.Sniffer().sniff(sample, ",;\t|")
        except csv.Error:  # a single column
            dialect = csv.excel
    reader = csv.DictReader(file, dialect=dialect, restkey="", strict=True)
    try:
        for row in reader:
            if "" in row or None in row.values():
                names = len(reader.fieldnames or ())
                raise InputError(
                    f"{path}:{reader.line_num}: not {names} columns, as the first line names"
                )
            yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: {error}") from None


READERS = {".txt": read_lines, ".jsonl": read_json, ".csv": read_table, ".tsv": read_table}


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yield a new file that replaces `path` when the block ends; it is removed when the block fails."""
    partial_file = path.with_name(f"{path.name}.partial")
    try:
        with partial_file.open("w", encoding="utf-8", errors="replace", newline="") as file:
            yield file
        os.replace(partial_file, path)
    finally:
        partial_file.unlink(missing_ok=True)


class Writer:
    """The output file: rows with their results, as JSON lines or as CSV."""

    def __init__(self, file: TextIO, suffix: str) -> None:
        self.file, self.suffix = file, suffix
        self.table: csv.DictWriter[str] | None = None

    def row(self, row: Row, result: Any, error: str | None) -> None:
        """Write a row with its result, or with its error."""
        if self.suffix == ".jsonl":
            found = {"result": result} if error is None else {"result": None, "error": error}
            self.file.write(json.dumps({**row, **found}, ensure_ascii=False) + "\n")
            return
        best = result[0] if result else {"label": "", "score": ""}
        found = {"predicted_label": best["label"], "score": best["score"], "error": error or ""}
        if self.table is None:
            self.table = csv.DictWriter(self.file, [*row, *found], extrasaction="ignore")
            self.table.writeheader()
        self.table.writerow({**row, **found})


if __name__ == "__main__":
    sys.exit(main())
