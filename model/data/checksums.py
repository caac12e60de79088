"""The known data sets: their terms, and the SHA-256 of their files.

`datasets.toml` describes each data set: origin, terms, rows, and the SHA-256 of each file by its path below the folder
of the data. Training compares every file that it reads, so that a manifest states the right data. A file without an
entry belongs to the user and is not compared.
"""

import functools
import os
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

from service.core import bundle
from service.core.data_files.text_files import DataError
from service.core.manifest import SHA256, DataSet

LOCK = Path(__file__).parents[1] / "datasets.toml"


class Locked(DataSet):
    """A data set in the lock file: its description for manifests, its rows, and each file's SHA-256."""

    rows: str
    files: dict[str, Annotated[str, StringConstraints(pattern=SHA256)]]

    def describe(self, used_for: str) -> DataSet:
        """Return the description for a manifest."""
        own = self.model_dump(include=set(DataSet.model_fields))
        return DataSet.model_validate({**own, "used_for": used_for})


def read_lock() -> dict[str, Locked]:
    """Read the data sets by their keys. Raises ValueError naming a wrong field."""
    tables = tomllib.loads(LOCK.read_text(encoding="utf-8"))
    return {key: Locked.model_validate(table) for key, table in tables.items()}


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, cached until the file changes."""
    stat = path.stat()
    return _hash(path.absolute(), stat.st_mtime_ns, stat.st_size)


@functools.cache
def _hash(path: Path, *_: int) -> str:
    return bundle.hash_file(path)


def check(path: Path) -> None:
    """Raise DataError for a file with the path of a locked one and another content."""
    whole = Path(os.path.abspath(path)).as_posix()
    for locked in read_lock().values():
        for file, expected in locked.files.items():
            if whole.endswith(f"/{file}") and (found := hash_file(path)) != expected:
                raise DataError(
                    f"{path} is not the file of {locked.name} that model/{LOCK.name} knows: its SHA-256 is {found}, and"
                    f" {expected} is locked. If it is meant to be another from now on:"
                    f" python -m model.dataset_files {whole.removesuffix(file)} --update"
                )
