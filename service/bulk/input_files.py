"""The rows of input files: those that training reads, Parquet and Arrow files, and .txt with a text a line."""

import glob
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import Any

from service.bulk.rows import Row
from service.core.addresses import address
from service.core.data_files import columns, rows, sources
from service.core.data_files.columns import Needs
from service.core.data_files.text_files import DataError, read_lines
from service.core.remote_files import copy, files_at

ARROW = (".arrow", ".feather")
ROWS = 1024  # that are read at once of a Parquet or Arrow file


def find_files(source: str) -> list[str]:
    """Return the files of a file's name, a directory or a pattern with `*`, sorted. Raises DataError for none.

    source: local, or an address. A directory stands for the files in it and below it, without hidden ones.
    """
    path, query = sources.split(source)
    if url := address(path):
        found = find_remote(url)
        return [f"{name}?{query}" if query else name for name in found]
    pattern = f"{glob.escape(path)}/**/*" if Path(path).is_dir() else path
    if pattern == path and (Path(path).exists() or sources.is_hub(path)):
        return [source]
    if "*" not in pattern:
        raise DataError(f"{path}: no such file")
    base = path if Path(path).is_dir() else path.partition("*")[0].rpartition("/")[0]
    named = [
        name for name in glob.glob(pattern, recursive=True) if not is_hidden(name[len(base) :])
    ]
    found = sorted(name for name in named if Path(name).is_file())
    if not found:
        raise DataError(f"{path}: no files")
    return [f"{name}?{query}" if query else name for name in found]


def find_remote(url: str) -> list[str]:
    """Return the addresses of the files of an address or a pattern, sorted. Raises DataError for none."""
    start, star, _ = url.partition("*")
    base = start.rpartition("/")[0] if star else url
    listed = [f"{base}/{name}" for name in files_at(base).list() if not is_hidden(name)]
    if not star:
        return sorted(listed) or [url]
    depth = 0 if "**" in url else url.count("/")  # a single star stands for no slash
    found = [name for name in listed if fnmatch(name, url) and depth in (0, name.count("/"))]
    if not found:
        raise DataError(f"{url}: no files")
    return sorted(found)


def is_hidden(path: str) -> bool:
    """Return whether a part of a path begins with `.` or `_`, as records of programs that write data sets do."""
    return any(part.startswith((".", "_")) for part in path.split("/"))


@contextmanager
def local_copies(files: Sequence[str]) -> Iterator[list[str]]:
    """Yield sources of rows, in place of those at addresses their copies, which are removed after the block."""
    with tempfile.TemporaryDirectory() as folder:
        copies = []
        for number, file in enumerate(files):
            path, query = sources.split(file)
            if (url := address(path)) is None:
                copies.append(file)
                continue
            base, _, name = url.rpartition("/")
            target = Path(folder, str(number), name)
            try:
                copy(files_at(base), name, target)
            except FileNotFoundError:
                raise DataError(f"{url}: no such file") from None
            copies.append(f"{target}?{query}" if query else str(target))
        yield copies


def survey(source: str, needs: Needs, local: str = "") -> tuple[list[str], int]:
    """Return the names of the columns of all rows, and the number of rows. local: see `read_rows`

    Raises DataError for a file that cannot be read to its end, and where no row can be predicted.
    """
    names: list[str] = []
    count, good, first = 0, False, ""
    for row in read_rows(source, needs, local):
        count += 1
        names = names or list(row.names)
        names += [name for name in row.names if name not in names]
        good, first = good or not row.error, first or row.error
    if not good:
        raise DataError(first or f"{source}: no rows")
    return names, count


def read_rows(source: str, needs: Needs, local: str = "") -> Iterator[Row]:
    """Yield each row of a file. Raises DataError for a file that cannot be read.

    local: the copy of a source at an address, which messages do not name
    """
    if local in ("", source):
        yield from read_local(source, needs)
        return
    own, name = sources.split(local)[0], sources.split(source)[0]
    try:
        for row in read_local(local, needs):
            yield row._replace(
                where=row.where.replace(own, name), error=row.error.replace(own, name)
            )
    except DataError as error:
        raise DataError(str(error).replace(own, name)) from None


def read_local(source: str, needs: Needs) -> Iterator[Row]:
    """Yield each row of a local file. Raises DataError for a file that cannot be read."""
    file, query = sources.split(source)
    path = Path(file)
    match format_of(path):
        case "parquet" | "arrow" as kind:
            yield from rows_of(read_arrow(path, kind), str(path), needs, query)
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


def rows_of(
    records: Iterable[Mapping[str, Any]], where: str, needs: Needs, query: str = ""
) -> Iterator[Row]:
    """Yield each record as a row. where: their source, for messages; query: the columns that it names"""
    for number, fields in enumerate(records, start=1):
        names = tuple(fields)
        chosen = columns.choose(where, needs, names, query)
        yield read_row(f"{where}: row {number}", names, [*fields.values()], chosen, needs)


def read_arrow(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet or Arrow file, a part of them in memory at once."""
    with arrow_errors(path):
        if kind == "parquet":
            import pyarrow.parquet

            parts = pyarrow.parquet.ParquetFile(path).iter_batches(ROWS)
        else:
            import pyarrow.feather

            parts = iter(pyarrow.feather.read_table(path, memory_map=True).to_batches(ROWS))
        for part in parts:
            yield from part.to_pylist()


@contextmanager
def arrow_errors(path: Path) -> Iterator[None]:
    """Raise DataError for a file that pyarrow cannot read or write, and where it is not installed."""
    try:
        yield
    except ImportError:
        reason = "needs the extra bulk: pip install pyarrow"
        raise DataError(f"{path}: {reason}") from None
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise DataError(f"{path}: {error}") from None


def format_of(path: Path) -> str:
    """Return the format of a file: by its name, else by its first line. Raises DataError for one without texts."""
    if path.suffix.lower() in ARROW:
        return "arrow"
    known = rows.named_format(path)
    if known == "conll":
        raise DataError(f"{path}: {known} is not predicted: write the texts as CSV, JSON or .txt")
    if known or ".txt" in path.name.lower():
        return known or "txt"
    return "json" if rows.first_line(path).lstrip().startswith(("{", "[")) else "csv"


def read_row(
    where: str, names: Sequence[str], values: Sequence[Any], chosen: Mapping[str, str], needs: Needs
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
