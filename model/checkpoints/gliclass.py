"""Checkpoints of GLiClass (Stepanov et al. 2025), as the package `gliclass` writes them: scores of a request's labels.

`config.json` describes the encoder and the head, whose weights are in one file.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.bert import ACTIVATIONS
from model.checkpoints.errors import CheckpointError
from model.checkpoints.head_config import validate_head
from model.checkpoints.json_files import read_object
from model.checkpoints.label_models import (
    check_settings,
    load_with_head,
    read_encoder_config,
    read_marker,
    read_number,
)
from model.checkpoints.settings_table import shown
from model.heads import EncoderWithHeads, LabelScoring, TextLabelScores

PACKAGE, HEAD = "gliclass", "scores"
CONFIG = "config.json"
ENCODER = "model.encoder_model."
SEGMENTS = "model.segment_embeddings.weight"
# Our names of the head's modules, as patterns, and the package's.
STEMS = (
    (r"text\.", "model.text_projector."),
    (r"label\.", "model.classes_projector."),
    (r"scores\.proj_token", "model.scorer.proj_text"),
    (r"scores\.", "model.scorer."),
    (r"scale$", "model.logit_scale"),
)
POOLINGS = {"first": "cls", "avg": "mean", "max": "max", "last": "lasttoken", "pass": ""}
# Settings that change what a model computes, with the values of the models that are served, the default first.
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "architecture_type": ("uni-encoder",),
    "pooling_strategy": tuple(POOLINGS),
    "class_token_pooling": ("first", "average"),
    "scorer_type": ("simple", "weighted-dot", "mlp", "cross-attn"),
    "projector_hidden_act": tuple(ACTIVATIONS),
    "embed_class_token": (True, False),
    "prompt_first": (False, True),
    "normalize_features": (False, True),
    "use_segment_embeddings": (False, True),
    "use_lstm": (False,),
    "extract_text_features": (False,),
    "squeeze_layers": (False,),
    "encoder_layer_id": (-1,),
    "use_calibrator": (False,),
    "label_model_name": (None,),
}


def is_gliclass(folder: Path) -> bool:
    """Return whether a directory has a checkpoint of GLiClass."""
    path = folder / CONFIG
    return path.is_file() and read_object(path).get("model_type") == "GLiClass"


def load_gliclass(folder: Path) -> EncoderWithHeads:
    """Return the encoder of a directory with its zero-shot-classification head. Raises CheckpointError."""
    path = folder / CONFIG
    document = read_object(path)
    check_settings(path, document, SETTINGS)
    setting = {name: document.get(name, values[0]) for name, values in SETTINGS.items()}
    encoder = read_encoder_config(path, document, PACKAGE)
    encoder["vocab_size"] = document.get("vocab_size") or encoder.get("vocab_size")
    label, separator = (
        read_marker(folder, path, name, token, PACKAGE)
        for name, token in (("class_token_index", "<<LABEL>>"), ("text_token_index", "<<SEP>>"))
    )
    for name, index in (("class_token_index", label), ("text_token_index", separator)):
        if document.get(name) != index:
            raise CheckpointError(
                f"{path}: {name} = {shown(document.get(name))} must be {index}, the id in the tokenizer"
            )
    if has_segments := setting["use_segment_embeddings"]:
        if encoder["model_type"] != "deberta-v2" or encoder.get("type_vocab_size"):
            raise CheckpointError(
                f"{path}: use_segment_embeddings cannot be served for {encoder['model_type']} or an encoder with "
                "segments of its own"
            )
        encoder["type_vocab_size"] = 3
    width = read_number(path, {"hidden_size": None, **encoder, **document}, "hidden_size", 0)
    after = int(not setting["embed_class_token"])
    is_pooled = setting["scorer_type"] != "cross-attn"
    if is_pooled is (setting["pooling_strategy"] == "pass"):
        raise CheckpointError(
            f"{path}: scorer_type = cross-attn and pooling_strategy = pass are served together only"
        )
    heads = read_number(path, document, "scorer_num_heads", LabelScoring().heads)
    if not is_pooled and width % heads:
        raise CheckpointError(
            f"{path}: scorer_num_heads = {heads} must be a divisor of the hidden size {width}"
        )
    scoring = LabelScoring(
        pooling=POOLINGS[setting["pooling_strategy"]],
        activation=setting["projector_hidden_act"],
        averages=setting["class_token_pooling"] == "average",
        after=after,
        scorer=setting["scorer_type"],
        heads=heads,
        inner=read_number(path, document, "scorer_mlp_hidden_size", LabelScoring().inner, 2),
        normalizes=setting["normalize_features"],
        has_segments=has_segments,
    )
    head = validate_head(
        path,
        task="zero-shot-classification",
        label_prompt={
            "label_token_id": label,
            "separator_id": separator,
            "after_label_token": bool(after),
            "text_first": not setting["prompt_first"],
        },
    )

    def changed(tensors: dict[str, Any]) -> None:
        if "model.logit_scale" in tensors:
            tensors["model.logit_scale"] = tensors["model.logit_scale"].reshape(1)
        if has_segments and SEGMENTS in tensors:
            tensors[f"{ENCODER}embeddings.token_type_embeddings.weight"] = tensors.pop(SEGMENTS)

    return load_with_head(
        folder,
        path,
        encoder,
        (HEAD, head),
        lambda inputs: TextLabelScores(inputs, width, scoring),
        ENCODER,
        _head_name,
        changed,
    )


def _head_name(name: str) -> list[str]:
    """Return the package's name for a parameter of the head."""
    return next(
        [re.sub(f"^{ours}", theirs, name)] for ours, theirs in STEMS if re.match(ours, name)
    )
