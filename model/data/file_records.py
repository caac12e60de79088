"""Rows of data files as fields by our names: CSV, TSV, JSON and JSON lines.

A record is the place of a row, for messages, and its fields. Only fields that the task has are kept. The cells of a
table are text; a cell with a list is JSON, or words (`tokens`, `tags`) or names separated by commas (`labels`).
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from model.data import conll, spans
from service.core.data_files import rows
from service.core.data_files.columns import Needs, choose, fits, normalize
from service.core.data_files.rows import Format, Table
from service.core.data_files.text_files import DataError

MULTI_LABEL = "multi_label_classification"
JUDGMENTS = ("answer", "gold_label")  # columns by which `is_left_out` decides
SENTENCE = re.compile(r"sent(ence)?(_?(id|idx|index|no|number|#))?")  # the column with its number


class Fields(dict[str, Any]):
    """The fields of a row by our names, with the names of their columns for messages."""

    def __init__(self, fields: dict[str, Any], names: dict[str, str]):
        super().__init__(fields)
        self.names = names


Record = tuple[str, Fields]


def format_of(path: Path, needs: Needs) -> Format:
    """Return the format of a file: by its name, else by its first line."""
    known, is_ner = rows.named_format(path), needs.task == "ner"
    if known == "conll" and not is_ner:
        raise DataError(f"{path}: CoNLL files are for ner, not for {needs.task}")
    if known == "tsv" and is_ner:
        names = rows.first_line(path).split("\t")
        return "tsv" if fits(needs, rows.recognized(needs, names)) else "conll"
    if known:
        return known
    first = rows.first_line(path).lstrip()
    if first.startswith(("{", "[")) and (not is_ner or rows.is_json(first)):
        return "json"
    return "conll" if is_ner else "csv"


def read_table(path: Path, needs: Needs, query: str, problem_type: str | None) -> Iterator[Record]:
    """Yield the rows of a CSV or TSV file; an empty cell is a missing field, and a row of empty cells is none.

    query: the columns that the source names
    Raises DataError naming file, line, column and value.
    """
    table = rows.open_table(path, needs, query)
    if table.places.keys() >= conll.FIELDS:
        table = table._replace(rows=iter(every := [*table.rows]))
        if has_a_word_per_row(table, every):
            yield from _sentences(path, table)
            return
    judged = {name: table.names.index(name) for name in JUDGMENTS if name in table.names}
    readers = {field: _cell_reader(field, problem_type) for field in table.chosen}
    left_out = 0
    for where, cells in table.rows:
        if not any(map(str.strip, cells)):
            continue
        if is_left_out({name: cells[place] for name, place in judged.items()}, needs):
            left_out += 1
            continue
        fields = {}
        for field, place in table.places.items():
            try:
                value = readers[field](cells[place])
            except ValueError as error:
                shown = f"{table.chosen[field]} may not be {cells[place]!r}"
                raise DataError(f"{where}: {shown}: {error}") from None
            if value is not None:
                fields[field] = value
        yield where, Fields(fields, table.chosen)
    log_left_out(path, left_out)


def has_a_word_per_row(table: Table, every: Sequence[tuple[str, list[str]]]) -> bool:
    """Return whether no row has several tags, and so each row has one word."""
    tags = [cells[table.places["tags"]].split() for _, cells in every]
    return len(tags) > 1 and all(len(own) < 2 and "[" not in own[:1] for own in tags)


def _sentences(path: Path, table: Table) -> Iterator[Record]:
    """Yield the sentences of a table with a word and its tag in each row.

    A sentence ends at an empty line or row, or where the column with the number of its sentence has another value.
    Raises DataError for a row without a word or a tag, and for a table in which nothing ends a sentence.
    """
    number = next(
        (n for n, name in enumerate(table.names) if SENTENCE.fullmatch(normalize(name))), None
    )
    found: list[Record] = []
    last_line, last_number = 0, ""
    for where, cells in table.rows:
        word, tag = (cells[table.places[field]].strip() for field in ("tokens", "tags"))
        if not any(map(str.strip, cells)):
            continue
        if not word or not tag:
            missing = table.chosen["tags" if word else "tokens"]
            raise DataError(f"{where}: no {missing}: fill the cell, or remove the row")
        line = int(where.rpartition(":")[2])
        own_number = last_number if number is None else cells[number].strip() or last_number
        if line != last_line + 1 or own_number != last_number:
            found.append((where, Fields({"tokens": [], "tags": []}, table.chosen)))
        found[-1][1]["tokens"].append(word)
        found[-1][1]["tags"].append(tag)
        last_line, last_number = line, own_number
    if number is None and len(found) == 1:
        raise DataError(
            f"{path}: nothing ends a sentence: add empty lines, or a column sentence_id"
        )
    yield from found


def read_objects(path: Path, needs: Needs, query: str, *, lines: bool) -> Iterator[Record]:
    """Yield the rows of a JSON file. Raises DataError naming the place.

    lines: whether the file has one JSON object per line
    """
    left_out = 0
    for where, row in rows.read_objects(path, None if lines else rows.read_document(path)):
        if is_left_out(row, needs):
            left_out += 1
            continue
        row = spans.flatten(where, row, needs.task)  # noqa: PLW2901
        chosen = choose(where, needs, tuple(row), query)
        yield where, Fields({field: row[name] for field, name in chosen.items()}, chosen)
    log_left_out(path, left_out)


def is_left_out(row: dict[str, Any], needs: Needs) -> bool:
    """Return whether the annotator of a row has rejected or skipped it, or not seen it (Prodigy, Label Studio).

    Also whether the annotators of a pair agreed on no label (SNLI).
    """
    if row.get("gold_label") == "-":
        return True
    if row.get("answer") in ("reject", "ignore") and "answer" not in needs.fields:
        return True
    return spans.is_task(row) and not spans.annotation(row)


def log_left_out(path: Path, count: int) -> None:
    if count:
        conll.log(
            f"{path}: rows left out because annotators rejected or skipped them, or disagreed: {count:,}"
        )


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
    if field in ("texts", "answers", "entities"):
        return lambda cell: _json_value(cell) if cell.strip() else None
    if field in ("negatives", "neg"):
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
