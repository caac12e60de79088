"""The head of a checkpoint as `config.json` and the files of sentence-transformers describe it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from model.checkpoints.hub_names import CheckpointError
from model.checkpoints.labels import read_labels
from model.checkpoints.sentence_config import (
    config_file,
    read_kind,
    read_pooling_mode,
    read_root_config,
)
from service.core import bundle

# Fields of `bundle.Head` that the hub has no name for; `config.json` has them where they differ from the default.
HEAD_FIELDS = {"normalize", "null_threshold", "max_answer_tokens", "max_query_tokens", "demo"}
POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
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


def describe_head(task: str, config: Mapping[str, Any], folder: Path, **others: Any) -> bundle.Head:
    """Return the head that a checkpoint's `config.json` describes, of any family. Raises CheckpointError.

    config: the content of `config.json`
    others: fields that `config.json` does not contain: `pooling` and `dimensions` of an embedding head,
        `mask_token_id` and `vocabulary_size` of a fill-mask head
    """
    path = config_file(folder)
    fields = {key: config[key] for key in HEAD_FIELDS & set(config)}
    if task in ("classification", "ner"):
        labels = read_labels(path, config)
        problem_type = config.get("problem_type")
        if task == "classification":
            problem_type = _cross_encoder_type(folder, config, len(labels)) or problem_type
        return validate_head(path, task=task, labels=labels, problem_type=problem_type, **fields)
    return validate_head(path, task=task, **{**fields, **others})


def validate_head(path: Path, **fields: Any) -> bundle.Head:
    """Return a validated head. Raises CheckpointError naming the file and the fields that are wrong.

    path: of the file that describes the head, for messages
    """
    try:
        return bundle.Head(**fields)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{path}: {problems}") from None


def is_cross_encoder(folder: Path) -> bool:
    """Return whether sentence-transformers (5 or newer) wrote this directory for a CrossEncoder."""
    return read_kind(folder) == "CrossEncoder"


def _cross_encoder_type(folder: Path, config: Mapping[str, Any], labels: int) -> str | None:
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


def read_pooling(path: Path) -> str:
    """Return `mean` or `cls` of a sentence-transformers Pooling module. Raises CheckpointError for other pooling."""
    modes = read_pooling_mode(path / "config.json")
    if len(modes) != 1 or modes[0] not in POOLING.values():
        raise CheckpointError(f"{path}: cannot serve pooling {', '.join(modes)}: mean or cls only")
    return modes[0]
