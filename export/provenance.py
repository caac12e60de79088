"""The metadata of an export: the provenance file, completed with locked data sets, teachers and the hub's commit."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.checkpoints.card import PROVENANCE, read_license, read_training
from model.checkpoints.errors import CheckpointError
from model.checkpoints.hub_download import commit_of, split_name
from model.data import checksums

# The manifest has `weights_license` and `provenance`; `model_card.render` writes all of them.
FIELDS = ("description", "training", "limits", "weights_license", "provenance")


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the provenance file's tables, with all fields of every data set.

    Raises ValueError for an unknown data set, and for a table that neither manifest nor card would contain.
    """
    metadata = tomllib.loads(path.read_text(encoding="utf-8"))
    if unknown := sorted(set(metadata) - set(FIELDS)):
        raise ValueError(f"{path}: {unknown[0]!r} is none of {', '.join(FIELDS)}")
    provenance = metadata.get("provenance")
    if isinstance(provenance, dict) and isinstance(provenance.get("datasets"), list):
        provenance["datasets"] = [_complete(table) for table in provenance["datasets"]]
    return metadata


def with_teachers(metadata: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Add the teachers that a checkpoint records, unless the metadata has teachers.

    Raises CheckpointError where the checkpoint's teachers are no list of names.
    """
    from model.checkpoints.reader import read_teachers  # which imports torch

    teachers = read_teachers(folder)
    return {**metadata, "provenance": {"teachers": teachers, **metadata.get("provenance", {})}}


def with_training(metadata: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Add the license and the training of a checkpoint, unless the metadata states them.

    Raises CheckpointError for a description of training that `finetune` does not write.
    """
    training, license_name = read_training(folder), read_license(folder)
    own = {}
    if training:
        try:
            license_name = license_name or training["license"]
            own = _describe(training)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / PROVENANCE}: training: {error!r}") from None
    if license_name:
        own["weights_license"] = license_name
    return {**own, **metadata}


def _describe(training: Mapping[str, Any]) -> dict[str, str]:
    """Return the description of a model, and how it was trained, for its card."""
    from model.training.training_run import show_metrics  # which imports torch

    texts = []
    for name, head in training["heads"].items():
        text = f"`{name}`: {head['examples']:,} examples of {', '.join(head['files'])}."
        if "metrics" in head:
            text += f" Before export: {show_metrics(head['metrics'])}, on {head['measured_on']}."
        texts.append(text)
    described = {"training": "\n\n".join(texts)}
    if base := training["base"]:
        terms = training["license"] or "its card names none"
        described["description"] = (
            f"Trained with Quartet from the base model `{base}` (license: {terms})."
        )
    return described


def with_commit(metadata: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """Add the checkpoint's name on the hub and its commit, for a folder in the hub's cache."""
    commit = commit_of(folder)
    own = (
        {"checkpoint": f"{split_name(name)[0]}@{commit}"}
        if commit and not Path(name).exists()
        else {}
    )
    return {**metadata, "provenance": {**own, **metadata.get("provenance", {})}}


def _complete(table: Any) -> Any:
    """Return all fields of a data set that is named by its `key` in the lock file; another one unchanged."""
    if not isinstance(table, Mapping) or "key" not in table:
        return table
    key, known = str(table["key"]), checksums.read_lock()
    if key not in known:
        raise ValueError(f"provenance.datasets: {key!r} is none of {', '.join(known)}")
    if others := sorted(set(table) - {"key", "used_for"}):
        raise ValueError(
            f"provenance.datasets: {key}: model/{checksums.LOCK.name} says its {others[0]}"
        )
    return known[key].describe(table.get("used_for", "")).model_dump()
