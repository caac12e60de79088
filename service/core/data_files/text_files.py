"""Text files: UTF-8 with or without a byte order mark, or UTF-16 or UTF-32 with one; plain, `.gz`, `.xz` or `.bz2`."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

COMPRESSED = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, OSError)
# UTF-8 is read with a mark or without one. That of UTF-32 may begin as that of UTF-16 does.
BYTE_ORDER_MARKS = {
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
# The first bytes of files that are no text, and what to do with them.
OTHER_FILES = {
    b"PK\x03\x04": "a ZIP archive or an Excel workbook: export its table as CSV UTF-8",
    b"\xd0\xcf\x11\xe0": "an Excel workbook: export its table as CSV UTF-8",
    b"PAR1": "a Parquet file: its name must end in .parquet",
    b"\x1f\x8b": "a gzip file: its name must end in .gz",
    b"\xfd7zXZ": "an xz file: its name must end in .xz",
    b"\x28\xb5\x2f\xfd": "a Zstandard file: decompress it with zstd -d",
    **{b"BZh%d1AY&" % level: "a bzip2 file: its name must end in .bz2" for level in range(1, 10)},
}


class DataError(ValueError):
    """Data that cannot be used; the message names the file, and the line or question."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a file, each with `\\n` at its end.

    Raises DataError for a truncated or damaged file, with the last readable line, and for one that is no text, with
    line and column.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except DAMAGE as error:
        raise _unreadable(error, f"{path} cannot be read beyond line {number}") from None
    except UnicodeError:
        raise _undecodable(path) from None


def read_text(path: Path) -> str:
    """Return a file's text with its own line ends. Raises DataError as `read_lines` does."""
    try:
        with _open(path, newline="") as file:
            text: str = file.read()
    except DAMAGE as error:
        raise _unreadable(error, f"{path} cannot be read to its end") from None
    except UnicodeError:
        raise _undecodable(path) from None
    return text


def write_gzip(path: Path, parts: Iterable[str]) -> int:
    """Write parts of a text to a new `.gz` file, and return their number. The same parts give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    # Without a name and a time in the file's header.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        for part in parts:
            file.write(part.encode())
            count += 1
    return count


def _unreadable(error: Exception, what: str) -> Exception:
    """Return the error for damaged content, or the system's own error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return DataError(f"{what}: {error}")


def _opener(path: Path) -> Any:
    return COMPRESSED.get(path.suffix.lower(), open)


def _open(path: Path, newline: str | None = None) -> Any:
    with _opener(path)(path, "rb") as file:
        first = file.read(8)
    for start, description in OTHER_FILES.items():
        if first.startswith(start):
            raise DataError(f"{path} is no text but {description}")
    encoding = _marked_encoding(first)
    # Every second byte of Latin text is 0 in UTF-16.
    if encoding == "utf-8-sig" and len(first) >= 4 and not (any(first[::2]) and any(first[1::2])):
        raise DataError(
            f"{path}: UTF-16 or UTF-32 without a byte order mark: save the file as UTF-8"
        )
    return _opener(path)(path, "rt", encoding=encoding, newline=newline)


def _marked_encoding(start: bytes) -> str:
    """Return the encoding that the first bytes of a file say, else UTF-8."""
    marked = (name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark))
    return next(marked, "utf-8-sig")


def _undecodable(path: Path) -> DataError:
    """Return the error for a file that is no text, with the place of the first wrong byte."""
    with _opener(path)(path, "rb") as file:
        content = file.read()
    if (encoding := _marked_encoding(content)) != "utf-8-sig":
        name = encoding.upper()
        return DataError(f"{path}: begins as {name} and is none: save the file as UTF-8")
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = error.object[error.start : error.start + 1]
            column = len(error.object[: error.start].decode()) + 1
            shown = byte.decode("windows-1252", errors="replace")
            return DataError(
                f"{path}:{number}: column {column}: the byte 0x{byte.hex().upper()} is not UTF-8 ({shown!r} in"
                " Windows-1252 and Latin-1): save the file as UTF-8, or convert it with iconv -f WINDOWS-1252 -t UTF-8"
            )
    return DataError(f"{path}: not UTF-8")
