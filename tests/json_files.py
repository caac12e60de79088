"""JSON files that tests write and change."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def edit_json(path: Path, /, **fields: Any) -> None:
    """Set fields of an object in a file, which is created if it is missing."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_json(path, {**document, **fields})


@contextmanager
def editing(path: Path) -> Iterator[Any]:
    """Yield the document of a file, and write it after the block."""
    document = json.loads(path.read_text(encoding="utf-8"))
    yield document
    write_json(path, document)
