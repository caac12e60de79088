"""The data sets and their terms: `python -m model.lock FOLDER [--update]` compares a folder's files with them.

`datasets.toml` says of each what it is, whose, and under what terms, and locks its files: their SHA-256 by their paths
below the folder that the data lies in, wherever that is. What training reads is compared on the way, so that what is
said of a run's data is true of the files that it read. Files that the lock does not name are anybody's own.
"""

import argparse
import functools
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

from service import bundle

LOCK = Path(__file__).with_name("datasets.toml")
FILE = re.compile(r'^"(?P<path>[^"]+)" = "[0-9a-f]*"$', re.MULTILINE)


class DataError(ValueError):
    """Data that cannot be used; the message names the file, and the line or question."""


class Locked(bundle.DataSet):
    """A data set as the lock has it: what a manifest says of it, what its rows are, and each file's SHA-256."""

    rows: str
    files: dict[str, Annotated[str, StringConstraints(pattern=bundle.SHA256)]]

    def describe(self, used_for: str) -> bundle.DataSet:
        """What a manifest says of it."""
        own = self.model_dump(include=set(bundle.DataSet.model_fields))
        return bundle.DataSet.model_validate({**own, "used_for": used_for})


def read_lock() -> dict[str, Locked]:
    """The data sets by their keys. Raises ValueError naming the field that is not as it should be."""
    tables = tomllib.loads(LOCK.read_text(encoding="utf-8"))
    return {key: Locked.model_validate(table) for key, table in tables.items()}


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, computed once as long as the file is not changed."""
    stat = path.stat()
    return _hash(path.absolute(), stat.st_mtime_ns, stat.st_size)


@functools.cache
def _hash(path: Path, *_: int) -> str:
    return bundle.hash_file(path)


def check(path: Path) -> None:
    """Raises DataError for a file that lies under the path of a locked one and is another."""
    whole = Path(os.path.abspath(path)).as_posix()
    for locked in read_lock().values():
        for file, expected in locked.files.items():
            if whole.endswith(f"/{file}") and (found := hash_file(path)) != expected:
                raise DataError(
                    f"{path} is not the file of {locked.name} that model/{LOCK.name} knows: its SHA-256 is {found}, and"
                    f" {expected} is locked. If it is meant to be another from now on:"
                    f" python -m model.lock {whole.removesuffix(file)} --update"
                )


def states(folder: Path) -> Iterator[tuple[str, str, str]]:
    """The key of each data set, each of its files, and whether that is present, missing or changed."""
    for key, locked in read_lock().items():
        for file, expected in locked.files.items():
            path = folder / file
            same = path.is_file() and hash_file(path) == expected
            yield key, file, "present" if same else "changed" if path.is_file() else "missing"


def update(folder: Path) -> None:
    """Lock the files that are in the folder as they are; the others stay as they were locked."""

    def renewed(line: re.Match[str]) -> str:
        path = folder / line["path"]
        return f'"{line["path"]}" = "{hash_file(path)}"' if path.is_file() else line[0]

    LOCK.write_text(FILE.sub(renewed, LOCK.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what the files' paths begin below")
    parser.add_argument("--update", action="store_true", help="lock the files as they are there")
    given = parser.parse_args()
    try:
        if not given.folder.is_dir():
            raise NotADirectoryError(f"{given.folder}: no such folder")
        if given.update:
            update(given.folder)
        found = list(states(given.folder))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{LOCK.name}: {error}") from None
    table = Table("data set", "file", "")
    for row in found:
        table.add_row(*row)
    Console().print(table)
    if changed := [file for _, file, state in found if state == "changed"]:
        raise SystemExit(f"changed: {', '.join(changed)}")


if __name__ == "__main__":
    main()
