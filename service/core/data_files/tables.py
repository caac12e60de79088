"""CSV and TSV files: a first line that names the columns, and a row of cells per line.

CSV is RFC 4180 with any delimiter: a cell in quotation marks may contain delimiters, line ends and doubled quotation
marks. TSV has no quotation (a tab ends a cell), unless the whole file is well-formed with it and needs it.
"""

import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from service.core.data_files.text_files import DataError, read_text

COMMON = (",", ";", "\t", "|")
SEPARATOR = re.compile(r'"?sep=(.)"?\r?\n')  # Excel's own first line
SAMPLE = 20_000  # characters from which a rare delimiter is guessed
Row = tuple[int, list[str]]  # the line on which a row begins, and its cells

csv.field_size_limit(2**31 - 1)


def read_table(
    path: Path, fits: Callable[[Sequence[str]], bool]
) -> tuple[int, list[str], Iterator[Row]]:
    """Return the line of the header, the names of the columns, and the rows.

    A row may have empty cells only. An empty line is none, but in a table of one column, where it is an empty cell.
    fits: whether these columns are enough, by which the delimiter is chosen
    Raises DataError for columns of one name, a row of another length, and a quotation that does not end.
    """
    text = read_text(path)
    separator = SEPARATOR.match(text)
    first = 1 + bool(separator)
    if separator:
        text = text[separator.end() :]
    if ".tsv" in path.suffixes:
        rows = _rows(path, text, "\t", first, quoted=_is_quoted(text))
    else:
        rows = _rows(path, text, separator[1] if separator else _delimiter(text, fits), first)
    line, names = next((row for row in rows if any(map(str.strip, row[1]))), (first, []))
    for name, count in Counter(map(str.strip, names)).items():
        if name and count > 1:
            raise DataError(f"{path}:{line}: {count} columns are called {name!r}: rename them")
    return line, names, _checked(path, names, rows)


def _checked(path: Path, names: Sequence[str], rows: Iterator[Row]) -> Iterator[Row]:
    count, header = len(names), _bare(names)
    for line, cells in rows:
        is_blank = not any(map(str.strip, cells))
        if is_blank and len(cells) < 2 <= count:
            continue
        if not is_blank and (any(cells[count:]) or len(cells) < count):
            counts = f"{len(cells)} columns, and the first line names {count}"
            raise DataError(f"{path}:{line}: {counts}")
        if count > 1 and _bare(cells) == header:
            repeats = "repeats the first line, which names the columns, as joined files do"
            raise DataError(f"{path}:{line}: {repeats}: remove it")
        yield line, [*cells, *[""] * count][:count]


def _bare(cells: Sequence[str]) -> list[str]:
    """Return the cells in any order, without upper case, blanks around them and a byte order mark."""
    return sorted(cell.strip("\ufeff \t").casefold() for cell in cells)


def _rows(
    path: Path, text: str, delimiter: str, first: int, *, quoted: bool = True
) -> Iterator[Row]:
    """Yield the rows of a table, and empty lines; first: the number of the text's first line"""
    if not quoted:
        for line, content in enumerate(io.StringIO(text, newline=None), start=first):
            yield line, content.removesuffix("\n").split(delimiter)
        return
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = first
    try:
        for cells in reader:
            yield line, cells
            line = reader.line_num + first
    except csv.Error as error:
        what = "a quotation mark opens a cell and none closes it"
        if "unexpected end" not in str(error):
            what = f"{error}: quotation marks within a cell are doubled"
        raise DataError(f"{path}:{line}: {what}") from None


def _is_quoted(text: str) -> bool:
    """Return whether a TSV file has quotation: it is well-formed with it, and is not without it or is as writers quote.

    Writers quote all cells, those with quotation marks (RFC 4180), or those with commas, too (Excel).
    """
    if '"' not in text:
        return False
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True))
    except csv.Error:
        return False
    rows = [cells for cells in rows if cells]
    lines = [line for line in io.StringIO(text, newline=None).read().split("\n") if line]
    if len({*map(len, rows)}) > 1:
        return False
    if len({line.count("\t") for line in lines}) > 1 or text.startswith('"'):
        return True
    return any(
        [_quote(cells, marks) for cells in rows] == lines for marks in ('"\t\n\r', '",\t\n\r')
    ) and len(rows) == len(lines)


def _quote(cells: Sequence[str], marks: str) -> str:
    """Return a line of cells in which those with one of the marks are quoted."""
    doubled = (
        '"{}"'.format(cell.replace('"', '""')) if {*marks} & {*cell} else cell for cell in cells
    )
    return "\t".join(doubled)


def _delimiter(text: str, fits: Callable[[Sequence[str]], bool]) -> str:
    """Return the delimiter with which the first line has the columns that are needed, else csv.Sniffer's guess."""
    start = text.lstrip("\r\n")[:SAMPLE]
    line = start.splitlines()[0] if start else ""
    rare = [mark for mark in dict.fromkeys(line) if not (mark.isalnum() or mark in "_\"' ")]
    for delimiter in (*COMMON, *rare):
        names = next(csv.reader(io.StringIO(start, newline=""), delimiter=delimiter), [])
        if fits([name.strip() for name in names]):
            return delimiter
    with contextlib.suppress(csv.Error):
        if not (guess := csv.Sniffer().sniff(start).delimiter).isalnum():
            return guess
    return ","
