"""The labels of a classifier in `config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.checkpoints.hub_names import CheckpointError

DEFAULT_COUNT = 2  # of transformers, where config.json has neither id2label nor num_labels


def read_labels(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels by their indices, as transformers numbers them. Raises CheckpointError naming the field."""
    count, named = config.get("num_labels"), config.get("id2label")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(count or DEFAULT_COUNT))
    if not isinstance(named, Mapping):
        raise CheckpointError(
            f'{path}: id2label = {named!r} must be an object of indices and labels: {{"0": "...", ...}}'
        )
    if {str(index) for index in range(len(named))} != named.keys() or not named:
        raise CheckpointError(
            f"{path}: id2label has the indices {', '.join(sorted(named)) or 'of no labels'}: number the labels from 0"
        )
    if count not in (None, len(named)):
        raise CheckpointError(
            f"{path}: num_labels = {count}, but id2label has {len(named)} labels: remove num_labels"
        )
    return tuple(_read_label(path, index, named[str(index)]) for index in range(len(named)))


def _read_label(path: Path, index: int, label: Any) -> str:
    """Return a label as text; a number is written as in JSON."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise CheckpointError(f"{path}: id2label: label {index} = {label!r} must be text")
    return str(label)
