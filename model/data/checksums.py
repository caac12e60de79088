"""The known data sets: their terms, and the SHA-256 of their files.

`datasets.toml` describes each data set: origin, terms, rows, and the SHA-256 of each file by its path below the folder
of the data. Training compares every file that it reads, so that what a manifest states of its data is true. A file that
no entry names belongs to the user and is not compared.
"""

import functools
import os
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

from service.core import bundle

LOCK = Path(__file__).parents[1] / "datasets.toml"


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
