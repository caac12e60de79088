"""Write checkpoints in the hub's layout: `config.json`, `model.safetensors`, `tokenizer.json`.

Tensors get the hub's names (`model/checkpoints/hub_names.py`). A joint checkpoint has the encoder under them, its heads
as `heads.<name>.*`, and a description of each head in `heads.json`.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from model.checkpoints.card import PROVENANCE
from model.checkpoints.head_config import HEAD_FIELDS, IDENTITY, ONE_LABEL, SIGMOID
from model.checkpoints.hub_names import (
    Tensors,
    encoder_names,
    joint_names,
    pretraining_names,
    single_names,
    to_hub,
)
from model.checkpoints.sentence_config import POOLING_MODES, ROOT, SENTENCE_FILES, TOKENS
from model.config import BertConfig
from model.families.registry import family_of
from model.heads import EncoderWithHeads
from service.core import bundle
from service.core.manifest import Head

MULTI_VECTOR_CLASSES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "MultiVectorMask": "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
SPARSE_CLASSES = {
    "Transformer": MULTI_VECTOR_CLASSES["Transformer"],
    "SpladePooling": "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling",
}


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a directory that replaces a checkpoint's in one rename when the block ends without an error."""
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    bundle.swap(partial, folder)


def put_back(folder: Path) -> None:
    """Restore the previous checkpoint where a process died while it replaced it."""
    bundle.put_back(_partial(folder), folder)


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def save_provenance(
    folder: Path, teachers: Sequence[str], training: Mapping[str, Any] | None = None
) -> None:
    """Write the names of a checkpoint's teachers, and a description of its training, if it has any."""
    fields = {"teachers": teachers, "training": training}
    document = {name: value for name, value in fields.items() if value}
    if document:
        text = json.dumps(document, indent=2) + "\n"
        (folder / PROVENANCE).write_text(text, encoding="utf-8")


