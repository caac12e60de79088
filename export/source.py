"""What is exported: a checkpoint directory in the hub's layout, trained here or elsewhere.

Which heads it has is read from `heads.json` (a joint checkpoint), else from `modules.json` (a sentence-transformers
directory), else from `architectures`. What cannot be served is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.torch import load_file
from torch import nn

from model.checkpoint import (
    CheckpointError,
    from_hub,
    load_encoder,
    load_model,
    locate,
    read_config,
    read_json,
)
from model.heads import Model, SentenceEmbedding
from model.tokenizer import wordpiece
from service.bundle import Head
from service.encode import load_tokenizer

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"Identity": nn.Identity, "Tanh": nn.Tanh}
LONGEST = 1_000_000  # tokenizer_config.json says "no limit" by absurdly large numbers


@dataclass(frozen=True)
class Source:
    """A model with its tokenizer (without truncation or padding) and the longest input it takes, in tokens."""

    folder: Path
    model: Model
    tokenizer: tokenizers.Tokenizer
    max_length: int


def read_source(name: str | Path) -> Source:
    """Read a local directory or a hub name. Raises CheckpointError naming what cannot be served."""
    folder = locate(name)
    is_sentence_transformer = (folder / "modules.json").is_file()
    model = _sentence_transformer(folder) if is_sentence_transformer else load_model(folder)
    tokenizer = read_tokenizer(folder)
    rows = model.config.vocab_size
    if tokenizer.get_vocab_size() > rows:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.get_vocab_size()} tokens, the model {rows}"
        )
    return Source(folder, model, tokenizer, read_max_length(folder))


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """`tokenizer.json`, or the WordPiece tokenizer that an older checkpoint's `vocab.txt` stands for."""
    if (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder / "tokenizer.json")
    if not (folder / "vocab.txt").is_file():
        raise CheckpointError(f"{folder} has neither tokenizer.json nor vocab.txt")
    config = _optional(folder / "tokenizer_config.json")
    lowercase = config.get("do_lower_case", True)
    return wordpiece(str(folder / "vocab.txt"), lowercase)


def read_max_length(folder: Path) -> int:
    """sentence-transformers' figure, else the tokenizer's; never more than the position table has rows."""
    positions = read_config(folder).max_position_embeddings
    said = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
    if said is None:
        said = _optional(folder / "tokenizer_config.json").get("model_max_length")
    return positions if said is None or said > LONGEST else min(int(said), positions)


def _optional(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.is_file() else {}


# -- sentence-transformers ------------------------------------------------------------------------


def _sentence_transformer(folder: Path) -> Model:
    """The encoder, and one embedding head made of the modules that follow it."""
    pooling, normalize, dense = None, False, []
    for module in read_json(folder / "modules.json"):
        path = folder / module["path"]
        match module["type"].rpartition(".")[2]:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _pooling(path)
            case "Dense":
                dense += _dense(path)
            case "Normalize":
                normalize = True
            case kind:
                raise CheckpointError(
                    f"{folder}: cannot serve the sentence-transformers module {kind}"
                )
    if pooling is None:
        raise CheckpointError(f"{folder}: modules.json has no Pooling module")
    return _embedding_model(folder, pooling, normalize, dense)


def _embedding_model(folder: Path, pooling: str, normalize: bool, dense: list[nn.Module]) -> Model:
    encoder = load_encoder(folder, pooler=False)
    outputs = [layer.out_features for layer in dense if isinstance(layer, nn.Linear)]
    head = Head.model_validate(
        {
            "task": "embedding",
            "pooling": pooling,
            "dimensions": [encoder.config.hidden_size, *outputs][-1],
            "normalize": normalize,
        }
    )
    model = Model(encoder.config, {"embedding": head})
    model.encoder = encoder
    model.heads["embedding"] = SentenceEmbedding(pooling, nn.Sequential(*dense))
    return model.eval()


def _pooling(path: Path) -> str:
    config = read_json(path / "config.json")
    modes: list[str] = [config["pooling_mode"]] if "pooling_mode" in config else []
    modes += [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    known = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
    names = [known.get(mode, mode) for mode in modes]
    if len(names) != 1 or names[0] not in ("cls", "mean"):
        raise CheckpointError(
            f"{path}: cannot serve pooling {', '.join(names) or 'none'}: mean or cls only"
        )
    return names[0]


def _dense(path: Path) -> list[nn.Module]:
    config = read_json(path / "config.json")
    activation = config["activation_function"].rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{path}: cannot serve activation {activation}: {', '.join(ACTIVATIONS)} only"
        )
    linear = nn.Linear(config["in_features"], config["out_features"], bias=config["bias"])
    weights = path / "model.safetensors"
    if not weights.is_file():
        raise CheckpointError(
            f"{weights} is missing (pickled weights are not read: they can run code)"
        )
    from_hub(linear, load_file(weights), lambda name: [f"linear.{name}"], str(path))
    return [linear, ACTIVATIONS[activation]()]
