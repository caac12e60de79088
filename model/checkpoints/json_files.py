"""JSON files of a checkpoint directory, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from model.checkpoints.errors import CheckpointError


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises CheckpointError where the file is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises CheckpointError for another content, and for a missing file."""
    document = read_json(path)
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: must be a JSON object, not {type(document).__name__}")
    return document


def read_optional_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty where the file is missing. Raises CheckpointError for another content."""
    return read_object(path) if path.is_file() else {}
