"""Rows of data files as fields by our names: CSV, TSV, JSON and JSON lines.

A record is the place of a row, for messages, and its fields. Only fields that the task has are kept. The cells of a
table are text; a cell with a list is JSON, or words (`tokens`, `tags`) or names separated by commas (`labels`).
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from model.data import columns, tables
from model.data.checksums import DataError
from model.data.text_files import read_lines, read_text

Format = Literal["csv", "tsv", "jsonl", "json", "parquet", "conll"]
MULTI_LABEL = "multi_label_classification"
# The format by the end of a file's name, without .gz and .xz.
SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".conll": "conll",
    ".bio": "conll",
    ".iob": "conll",
    ".iob2": "conll",
}


class Fields(dict[str, Any]):
    """The fields of a row by our names, with the names of their columns for messages."""

    def __init__(self, fields: dict[str, Any], names: dict[str, str]):
        super().__init__(fields)
        self.names = names


Record = tuple[str, Fields]


def format_of(path: Path, task: str) -> Format:
    """Return the format of a file: by its name, else by its first line."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in (".gz", ".xz")]
    known = next((SUFFIXES[suffix] for suffix in reversed(suffixes) if suffix in SUFFIXES), None)
    if known == "conll" and task != "ner":
        raise DataError(f"{path}: CoNLL files are for ner, not for {task}")
    if known == "tsv" and task == "ner":
        return (
            "tsv"
            if columns.fits(task, _recognized(task, _first_line(path).split("\t"), ""))
            else "conll"
        )
    if known:
        return known
    first = _first_line(path).lstrip()
    if first.startswith(("{", "[")) and (task != "ner" or _is_json(first)):
        return "json"
    return "conll" if task == "ner" else "csv"


def _first_line(path: Path) -> str:
    return next((line for _, line in read_lines(path) if line.strip()), "")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# -- tables -----------------------------------------------------------------------------------------------------------


def read_table(path: Path, task: str, query: str, problem_type: str | None) -> Iterator[Record]:
    """Yield the rows of a CSV or TSV file; an empty cell is a missing field.

    query: the columns that the source names
    Raises DataError naming file, line, column and value.
    """
    named = columns.named(str(path), task, query) if query else {}

    def fits(names: Sequence[str]) -> bool:
        found = named if {*named.values()} <= {*names} else {}
        return columns.fits(task, found if query else _recognized(task, names, query))

    line, names, rows = tables.read_table(path, fits)
    if not names:
        return
    header = f"{path}:{line}: the first line, which names the columns"
    chosen = columns.choose(header, task, [name for name in names if name], query)
    places = {field: names.index(name) for field, name in chosen.items()}
    readers = {field: _cell_reader(field, problem_type) for field in chosen}
    for number, cells in rows:
        fields = {}
        for field, place in places.items():
            try:
                value = readers[field](cells[place])
            except ValueError as error:
                shown = f"{chosen[field]} may not be {cells[place]!r}"
                raise DataError(f"{path}:{number}: {shown}: {error}") from None
            if value is not None:
                fields[field] = value
        yield f"{path}:{number}", Fields(fields, chosen)


def _recognized(task: str, names: Sequence[str], query: str) -> dict[str, str]:
    """Return the columns with usual names; none where two have one name."""
    try:
        return columns.recognize(task, tuple(names))
    except DataError:
        return {}


def _cell_reader(field: str, problem_type: str | None) -> Callable[[str], Any]:
    """Return a function from a cell to the value of a field; None for a missing one."""
    if field in ("label", "labels") and problem_type == MULTI_LABEL:
        return lambda cell: _list(cell, ",")
    if field == "score" or (field in ("label", "labels") and problem_type == "regression"):
        return lambda cell: _number(cell) if cell.strip() else None
    if field == "answer_start":
        return lambda cell: int(_number(cell)) if cell.strip() else None
    if field in ("tokens", "tags"):
        return lambda cell: _list(cell, None) if cell.strip() else None
    if field in ("texts", "answers"):
        return lambda cell: _json_value(cell) if cell.strip() else None
    if field == "negatives":
        return lambda cell: (_json_value(cell) if cell.startswith("[") else cell) or None
    return lambda cell: cell if cell.strip() else None


def _list(cell: str, separator: str | None) -> list[Any]:
    """Return a JSON list, or the parts of a text."""
    if cell.lstrip().startswith("["):
        found: list[Any] = _json_value(cell)
        return found
    return [part.strip() for part in cell.split(separator) if part.strip()]


def _json_value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        raise ValueError("a list or an object is JSON here, with double quotation marks") from None


def _number(cell: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        raise ValueError("a number is needed, such as 2.5") from None
    if not math.isfinite(number):
        raise ValueError("a finite number is needed")
    return number


# -- JSON -------------------------------------------------------------------------------------------------------------


def read_json_lines(path: Path, task: str, query: str) -> Iterator[Record]:
    """Yield the rows of a file with one JSON object per line. Raises DataError naming the line."""
    for number, line in read_lines(path):
        if line.strip():
            where = f"{path}:{number}"
            yield _record(where, task, query, parse_json(where, line))


def read_document(path: Path) -> Any:
    """Return the JSON document of a file; None for JSON lines.

    Raises DataError with line and column for other text.
    """
    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        first = text.lstrip().partition("\n")[0]
        if _is_json(first):  # lines, of which a later one is wrong
            return None
        raise DataError(
            f"{path}:{error.lineno}: column {error.colno}: not JSON: {error.msg}"
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def document_records(path: Path, task: str, query: str, document: Any) -> Iterator[Record]:
    """Yield the rows of a JSON document: a list of objects, an object with such a list in `data`, or one object."""
    rows = document.get("data", [document]) if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise DataError(f"{path}: not a list of JSON objects, nor an object with one in 'data'")
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number}"
        if not isinstance(row, dict):
            raise DataError(f"{where}: not a JSON object")
        yield _record(where, task, query, row)


def parse_json(where: str, text: str) -> dict[str, Any]:
    """Return a JSON object. Raises DataError naming the place."""
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: column {error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    if not isinstance(document, dict):
        raise DataError(f"{where}: not a JSON object")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ValueError where two of its fields have one name."""
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two fields are called {twice!r}: rename one of them")
    return document


def _record(where: str, task: str, query: str, row: dict[str, Any]) -> Record:
    chosen = _row_columns(where, task, tuple(row), query)
    return where, Fields({field: row[name] for field, name in chosen.items()}, chosen)


def _row_columns(where: str, task: str, names: tuple[str, ...], query: str) -> dict[str, str]:
    try:
        return _known_columns(task, names, query)
    except DataError:
        return columns.choose(where, task, names, query)


@functools.lru_cache(maxsize=1024)  # rows of a file have few sets of fields
def _known_columns(task: str, names: tuple[str, ...], query: str) -> dict[str, str]:
    return columns.choose("", task, names, query)
