"""The rows of output files with their results, as JSON lines, CSV or Parquet."""

import csv
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import orjson

from service.bulk.input_files import arrow_errors
from service.bulk.rows import Outcome, Row
from service.core.addresses import address
from service.core.bundle_cache import root
from service.core.data_files.text_files import DataError
from service.core.manifest import Task
from service.core.remote_files import copy, files_at

# The columns of the results, by the end of the output's name. Where a row has one of them, all get a number.
OUTPUTS = {
    ".jsonl": ("result", "error"),
    ".csv": ("predicted_label", "score", "error"),
    ".parquet": ("result", "error"),
}


# A spreadsheet computes a cell that begins so, as OWASP's page on CSV injection has it; but not a number.
FORMULA = re.compile(r"[=@\t\r\n\uff1d\uff0b\uff0d\uff20]|[+\-](?!\d*[.,]?\d+([eE][+\-]?\d+)?\Z)")

Write = Callable[[Row, Outcome], None]


class Output(NamedTuple):
    """The output of a run.

    path: a file with this suffix, or a directory
    suffix: with the format, of `OUTPUTS`
    escape_formulas: whether cells of CSV are escaped that a spreadsheet would compute
    url: the address that gets the files, "" for a local output; `path` is then in the cache until the run is complete
    """

    path: Path
    suffix: str
    escape_formulas: bool = False
    url: str = ""

    @property
    def is_file(self) -> bool:
        return self.path.suffix.lower() == self.suffix

    def check(self, task: Task) -> None:
        """Raise DataError for results that the format cannot hold, and without what writes it."""
        if self.url.startswith("http"):
            raise DataError(f"{self.url} cannot be written: name hf://, s3:// or gs://")
        if self.suffix == ".csv" and task != "classification":
            reason = f"results of {task} are written to .jsonl or .parquet only"
            raise DataError(f"{self.path}: {reason}")
        if self.suffix == ".parquet":
            with arrow_errors(self.path):
                import pyarrow.parquet  # noqa: F401

    def send(self, path: Path) -> None:
        """Write a file to the address, unless the output is local."""
        if self.url:
            files_at(self.url.rpartition("/")[0] if self.is_file else self.url).put(path.name, path)

    def receive(self, name: str) -> None:
        """Continue the run whose record a directory at an address has, unless it is one of this machine.

        Raises DataError for files of no run.
        """
        if self.url and not self.is_file and not (self.path / name).exists():
            files = files_at(self.url)
            listed = files.list()
            if name in listed:
                copy(files, name, self.path / name)
            elif listed:
                raise DataError(f"{self.url} has files, but not of a run: name another output")


def output_at(path: Path, suffix: str, escape_formulas: bool) -> Output:
    """Return the output of a path or an address."""
    if (url := address(path)) is None:
        return Output(path, suffix, escape_formulas)
    own = root() / "runs" / hashlib.sha256(url.encode()).hexdigest()[:16] / Path(url).name
    return Output(own, suffix, escape_formulas, url)