def save_encoder(
    path: str | Path, encoder: nn.Module, tokenizer: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write an encoder without heads, with tensors of `dtype`, and a copy of the file `tokenizer`."""
    family = family_of(encoder.config)
    state = {name: t.to(dtype) for name, t in to_hub(encoder, encoder_names(family)).items()}
    _write(Path(path), encoder.config, state, tokenizer, family.architecture_of("embedding"))


def save_pretraining(path: str | Path, model: nn.Module, tokenizer: Path) -> None:
    """Write an encoder with its pretraining heads; each of several parts (ELECTRA's) in a folder of its own."""
    for folder, part in model.parts().items():
        family = family_of(part.config)
        state = to_hub(part, pretraining_names(family))
        architecture = family.architecture + part.architecture
        _write(Path(path) / folder, part.config, state, tokenizer, architecture)


def save_joint(path: str | Path, model: EncoderWithHeads, tokenizer: Path) -> None:
    """Write a model with all its heads: the encoder under the hub's names, each head under its own name."""
    heads = {name: head.model_dump(exclude_defaults=True) for name, head in model.described.items()}
    family = family_of(model.config)
    state = to_hub(model, joint_names(family))
    files = {"heads.json": heads}
    _write(Path(path), model.config, state, tokenizer, family.architecture_of("embedding"), files)


def save_head(path: str | Path, model: EncoderWithHeads, name: str, tokenizer: Path) -> None:
    """Write one head of a model with the encoder, as a checkpoint of the hub's architecture for the head's task."""
    head = model.described[name]
    family = family_of(model.config)
    single = EncoderWithHeads(model.config, {name: head}, model.encoder)
    single.heads[name] = model.heads[name]
    if head.task == "late-interaction":
        _save_late_interaction(Path(path), single, head, tokenizer)
        return
    if head.sparse is not None and head.sparse.source == "tokens":
        raise ValueError(f"{name}: a head of token weights is written in joint checkpoints only")
    is_embedding = head.task == "embedding"
    names = joint_names(family) if is_embedding else single_names(family, head.task)
    kept = HEAD_FIELDS | {"matryoshka_dimensions"}
    extra: dict[str, Any] = head.model_dump(include=kept, exclude_defaults=True)
    if head.labels:
        extra["id2label"] = {str(index): label for index, label in enumerate(head.labels)}
        extra["label2id"] = {label: index for index, label in enumerate(head.labels)}
    one_label = head.task == "classification" and len(head.labels) == 1
    if one_label:  # for a CrossEncoder
        activation = IDENTITY if head.problem_type == "regression" else SIGMOID
        extra["sentence_transformers"] = {"activation_fn": activation}
    if head.problem_type and not (one_label and head.problem_type == ONE_LABEL[SIGMOID]):
        # transformers refuses that one for a single label
        extra["problem_type"] = head.problem_type
    files = _sentence_modules(model.config, head) if is_embedding else _sparse_modules(head)
    architecture = family.architecture_of(head.task)
    _write(Path(path), model.config, to_hub(single, names), tokenizer, architecture, files, extra)


def _save_late_interaction(
    folder: Path, model: EncoderWithHeads, head: Head, tokenizer: Path
) -> None:
    """Write the directory of a MultiVectorEncoder. Raises ValueError for other dense layers."""
    (module,) = model.heads.values()
    layers = [layer for layer in module.dense if not isinstance(layer, nn.Identity)]
    layer, late = layers[0] if len(layers) == 1 else None, head.late_interaction
    if late is None or not isinstance(layer, nn.Linear) or layer.bias is not None:
        raise ValueError("a head of late interaction is written with one linear layer without bias")
    known = Tokenizer.from_file(str(tokenizer))
    expansion = late.query_expansion and {
        "strategy": "fixed" if late.query_length == late.query_expansion else "min",
        "attend": late.attend_to_expansion,
        "token": known.id_to_token(late.expansion_token_id or 0),
        "length": late.query_expansion,
    }
    token_vectors = {"module_input_name": TOKENS, "module_output_name": TOKENS}
    lengths = {"query_length": late.query_length, "document_length": late.document_length}
    if expansion and expansion["strategy"] == "fixed":
        del lengths["query_length"]
    classes = {**MULTI_VECTOR_CLASSES}
    if not head.normalize:
        del classes["Normalize"]
    files: dict[str, Any] = {
        "modules.json": _list_modules(classes),
        ROOT: {
            "model_type": "MultiVectorEncoder",
            "prompts": {"query": late.query_prefix, "document": late.document_prefix},
            "similarity_fn_name": late.similarity,
        },
        SENTENCE_FILES[0]: {
            "transformer_task": "feature-extraction",
            "query_expansion": expansion,
            **lengths,
        },
        "1_Dense/config.json": {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": False,
            "activation_function": IDENTITY,
            **token_vectors,
        },
        "2_MultiVectorMask/config.json": {
            "skiplist_words": [known.id_to_token(number) for number in late.skip_token_ids],
            "skiplist_tasks": ["document"],
        },
    }
    if head.normalize:
        files["3_Normalize/config.json"] = token_vectors
    family = family_of(model.config)
    state = to_hub(model.encoder, encoder_names(family))
    architecture = family.architecture_of("embedding")
    _write(folder, model.config, state, tokenizer, architecture, files)
    save_file({"linear.weight": layer.weight.detach()}, folder / "1_Dense" / "model.safetensors")


def _list_modules(classes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the content of `modules.json`. classes: of the modules in order, by their kinds"""
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": name}
        for i, (kind, name) in enumerate(classes.items())
    ]


def _sparse_modules(head: Head) -> dict[str, Any]:
    """Return the files that a SparseEncoder reads; none for a head of another task."""
    if head.sparse is None:
        return {}
    pooling = {
        "pooling_strategy": "max",
        "activation_function": head.sparse.activation,
        "embedding_dimension": head.vocabulary_size,
    }
    return {
        "modules.json": _list_modules(SPARSE_CLASSES),
        ROOT: {"model_type": "SparseEncoder"},
        SENTENCE_FILES[0]: {
            "transformer_task": "fill-mask",
            "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
            "module_output_name": TOKENS,
        },
        "1_SpladePooling/config.json": pooling,
    }


def _sentence_modules(config: BertConfig, head: Head) -> dict[str, Any]:
    """Return the files that sentence-transformers reads: its modules in order, the pooling and the prompts."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if head.normalize else [])]
    switches = {switch: mode in head.pooling_modes for switch, mode in POOLING_MODES.items()}
    is_switched = len(head.pooling_modes) == 1 and any(switches.values())
    named = {} if is_switched else {"pooling_mode": head.pooling_modes}
    pooling = {"include_prompt": head.include_prompt, **switches, **named}
    prompts = {"prompts": head.named_prompts, "default_prompt_name": head.default_prompt}
    return {
        "modules.json": _list_modules({k: f"sentence_transformers.models.{k}" for k in kinds}),
        "1_Pooling/config.json": {"word_embedding_dimension": config.hidden_size, **pooling},
        **({ROOT: prompts} if head.prompts else {}),
    }


def _write(
    folder: Path,
    shape: BertConfig,
    state: Tensors,
    tokenizer: Path,
    architecture: str,
    files: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint's files. files: further JSON files by name; config: further fields of `config.json`"""
    known = Tokenizer.from_file(str(tokenizer)).get_vocab()
    special_tokens = family_of(shape).special_tokens
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    documents = {
        "config.json": {**shape.to_dict(), "architectures": [architecture], **(config or {})},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.max_length,
            # Without `token_type_ids` here transformers passes no segments for a pair, and its logits differ.
            "model_input_names": [
                "input_ids",
                *(["token_type_ids"] if shape.type_vocab_size > 1 else []),
                "attention_mask",
            ],
            # transformers adds a special token that has no id, and the embedding table has no row for it.
            **{f"{kind}_token": token for kind, token in special_tokens.items() if token in known},
        },
        **(files or {}),
    }
    for name, document in documents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if tokenizer.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
