"""What the provenance file says, with what the lock knows of the data sets that it names, and who taught the model."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.checkpoints.hub_download import commit_of, split_name
from model.checkpoints.reader import read_teachers
from model.data import checksums

# `card.render` tells of all but the manifest's.
FIELDS = ("description", "training", "limits", "weights_license", "provenance")


def read_metadata(path: Path) -> dict[str, Any]:
    """The file's tables, with every data set in full.

    Raises ValueError, also where a data set is not known, and for what would be told nowhere.
    """
    told = tomllib.loads(path.read_text(encoding="utf-8"))
    if unknown := sorted(set(told) - set(FIELDS)):
        raise ValueError(f"{path}: {unknown[0]!r} is none of {', '.join(FIELDS)}")
    provenance = told.get("provenance")
    if isinstance(provenance, dict) and isinstance(provenance.get("datasets"), list):
        provenance["datasets"] = [_in_full(table) for table in provenance["datasets"]]
    return told


def with_teachers(told: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What is told, and who taught the model of a checkpoint, if that says so and nothing else was told of it.

    Raises CheckpointError for what no names are.
    """
    teachers = read_teachers(folder)
    return {**told, "provenance": {"teachers": teachers, **told.get("provenance", {})}}


def with_commit(told: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """Add the checkpoint's name on the hub and its commit, for a folder in the hub's cache."""
    commit = commit_of(folder)
    own = (
        {"checkpoint": f"{split_name(name)[0]}@{commit}"}
        if commit and not Path(name).exists()
        else {}
    )
    return {**told, "provenance": {**own, **told.get("provenance", {})}}


def _in_full(table: Any) -> Any:
    """A data set that is named by its `key` as the lock has it; another one as it is."""
    if not isinstance(table, Mapping) or "key" not in table:
        return table
    key, known = str(table["key"]), checksums.read_lock()
    if key not in known:
        raise ValueError(f"provenance.datasets: {key!r} is none of {', '.join(known)}")
    if said := sorted(set(table) - {"key", "used_for"}):
        raise ValueError(
            f"provenance.datasets: {key}: model/{checksums.LOCK.name} says its {said[0]}"
        )
    return known[key].describe(table.get("used_for", "")).model_dump()
