"""What is exported, evaluated or asked: a checkpoint in the hub's layout, trained here or elsewhere, with its heads.

Which heads it has is read from `heads.json` (a joint checkpoint), else from `modules.json` (a sentence-transformers
directory), else from `architectures`, as those of an older CrossEncoder. What cannot be served is refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers
from torch import nn

from model.checkpoint import (
    config_file,
    is_cross_encoder,
    load_encoder,
    load_model,
    locate,
    read_config,
    read_json,
    read_pooling,
    read_weights,
)
from model.checkpoints.sentence_config import (
    DENSE_TABLE,
    NORMALIZE_TABLE,
    encoder_folder,
    lower_case,
    read_module_list,
    read_root_config,
    read_sentence_config,
    read_settings,
)
from model.heads import Model, SentenceEmbedding
from model.names import CheckpointError, from_hub
from model.tokenizer import wordpiece
from service.bundle import Head, Task
from service.encode import load_tokenizer

TANH = "torch.nn.modules.activation.Tanh"
ACTIVATIONS: Mapping[str, type[nn.Module]] = {"Identity": nn.Identity, "Tanh": nn.Tanh}
MODULES = {"Transformer", "Pooling", "Dense", "Normalize"}
ORDER = re.compile(r"Transformer, Pooling(, Dense)*(, Normalize)?")  # what our embedding head is
ALONE = re.compile("Transformer")  # a CrossEncoder, whose head is the architecture's own
LONGEST = 1_000_000  # tokenizer_config.json says "no limit" by absurdly large numbers


@dataclass(frozen=True)
class Source:
    """A model with its tokenizer (without truncation or padding) and the longest input it takes, in tokens."""

    folder: Path
    model: Model
    tokenizer: tokenizers.Tokenizer
    max_length: int


def read_source(name: str | Path, task: Task | None = None) -> Source:
    """Read a local directory or a hub name. Raises CheckpointError naming what cannot be served.

    task: the head to read where `architectures` in `config.json` names none
    """
    folder = locate(name)
    model = _read_model(folder, task)
    tokenizer = read_tokenizer(folder)
    rows = model.config.vocab_size
    if tokenizer.get_vocab_size() > rows:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.get_vocab_size()} tokens, the model {rows}"
        )
    return Source(folder, model, tokenizer, read_max_length(folder))


def _read_model(folder: Path, task: Task | None) -> Model:
    if not (folder / "modules.json").is_file():
        return load_model(folder, task)
    own: Task = "classification" if is_cross_encoder(folder) else "embedding"
    if task not in (None, own):
        raise CheckpointError(
            f"{folder / 'modules.json'} describes a model of the task {own}, and --task {task}: "
            "leave out --task, or remove modules.json"
        )
    return _cross_encoder(folder) if own == "classification" else _sentence_transformer(folder)


def has_tokenizer(folder: Path) -> bool:
    """Whether there is one for `read_tokenizer`."""
    folder = encoder_folder(folder)
    return any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt"))


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """`tokenizer.json`, or the WordPiece tokenizer that an older checkpoint's `vocab.txt` stands for."""
    inner = encoder_folder(folder)
    path = inner / "tokenizer.json"
    if not path.is_file():
        tokenizer = _old_tokenizer(inner)
    else:
        try:
            tokenizer = _as_configured(load_tokenizer(path), inner)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
    lower_case(tokenizer, read_sentence_config(folder))
    return tokenizer


def tokenizer_file(folder: Path, output: Path) -> Path:
    """A `tokenizer.json` that cuts as `read_tokenizer` does: the checkpoint's, or else one in `output`."""
    path, tokenizer = encoder_folder(folder) / "tokenizer.json", read_tokenizer(folder)
    if path.is_file() and tokenizer.to_str() == load_tokenizer(path).to_str():
        return path
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    return output / "tokenizer.json"


def _as_configured(tokenizer: tokenizers.Tokenizer, folder: Path) -> tokenizers.Tokenizer:
    """With the case that the checkpoint's configuration asks for: in other libraries it wins."""
    config = _optional(folder / "tokenizer_config.json")
    lowercase = config.get("do_lower_case", True) if _is_bert(config) else None
    normalizer = tokenizer.normalizer
    if isinstance(normalizer, normalizers.BertNormalizer) and lowercase is not None:
        normalizer.lowercase = lowercase
        tokenizer.normalizer = normalizer
    return tokenizer


def _is_bert(config: Mapping[str, Any]) -> bool:
    return str(config.get("tokenizer_class", "")).startswith("BertTokenizer")


