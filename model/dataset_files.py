"""The data sets and their terms: `python -m model.dataset_files FOLDER [--update]` compares a folder's files with them.

`datasets.toml` has the terms of each data set and the SHA-256 of its files (`model.data.checksums`).
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from model.data import checksums
from model.data.checksums import hash_file, read_lock

FILE = re.compile(r'^"(?P<path>[^"]+)" = "[0-9a-f]*"$', re.MULTILINE)


def states(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the key of each data set, each of its files, and its state: present, missing or changed."""
    for key, locked in read_lock().items():
        for file, expected in locked.files.items():
            path = folder / file
            same = path.is_file() and hash_file(path) == expected
            yield key, file, "present" if same else "changed" if path.is_file() else "missing"


def update(folder: Path) -> None:
    """Write the SHA-256 of the folder's files to the lock; entries of other files are kept."""

    def renewed(line: re.Match[str]) -> str:
        path = folder / line["path"]
        return f'"{line["path"]}" = "{hash_file(path)}"' if path.is_file() else line[0]

    checksums.LOCK.write_text(
        FILE.sub(renewed, checksums.LOCK.read_text(encoding="utf-8")), encoding="utf-8"
    )


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what the files' paths begin below")
    parser.add_argument("--update", action="store_true", help="lock the files as they are there")
    options = parser.parse_args()
    try:
        if not options.folder.is_dir():
            raise NotADirectoryError(f"{options.folder}: no such folder")
        if options.update:
            update(options.folder)
        rows = list(states(options.folder))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{checksums.LOCK.name}: {error}") from None
    table = Table("data set", "file", "")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if changed := [file for _, file, state in rows if state == "changed"]:
        raise SystemExit(f"changed: {', '.join(changed)}")


if __name__ == "__main__":
    main()
