"""The head of a checkpoint as `config.json` and the files of sentence-transformers describe it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from model.checkpoints.errors import CheckpointError
from model.checkpoints.json_files import read_object, read_optional_object
from model.checkpoints.sentence_config import (
    ROOT,
    SPLADE_TABLE,
    config_file,
    is_sentence_directory,
    read_include_prompt,
    read_kind,
    read_module_list,
    read_pooling_mode,
    read_prompts,
    read_root_config,
    static_folder,
)
from model.checkpoints.settings_table import shown
from service.core.manifest import Head, PoolingMode, Sparse

# Fields of `manifest.Head` that the hub has no name for; `config.json` has them where they differ from the default.
HEAD_FIELDS = {
    *("normalize", "null_threshold", "max_answer_tokens", "max_query_tokens", "demo"),
    "calibration_temperature",
}
CARD = "README.md"
# As a model card of sentence-transformers states the parameters of MatryoshkaLoss.
MATRYOSHKA_DIMS = re.compile(r'"matryoshka_dims": (\[(?:\s*[1-9][0-9]{0,5}\s*,?)+\])')
# Files and folders that describe heads, the pooling of an embedding head among them.
HEAD_FILES = ("heads.json", "modules.json", "1_Pooling")
MOST_NAMELESS = 100_000  # labels without names
DEFAULT_COUNT = 2  # labels, of transformers, where config.json has neither id2label nor num_labels
Pooling = PoolingMode | tuple[PoolingMode, ...]
# The activation of sentence-transformers' CrossEncoder, for one label or for several, and our problem type for it.
IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"
SOFTMAX = "torch.nn.modules.activation.Softmax"
ONE_LABEL = {IDENTITY: "regression", SIGMOID: "single_label_classification"}
SEVERAL_LABELS = {
    IDENTITY: "single_label_classification",
    SOFTMAX: "single_label_classification",
    SIGMOID: "multi_label_classification",
}


def describe_head(task: str, config: Mapping[str, Any], folder: Path, **others: Any) -> Head:
    """Return the head that a checkpoint's `config.json` describes, with the fields `others`. Raises CheckpointError."""
    path = config_file(folder)
    fields = {key: config[key] for key in HEAD_FIELDS & set(config)}
    if task in ("classification", "ner"):
        labels = read_labels(path, config)
        problem_type = config.get("problem_type")
        if task == "classification":
            problem_type = cross_encoder_type(folder, config, len(labels)) or problem_type
        return validate_head(path, task=task, labels=labels, problem_type=problem_type, **fields)
    return validate_head(path, task=task, **{**fields, **others})


def validate_head(path: Path, **fields: Any) -> Head:
    """Return a validated head. Raises CheckpointError naming the file (`path`) and the fields that are wrong."""
    try:
        return Head(**fields)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{path}: {problems}") from None


def declares_pooling(folder: Path) -> bool:
    """Return whether a checkpoint's files state the pooling of an embedding head."""
    declared = any((folder / name).exists() for name in HEAD_FILES)
    return declared or static_folder(folder) is not None


def read_labels(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels by their indices, as transformers numbers them. Raises CheckpointError naming the field."""
    count, named = config.get("num_labels"), config.get("id2label")
    if named is None:
        if count and count > MOST_NAMELESS:
            raise CheckpointError(
                f"{path}: num_labels = {count} exceeds {MOST_NAMELESS} without id2label: name the labels there"
            )
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


def is_cross_encoder(folder: Path) -> bool:
    """Return whether sentence-transformers (5 or newer) wrote this directory for a CrossEncoder."""
    return read_kind(folder) == "CrossEncoder"


def cross_encoder_type(folder: Path, config: Mapping[str, Any], labels: int) -> str | None:
    """Return the problem type that gives a CrossEncoder's scores as its `predict` does; None for no CrossEncoder.

    Several labels get a softmax, where `predict` returns logits unless `apply_softmax` is set. A single label of a
    multi-label classifier keeps that problem type, because its score is the same.
    Raises CheckpointError naming another activation.
    """
    activation = (config.get("sentence_transformers") or {}).get("activation_fn")
    activation = activation or config.get("sbert_ce_default_activation_function")
    if is_cross_encoder(folder):
        own = read_root_config(folder).get("activation_fn")
        activation = own or activation or (SIGMOID if labels == 1 else IDENTITY)
    multi_label = activation == SIGMOID and config.get("problem_type") == SEVERAL_LABELS[SIGMOID]
    known = ONE_LABEL if labels == 1 and not multi_label else SEVERAL_LABELS
    if activation is None or activation in known:
        return known.get(activation)
    raise CheckpointError(f"{folder}: cannot serve the activation {activation}")


def read_pooling(path: Path) -> Pooling:
    """Return the mode of a Pooling module's folder, or several that are concatenated. Raises CheckpointError."""
    modes, known = read_pooling_mode(path / "config.json"), get_args(PoolingMode)
    for mode in modes:
        if mode not in known:
            reason = f"cannot serve pooling {mode}: {', '.join(known)} only"
            raise CheckpointError(f"{path}: {reason}")
    return modes[0] if len(modes) == 1 else modes


def read_splade(folder: Path) -> Sparse:
    """Return how a SparseEncoder's SpladePooling weighs tokens. Raises CheckpointError for another setting."""
    places = read_module_list(folder) if is_sentence_directory(folder) else []
    for kind, place in places:
        if kind == "SpladePooling":
            path = place / "config.json"
            document = read_object(path)
            SPLADE_TABLE.check(path, document)
            activation = document.get("activation_function", "relu")
            if activation not in ("relu", "log1p_relu"):
                raise CheckpointError(
                    f"{path}: activation_function = {shown(activation)} must be relu or log1p_relu"
                )
            return Sparse(activation=activation)
    return Sparse(activation="relu")


def read_retrieval_fields(folder: Path, *poolings: Path) -> dict[str, Any]:
    """Return an embedding head's fields of prompts and trained dimensions that have an effect.

    Raises CheckpointError where a prompt's tokens would have to be excluded from pooling.
    """
    fields = read_prompts(folder)
    for pooling in poolings:
        if read_include_prompt(pooling / "config.json"):
            continue
        if any(fields.get("prompts", {}).values()):
            raise CheckpointError(
                f"{pooling / 'config.json'}: include_prompt = False is not supported with prompts that have a text: "
                f"remove them from {folder / ROOT}, or set include_prompt to true"
            )
        fields["include_prompt"] = False
    trained = read_trained_dimensions(folder)
    return fields | ({"matryoshka_dimensions": trained} if trained else {})


def read_trained_dimensions(folder: Path) -> list[int]:
    """Return the numbers of dimensions that Matryoshka training optimized (Kusupati et al. 2022), [] if none is stated.

    They are in `config.json` as `matryoshka_dimensions`, else in the model card that sentence-transformers writes.
    Raises CheckpointError for what is no list of positive integers.
    """
    path = config_file(folder)
    stated = read_optional_object(path).get("matryoshka_dimensions") or []
    card = folder / CARD
    if not stated and card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        lists = {tuple(sorted(json.loads(found))) for found in MATRYOSHKA_DIMS.findall(text)}
        stated = [*lists.pop()] if len(lists) == 1 else []
    is_list = isinstance(stated, list) and all(type(size) is int and size > 0 for size in stated)
    if not is_list:
        raise CheckpointError(
            f"{path}: matryoshka_dimensions = {shown(stated)} must be a list of positive integers"
        )
    return sorted({*stated})