def _old_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    if not (folder / "vocab.txt").is_file():
        raise CheckpointError(f"{folder} has neither tokenizer.json nor vocab.txt")
    config = _optional(folder / "tokenizer_config.json")
    tokenizer = wordpiece(str(folder / "vocab.txt"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    return tokenizer


def read_max_length(folder: Path) -> int:
    """sentence-transformers' figure, else the tokenizer's; never more than the position table has rows."""
    positions = read_config(folder).max_length
    said = said_length(folder)
    return positions if said is None else min(said, positions)


def said_length(folder: Path) -> int | None:
    """sentence-transformers' figure, else the tokenizer's, where there is one that means something."""
    said = read_sentence_config(folder).get("max_seq_length")
    if said is None:
        inner = encoder_folder(folder)
        said = _optional(inner / "tokenizer_config.json").get("model_max_length")
    return None if said is None or said > LONGEST else int(said)


def _optional(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.is_file() else {}


# -- sentence-transformers ------------------------------------------------------------------------


def _cross_encoder(folder: Path) -> Model:
    """A text classifier. Raises CheckpointError for one that is made of modules, or of another architecture."""
    _modules(folder, ALONE, "Transformer alone in a CrossEncoder")
    model = load_model(folder)
    if [*model.described] != ["classification"]:
        raise CheckpointError(f"{folder}: cannot serve a CrossEncoder that is no text classifier")
    return model


def _sentence_transformer(folder: Path) -> Model:
    """The encoder, and one embedding head made of the modules that follow it."""
    pooling, normalize, dense = read_modules(folder)
    return _embedding_model(folder, pooling, normalize, dense)


def read_modules(folder: Path) -> tuple[str, bool, tuple[nn.Module, ...]]:
    """How the modules behind the encoder pool, whether they normalise, and the dense layers between.

    Raises CheckpointError naming what our head does not compute.
    """
    modules = _modules(folder, ORDER, "Transformer, Pooling, any Dense, and Normalize or not")
    (pooling,) = (read_pooling(path) for kind, path in modules if kind == "Pooling")
    dense = [layer for kind, path in modules if kind == "Dense" for layer in _dense(path)]
    return pooling, modules[-1][0] == "Normalize", tuple(dense)


def _modules(folder: Path, order: re.Pattern[str], said: str) -> list[tuple[str, Path]]:
    """Each module's kind and folder. Raises CheckpointError, with what they must be, unless they are in this order."""
    read_root_config(folder)
    modules = read_module_list(folder)
    for kind, _ in modules:
        if kind not in MODULES:
            raise CheckpointError(f"{folder}: cannot serve the sentence-transformers module {kind}")
    kinds = ", ".join(kind for kind, _ in modules)
    if not order.fullmatch(kinds):
        path = folder / "modules.json"
        raise CheckpointError(f"{path}: cannot serve {kinds or 'no modules'}: they must be {said}")
    for kind, place in modules:
        if kind == "Normalize" and (place / "config.json").is_file():
            NORMALIZE_TABLE.check(place / "config.json", read_settings(place / "config.json"))
    return modules


def _get(path: Path, config: Mapping[str, Any], *names: str) -> list[Any]:
    missing = [name for name in names if name not in config]
    if missing:
        raise CheckpointError(f"{path} does not say {', '.join(missing)}")
    return [config[name] for name in names]


def _embedding_model(
    folder: Path, pooling: str, normalize: bool, dense: Sequence[nn.Module]
) -> Model:
    encoder = load_encoder(folder, pooler=False)
    outputs = [layer.out_features for layer in dense if isinstance(layer, nn.Linear)]
    head = Head.model_validate(
        {
            "task": "embedding",
            "pooling": pooling,
            "dimensions": [encoder.config.hidden_size, *outputs][-1],
            "normalize": normalize,
            "demo": read_json(config_file(folder)).get("demo", False),
        }
    )
    model = Model(encoder.config, {"embedding": head})
    model.encoder = encoder
    model.heads["embedding"] = SentenceEmbedding(pooling, nn.Sequential(*dense))
    return model.eval()


def _dense(path: Path) -> list[nn.Module]:
    file = path / "config.json"
    config = read_settings(file)
    DENSE_TABLE.check(file, config)
    inputs, outputs = _get(file, config, "in_features", "out_features")
    bias, activation = config.get("bias", True), config.get("activation_function", TANH)
    for name, size in (("in_features", inputs), ("out_features", outputs)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise CheckpointError(f"{file}: {name} = {size!r} must be a positive integer")
    if not isinstance(bias, bool):
        raise CheckpointError(f"{file}: bias = {bias!r} must be true or false")
    kind = str(activation).rpartition(".")[2]
    if not str(activation).startswith("torch.") or kind not in ACTIVATIONS:
        raise CheckpointError(
            f"{path}: cannot serve activation {activation}: torch's {', '.join(ACTIVATIONS)} only"
        )
    linear = nn.Linear(inputs, outputs, bias=bias)
    weights = read_weights(path)
    if unused := sorted(weights.keys() - {"linear.weight", "linear.bias"}):
        raise CheckpointError(f"{path}: a Dense layer has no tensor {unused[0]}")
    from_hub(linear, weights, lambda name: [f"linear.{name}"], str(path))
    return [linear, ACTIVATIONS[kind]()]
