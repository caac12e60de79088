"""Checkpoints of GLiNER (Zaratiana et al. 2023), as the package `gliner` writes them: entities with a request's labels.

`gliner_config.json` describes the encoder and the head, whose weights are in one file.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.checkpoints.errors import CheckpointError
from model.checkpoints.head_config import validate_head
from model.checkpoints.hub_download import GLINER
from model.checkpoints.json_files import read_object
from model.checkpoints.label_models import (
    check_settings,
    load_with_head,
    read_encoder_config,
    read_marker,
    read_number,
)
from model.checkpoints.settings_table import shown
from model.heads import EncoderWithHeads, WordLabelScores

PACKAGE = "gliner"
HEAD = "entities"
ENCODER = "token_rep_layer.bert_layer.model."
# Our names of the head's modules, as patterns, and the package's.
STEMS = (
    (r"projection", "token_rep_layer.projection"),
    (r"rnn\.(lstm)", r"rnn.\1"),
    (r"scores\.prompt", "prompt_rep_layer"),
    (r"scores\.((?:project|out_project)\w*)", r"span_rep_layer.span_rep_layer.\1"),
    (r"scores\.(proj_token|proj_label|out_mlp)", r"scorer.\1"),
)
MARKERS = (("ent_token", "<<ENT>>"), ("sep_token", "<<SEP>>"))  # settings and their defaults
# Settings that change what a model computes, with the values of the models that are served.
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "span_mode": ("markerV0", "token_level"),
    "subtoken_pooling": ("first",),
    "words_splitter_type": ("whitespace",),
    "fuse_layers": (False,),
    "post_fusion_schema": ("", None),
    "represent_spans": (False,),
    "span_encoder_config": (None,),
    "precomputed_prompts_mode": (False, None),
    "labels_encoder": (None,),
    "labels_decoder": (None,),
    "relations_layer": (None,),
}


def is_gliner(folder: Path) -> bool:
    """Return whether a directory has a checkpoint of GLiNER."""
    return (folder / GLINER).is_file()


def load_gliner(folder: Path) -> EncoderWithHeads:
    """Return the encoder of a directory with its zero-shot-ner head. Raises CheckpointError."""
    path = folder / GLINER
    document = read_object(path)
    check_settings(path, document, SETTINGS)
    encoder = read_encoder_config(path, document, PACKAGE)
    width = read_number(path, document, "hidden_size", 512)
    rnn_layers = read_number(path, document, "num_rnn_layers", 1, least=0)
    is_spans = document.get("span_mode", "markerV0") == "markerV0"
    max_width = read_number(path, document, "max_width", 12) if is_spans else None
    ids = [
        read_marker(folder, path, name, document.get(name, default), PACKAGE)
        for name, default in MARKERS
    ]
    index = document.get("class_token_index")
    if ids[0] != index:
        raise CheckpointError(
            f"{path}: class_token_index = {shown(index)} must be {ids[0]}, the id of ent_token"
        )
    head = validate_head(
        path,
        task="zero-shot-ner",
        label_prompt={
            "label_token_id": ids[0],
            "separator_id": ids[1],
            "after_label_token": not document.get("embed_ent_token", True),
            "max_width": max_width,
        },
    )

    return load_with_head(
        folder,
        path,
        encoder,
        (HEAD, head),
        lambda inputs: WordLabelScores(inputs, width, rnn_layers, max_width),
        ENCODER,
        _head_name,
    )


def _head_name(name: str) -> list[str]:
    """Return the package's name for a parameter of the head."""
    return next(
        [re.sub(f"^{ours}", theirs, name)] for ours, theirs in STEMS if re.match(ours, name)
    )