def result_columns(suffix: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns of results, which differ from the names of the input's columns."""
    added, number = OUTPUTS[suffix], 1
    while {*added} & {name.strip() for name in names}:
        number += 1
        added = tuple(f"{name}_{number}" for name in OUTPUTS[suffix])
    return added


@contextmanager
def writing(path: Path, output: Output, names: Sequence[str], header: bool) -> Iterator[Write]:
    """Yield a function that writes a row to a new file, which replaces `path` when the block ends without an error.

    names: of the columns of all rows, which keep their values
    header: whether CSV begins with the names
    """
    added = result_columns(output.suffix, names)
    with replacing(path) as partial_file:
        if output.suffix == ".parquet":
            rows: list[tuple[Row, Outcome]] = []
            yield partial(add_row, rows)
            with arrow_errors(path):
                write_table(rows, names, added, partial_file)
            return
        # Half of a surrogate pair, which JSON may contain, is no UTF-8: it is written as JSON does.
        with partial_file.open(
            "w", encoding="utf-8", errors="backslashreplace", newline=""
        ) as file:
            if output.suffix == ".jsonl":
                yield partial(write_object, file, added)
            else:
                table = csv.writer(file)
                write_row = (
                    partial(write_escaped, table) if output.escape_formulas else table.writerow
                )
                if header:
                    write_row([*names, *added])
                yield partial(write_cells, write_row, names)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file that replaces `path` when the block ends; it is removed when the block fails."""
    partial_file = path.with_name(f".{path.name}.partial")
    try:
        yield partial_file
        os.replace(partial_file, path)
    finally:
        partial_file.unlink(missing_ok=True)


def join(parts: Sequence[Path], path: Path) -> None:
    """Write the rows of all parts to one file."""
    with replacing(path) as partial_file:
        if path.suffix.lower() != ".parquet":
            with partial_file.open("wb") as file:
                for part in parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, file)
            return
        with arrow_errors(path):
            import pyarrow as pa
            import pyarrow.parquet as pq

            tables = [pq.ParquetFile(part) for part in parts]
            schema = pa.unify_schemas(
                [table.schema_arrow for table in tables], promote_options="permissive"
            )
            with pq.ParquetWriter(partial_file, schema) as writer:
                for table in tables:
                    writer.write_table(table.read().cast(schema))


def write_object(file: TextIO, added: Sequence[str], row: Row, outcome: Outcome) -> None:
    """Write a row as a line of JSON, with its result or its error."""
    columns = enumerate(zip(row.names, row.values, strict=True), start=1)
    fields = {name or f"column_{n}": value for n, (name, value) in columns if name or value}
    found = zip(added, outcome if outcome.error else outcome[:1], strict=False)
    line = json.dumps({**fields, **dict(found)}, ensure_ascii=False, default=plain)
    file.write(line + "\n")


def plain(value: Any) -> Any:
    """Return a vector as numbers with the digits of float32, and any other value as text."""
    if isinstance(value, np.ndarray):
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    return str(value)


def write_cells(
    write_row: Callable[[list[Any]], object], names: Sequence[str], row: Row, outcome: Outcome
) -> None:
    """Write a row as CSV, with its best label and the score, or with its error."""
    values = row.values
    if [*row.names] != [*names]:
        fields = dict(zip(row.names, row.values, strict=True))
        values = [fields.get(name) for name in names]
    best = outcome.result[0] if outcome.result else {"label": "", "score": ""}
    write_row([*map(cell, values), best["label"], best["score"], outcome.error])


def write_escaped(table: Any, cells: list[Any]) -> None:
    """Write cells, with an apostrophe before each that a spreadsheet would compute."""
    table.writerow(
        [f"'{one}" if isinstance(one, str) and FORMULA.match(one) else one for one in cells]
    )


def add_row(rows: list[tuple[Row, Outcome]], row: Row, outcome: Outcome) -> None:
    """Keep a row of a Parquet file."""
    rows.append((row, outcome))


def write_table(
    rows: Sequence[tuple[Row, Outcome]], names: Sequence[str], added: Sequence[str], path: Path
) -> None:
    """Write rows to a Parquet file, each with its result and its error, of which one is null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [dict(zip(row.names, row.values, strict=True)) for row, _ in rows]
    table = {name: arrow_column(pa, [own.get(name) for own in fields]) for name in names}
    found = result_arrays(pa, [outcome for _, outcome in rows])
    pq.write_table(pa.table({**table, **dict(zip(added, found, strict=True))}), path)


def result_arrays(pa: Any, outcomes: Sequence[Outcome]) -> tuple[Any, Any]:
    """Return the columns of results and of errors."""
    results = arrow_column(pa, [outcome.result for outcome in outcomes])
    return results, pa.array([outcome.error or None for outcome in outcomes], pa.string())


def arrow_column(pa: Any, values: list[Any]) -> Any:
    """Return a column of a table; values of different types as text."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([None if value is None else cell(value) for value in values])


def cell(value: Any) -> str:
    """Return a value of a row as a cell: text, or JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
