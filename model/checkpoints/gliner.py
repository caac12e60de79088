"""Checkpoints of GLiNER (Zaratiana et al. 2023), as the package `gliner` writes them: entities with a request's labels.

`gliner_config.json` describes the encoder and the head, whose weights are in one file.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.checkpoints.config_table import check_config
from model.checkpoints.errors import CheckpointError
from model.checkpoints.head_config import validate_head
from model.checkpoints.hub_download import GLINER
from model.checkpoints.hub_names import encoder_names, from_hub, names_on_hub, with_encoder
from model.checkpoints.json_files import read_object
from model.checkpoints.reader import make_encoder
from model.checkpoints.settings_table import shown
from model.checkpoints.tokenizer_files import read_tokenizer
from model.checkpoints.unused_tensors import check_unused
from model.checkpoints.weight_files import read_tensors
from model.config import MOST
from model.families.registry import family_named
from model.heads import EncoderWithHeads, WordLabelScores

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
    for name, values in SETTINGS.items():
        value = document.get(name, values[0])
        if value not in values:
            served = " or ".join(map(shown, values))
            raise CheckpointError(
                f"{path}: {name} = {shown(value)} cannot be served, only {served}"
            )
    encoder = document.get("encoder_config")
    if not isinstance(encoder, dict):
        raise CheckpointError(
            f"{path}: encoder_config is missing: load the model with the package gliner, and write it with "
            "save_pretrained, which writes encoder_config and the tokenizer"
        )
    width = _number(path, document, "hidden_size", 512)
    rnn_layers = _number(path, document, "num_rnn_layers", 1, least=0)
    is_spans = document.get("span_mode", "markerV0") == "markerV0"
    max_width = _number(path, document, "max_width", 12) if is_spans else None
    encoder = {"model_type": "deberta-v2", **encoder}
    check_config(path, encoder)
    tensors = read_tensors(folder)
    try:
        family = family_named(encoder["model_type"])
        config = family.config.from_dict(encoder)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: encoder_config: {error}") from None
    ids = [_token_id(folder, document, *names) for names in MARKERS]
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

    def make() -> EncoderWithHeads:
        model = EncoderWithHeads(config, {HEAD: head})
        model.heads[HEAD] = WordLabelScores(config.hidden_size, width, rnn_layers, max_width)
        return model

    model = make_encoder(make, config, folder)
    names = with_encoder(encoder_names(family, ENCODER), _head_name)
    from_hub(model, tensors, names, str(folder))
    present, used = (
        [name.removeprefix(ENCODER) for name in found]
        for found in (tensors, names_on_hub(model, names))
    )
    check_unused(present, used, family, str(folder), heads=False)
    return model.eval()


def _head_name(name: str) -> list[str]:
    """Return the package's name for a parameter of the head, `heads.<name>.<rest>`."""
    _, _, rest = name.split(".", 2)
    return next(
        [re.sub(f"^{ours}", theirs, rest)] for ours, theirs in STEMS if re.match(ours, rest)
    )


def _number(
    path: Path, document: Mapping[str, Any], name: str, default: int, least: int = 1
) -> int:
    value = document.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise CheckpointError(
            f"{path}: {name} = {shown(value)} must be a whole number from {least} to {MOST}"
        )
    return value


def _token_id(folder: Path, document: Mapping[str, Any], name: str, default: str) -> int:
    """Return the id of the token that a setting names. Raises CheckpointError where the tokenizer has no such token."""
    token = document.get(name, default)
    found: int | None = read_tokenizer(folder).token_to_id(str(token))
    if found is None:
        raise CheckpointError(
            f"{folder / GLINER}: {name} = {shown(token)} is no token of the tokenizer: write the model again with the "
            "package gliner"
        )
    return found
