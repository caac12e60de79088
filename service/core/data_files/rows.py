"""Rows of data files: CSV, TSV, JSON and JSON lines, by the end of a file's name or by its first line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from service.core.data_files import columns, tables
from service.core.data_files.columns import Needs
from service.core.data_files.text_files import DataError, read_lines, read_text

Format = Literal["csv", "tsv", "jsonl", "json", "parquet", "conll", "txt"]
# The format by the end of a file's name, without that of a compression.
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


class Table(NamedTuple):
    """The rows of a table.

    names: of the columns, as they stand
    chosen: the columns by our fields
    places: the index of each field's column
    rows: the place of each row, for messages, and its cells
    """

    names: list[str]
    chosen: dict[str, str]
    places: dict[str, int]
    rows: Iterator[tuple[str, list[str]]]


def named_format(path: Path) -> Format | None:
    """Return the format that the end of a file's name says."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((SUFFIXES[suffix] for suffix in reversed(suffixes) if suffix in SUFFIXES), None)


def first_line(path: Path) -> str:
    """Return the first line of a file that is not blank."""
    return next((line for _, line in read_lines(path) if line.strip()), "")


# -- tables -----------------------------------------------------------------------------------------------------------


def open_table(path: Path, needs: Needs, query: str) -> Table:
    """Return a CSV or TSV file. Raises DataError naming file, line and columns.

    query: the columns that the source names
    """
    named = columns.named(str(path), needs, query) if query else {}

    def fits(names: Sequence[str]) -> bool:
        found = named if {*named.values()} <= {*names} else {}
        return columns.fits(needs, found if query else recognized(needs, names))

    line, names, rows = tables.read_table(path, fits)
    bare = [name.strip() for name in names]
    header = f"{path}:{line}: the first line, which names the columns"
    chosen = columns.choose(header, needs, [name for name in bare if name], query) if names else {}
    places = {field: bare.index(name) for field, name in chosen.items()}
    return Table(names, chosen, places, ((f"{path}:{number}", cells) for number, cells in rows))


def recognized(needs: Needs, names: Sequence[str]) -> dict[str, str]:
    """Return the columns with usual names, by our fields; none where two have one name."""
    try:
        return columns.recognize(needs, tuple(names))
    except DataError:
        return {}


# -- JSON -------------------------------------------------------------------------------------------------------------


def read_objects(path: Path, document: Any = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each row, for messages, and its fields. Raises DataError naming the place of a wrong one.

    document: of a JSON file, see `read_document`; None for a file with one JSON object per line
    """
    if document is None:
        for number, line in read_lines(path):
            if line.strip():
                yield f"{path}:{number}", parse_json(f"{path}:{number}", line)
        return
    if _is_squad(document):
        yield from _questions(path, document)
        return
    rows = document.get("data", [document]) if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise DataError(f"{path}: not a list of JSON objects, nor an object with one in 'data'")
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number}"
        if not isinstance(row, dict):
            raise DataError(f"{where}: not a JSON object")
        yield where, row


def _is_squad(document: Any) -> bool:
    """Return whether a document is in SQuAD's form: articles with paragraphs."""
    articles = document.get("data") if isinstance(document, dict) else None
    first = articles[0] if isinstance(articles, list) and articles else None
    return isinstance(first, dict) and "paragraphs" in first


def _questions(path: Path, document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the questions of a document in SQuAD's form, each with its context."""
    for article in _list(path, document, "data"):
        for paragraph in _list(path, article, "paragraphs"):
            shared = {name: value for name, value in paragraph.items() if name != "qas"}
            for entry in _list(path, paragraph, "qas"):
                where = f"{path}: question {entry.get('id')!r}"
                yield where, {"answers": [], **shared, **entry}


def _list(path: Path, row: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list of objects, empty if it is absent. Raises DataError for anything else."""
    found: Any = row.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise DataError(f"{path}: {name} must be a list of JSON objects")
    return found


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
        if is_json(first):  # lines, of which a later one is wrong
            return None
        raise DataError(
            f"{path}:{error.lineno}: column {error.colno}: not JSON: {error.msg}"
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def is_json(text: str) -> bool:
    """Return whether a text is a JSON document."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def parse_json(where: str, text: str) -> dict[str, Any]:
    """Return a JSON object. Raises DataError naming the place."""
    try:
        document = DECODER.decode(text)
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


DECODER = json.JSONDecoder(object_pairs_hook=_object)  # json.loads would make one for each row
