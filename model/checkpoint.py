"""Checkpoints in the hub's layout, both ways: `config.json`, `model.safetensors`, `tokenizer.json`.

The files hold BERT's own names. Each kind of checkpoint is one function from our parameter name to the hub's names
for it: three for the fused query-key-value projection, one for all else. Saving splits a tensor over its names,
loading joins them, and both go through the same function.

A joint checkpoint has the trunk under BERT's names, heads as `heads.<name>.*`, and `heads.json`.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model.bert import Bert
from model.config import BertConfig
from model.heads import Model, Pretraining
from service import bundle

State = dict[str, Tensor]
Names = Callable[[str], list[str]]

# Our parameter's stem (what stands before `.weight` or `.bias`) -> the hub's.
TRUNK = {
    r"embeddings\.word": ["embeddings.word_embeddings"],
    r"embeddings\.position": ["embeddings.position_embeddings"],
    r"embeddings\.token_type": ["embeddings.token_type_embeddings"],
    r"embeddings\.norm": ["embeddings.LayerNorm"],
    r"layers\.(\d+)\.attention\.qkv": [
        r"encoder.layer.\1.attention.self.query",
        r"encoder.layer.\1.attention.self.key",
        r"encoder.layer.\1.attention.self.value",
    ],
    r"layers\.(\d+)\.attention\.output": [r"encoder.layer.\1.attention.output.dense"],
    r"layers\.(\d+)\.attention_norm": [r"encoder.layer.\1.attention.output.LayerNorm"],
    r"layers\.(\d+)\.feed_forward\.up": [r"encoder.layer.\1.intermediate.dense"],
    r"layers\.(\d+)\.feed_forward\.down": [r"encoder.layer.\1.output.dense"],
    r"layers\.(\d+)\.feed_forward_norm": [r"encoder.layer.\1.output.LayerNorm"],
    r"pooler\.dense": ["pooler.dense"],
}
HEADS = {
    "pooler.dense": "bert.pooler.dense",
    "classifier": "classifier",
    "qa_outputs": "qa_outputs",
}
OBJECTIVES = {
    "masked_lm": "cls.predictions",
    "masked_lm.dense": "cls.predictions.transform.dense",
    "masked_lm.norm": "cls.predictions.transform.LayerNorm",
    "next_sentence.pooler.dense": "bert.pooler.dense",
    "next_sentence.classifier": "cls.seq_relationship",
}

ARCHITECTURES = {
    "classification": "BertForSequenceClassification",
    "ner": "BertForTokenClassification",
    "qa": "BertForQuestionAnswering",
    "embedding": "BertModel",
}
TASKS = {architecture: task for task, architecture in ARCHITECTURES.items()}
# What the hub has no word for; kept in `config.json` where it differs from the default.
OURS = {"normalize", "null_threshold", "max_answer_tokens", "max_query_tokens", "demo"}
POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as asked; the message names the file and what is wrong."""


# -- names ------------------------------------------------------------------------------------------------------------


def trunk_names(name: str, prefix: str = "") -> list[str]:
    """The hub's names for a parameter of `Bert`."""
    stem, _, kind = name.rpartition(".")
    for ours, theirs in TRUNK.items():
        if match := re.fullmatch(ours, stem):
            return [f"{prefix}{match.expand(template)}.{kind}" for template in theirs]
    raise AssertionError(f"{name} is not a parameter of the encoder; this is a bug")


def single_names(name: str) -> list[str]:
    """The hub's names for a parameter of a `Model` with one head."""
    if name.startswith("encoder."):
        return trunk_names(name.removeprefix("encoder."), prefix="bert.")
    _, _, rest = name.split(".", 2)  # heads.<name>.<rest>
    stem, _, kind = rest.rpartition(".")
    return [f"{HEADS[stem]}.{kind}"]


def joint_names(name: str) -> list[str]:
    """The names in a joint checkpoint: a bare trunk's, and the heads' own."""
    return trunk_names(name.removeprefix("encoder.")) if name.startswith("encoder.") else [name]


def pretraining_names(name: str) -> list[str]:
    if name.startswith("encoder."):
        return trunk_names(name.removeprefix("encoder."), prefix="bert.")
    stem, _, kind = name.rpartition(".")
    return [f"{OBJECTIVES[stem]}.{kind}"]


def to_hub(module: nn.Module, names: Names) -> State:
    """A module's parameters under the hub's names."""
    hub = {}
    for ours, tensor in module.state_dict().items():
        theirs = names(ours)
        pieces = tensor.detach().cpu().chunk(len(theirs))
        hub.update((name, piece.contiguous()) for name, piece in zip(theirs, pieces, strict=True))
    return hub


def from_hub(module: nn.Module, hub: Mapping[str, Tensor], names: Names, where: str) -> None:
    """Fill a module from a state under the hub's names; the `bert.` prefix may be absent.

    Raises CheckpointError naming missing and misshapen tensors.
    """
    found = {name.removeprefix("bert."): tensor for name, tensor in hub.items()}
    wanted = {name.removeprefix("bert."): tensor for name, tensor in to_hub(module, names).items()}
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} tensors are missing: {', '.join(missing[:3])} ..."
        )
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            shapes = f"{tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
            raise CheckpointError(f"{where}: {name} has shape {shapes}")
    parts = {
        ours: [found[name.removeprefix("bert.")] for name in names(ours)]
        for ours in module.state_dict()
    }
    module.load_state_dict({ours: torch.cat(tensors) for ours, tensors in parts.items()})


def modern_names(state: Mapping[str, Tensor]) -> State:
    """Old files say `gamma` and `beta` for a norm's weight and bias."""
    new = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    return {
        re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: new[m.group()], k): v
        for k, v in state.items()
    }


# -- reading ----------------------------------------------------------------------------------------------------------


def locate(source: str | Path) -> Path:
    """A checkpoint's directory: a local one, `package:NAME/FOLDER` of an installed package, or the hub's by name."""
    if Path(source).is_dir():
        return Path(source)
    if str(source).startswith("package:"):
        return _in_package(str(source))
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "vocab.txt"])
        )
    except Exception as error:  # the hub client's many errors mean one thing here
        raise CheckpointError(
            f"{source}: not a local directory, and not to be had from the hub: {error}"
        ) from error


def _in_package(source: str) -> Path:
    name, _, folder = source.removeprefix("package:").partition("/")
    found = find_spec(name)  # does not run the package
    for parent in (found and found.submodule_search_locations) or []:
        if (Path(parent) / folder).is_dir():
            return Path(parent) / folder
    raise CheckpointError(f"{source}: no installed package has this folder")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None


def read_config(folder: Path) -> BertConfig:
    document = read_json(folder / "config.json")
    try:
        return BertConfig.from_dict(document)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None


def read_weights(folder: Path) -> State:
    path = folder / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing (pickled weights are not read: they can run code)"
        )
    try:
        return modern_names(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def read_heads(folder: Path) -> dict[str, bundle.Head]:
    """The heads of a checkpoint: `heads.json` when present, else what `architectures` says.

    Raises CheckpointError naming an architecture that is none of ours.
    """
    if (folder / "heads.json").is_file():
        described = read_json(folder / "heads.json")
        return {name: _describe(folder / "heads.json", **head) for name, head in described.items()}
    config = read_json(folder / "config.json")
    architecture = (config.get("architectures") or ["BertModel"])[0]
    if architecture not in TASKS:
        raise CheckpointError(
            f"{folder}: architecture {architecture} is none of {', '.join(TASKS)}"
        )
    return {TASKS[architecture]: _head(TASKS[architecture], config, folder)}


def _head(task: str, config: Mapping[str, Any], folder: Path) -> bundle.Head:
    where = folder / "config.json"
    ours = {key: config[key] for key in OURS & set(config)}
    if task in ("classification", "ner"):
        named = config.get("id2label") or {
            i: f"LABEL_{i}" for i in range(config.get("num_labels", 2))
        }
        labels = tuple(named[key] for key in sorted(named, key=int))
        problem_type = config.get("problem_type")
        return _describe(where, task=task, labels=labels, problem_type=problem_type, **ours)
    if task == "embedding":
        return _describe(
            where, task=task, pooling=_pooling(folder), dimensions=config["hidden_size"], **ours
        )
    return _describe(where, task=task, **ours)


def _describe(where: Path, **head: Any) -> bundle.Head:
    try:
        return bundle.Head(**head)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{where}: {problems}") from None


def _pooling(folder: Path) -> str:
    """How sentence-transformers pools this checkpoint: one name, or a switch for each; the mean where nothing says."""
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return "mean"
    config = read_json(path)
    switches = [
        key for key, value in config.items() if key.startswith("pooling_mode_") and value is True
    ]
    mode = config.get("pooling_mode") or ", ".join(
        POOLING.get(switch, switch) for switch in switches
    )
    if mode not in POOLING.values():
        raise CheckpointError(f"{path}: pooling {mode!r} is none of {', '.join(POOLING.values())}")
    return str(mode)


def load_model(source: str | Path) -> Model:
    """The encoder and heads of a checkpoint, joint or of one of the hub's architectures."""
    folder = locate(source)
    model = Model(read_config(folder), read_heads(folder))
    names = joint_names if (folder / "heads.json").is_file() else single_names
    from_hub(model, read_weights(folder), names, str(folder))
    return model.eval()


def load_encoder(source: str | Path, pooler: bool = True) -> Bert:
    """The bare encoder of any checkpoint."""
    folder = locate(source)
    encoder = Bert(read_config(folder), pooler=pooler)
    from_hub(encoder, read_weights(folder), trunk_names, str(folder))
    return encoder.eval()


def load_pretraining(source: str | Path) -> Pretraining:
    """A checkpoint with the masked LM, and with next sentence prediction when it has that."""
    folder = locate(source)
    weights = read_weights(folder)
    if "cls.predictions.transform.dense.weight" not in weights:
        raise CheckpointError(f"{folder} has no masked language model")
    model = Pretraining(read_config(folder), next_sentence="cls.seq_relationship.weight" in weights)
    from_hub(model, weights, pretraining_names, str(folder))
    decoder = weights.get("cls.predictions.decoder.weight")
    if decoder is not None and not torch.equal(
        decoder.float(), model.encoder.embeddings.word.weight
    ):
        raise CheckpointError(
            f"{folder}: cls.predictions.decoder.weight is not tied to the word embeddings"
        )
    return model.eval()


def init_from(model: Model, source: str | Path) -> None:
    """Start a model from another checkpoint's encoder; its classification heads from that one's pooler, if any."""
    folder = locate(source)
    weights = read_weights(folder)
    from_hub(model.encoder, weights, trunk_names, str(folder))
    has_pooler = any(
        name in weights for name in ("pooler.dense.weight", "bert.pooler.dense.weight")
    )
    for name, head in model.described.items():
        if head.task == "classification" and has_pooler:
            from_hub(model.heads[name].pooler, weights, _pooler_names, str(folder))


def _pooler_names(name: str) -> list[str]:
    return [f"pooler.{name}"]


# -- writing ----------------------------------------------------------------------------------------------------------


def save_encoder(path: str | Path, encoder: Bert, tokenizer: Path) -> None:
    _write(Path(path), encoder.config, to_hub(encoder, trunk_names), tokenizer, ["BertModel"])


def save_pretraining(path: str | Path, model: Pretraining, tokenizer: Path) -> None:
    """As `BertForPreTraining`, or `BertForMaskedLM` when there is no next sentence prediction."""
    architecture = "BertForMaskedLM" if model.next_sentence is None else "BertForPreTraining"
    _write(Path(path), model.config, to_hub(model, pretraining_names), tokenizer, [architecture])


def save_joint(path: str | Path, model: Model, tokenizer: Path) -> None:
    """The trunk under BERT's names, every head under its own, and what each head is in `heads.json`."""
    heads = {name: head.model_dump(exclude_defaults=True) for name, head in model.described.items()}
    state = to_hub(model, joint_names)
    _write(Path(path), model.config, state, tokenizer, ["BertModel"], {"heads.json": heads})


def save_head(path: str | Path, model: Model, name: str, tokenizer: Path) -> None:
    """One head of a model with its encoder, as an ordinary checkpoint of the hub's architecture for its task."""
    head = model.described[name]
    alone = Model(model.config, {name: head})
    alone.encoder, alone.heads[name] = model.encoder, model.heads[name]
    names: Names = joint_names if head.task == "embedding" else single_names
    extra: dict[str, Any] = head.model_dump(include=OURS, exclude_defaults=True)
    if head.labels:
        extra["id2label"] = {str(index): label for index, label in enumerate(head.labels)}
        extra["label2id"] = {label: index for index, label in enumerate(head.labels)}
    if head.problem_type:
        extra["problem_type"] = head.problem_type
    files = _sentence_modules(model.config, head) if head.task == "embedding" else {}
    state = to_hub(alone, names)
    _write(Path(path), model.config, state, tokenizer, [ARCHITECTURES[head.task]], files, extra)


def _sentence_modules(config: BertConfig, head: bundle.Head) -> dict[str, Any]:
    """What sentence-transformers reads beside an encoder: its modules in order, and how to pool."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if head.normalize else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    pooling = {switch: name == head.pooling for switch, name in POOLING.items()}
    return {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": config.hidden_size, **pooling},
    }


def _write(
    folder: Path,
    shape: BertConfig,
    state: State,
    tokenizer: Path,
    architectures: list[str],
    files: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    documents = {
        "config.json": {**shape.to_dict(), "architectures": architectures, **(config or {})},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.max_position_embeddings,
            # Without these names transformers leaves the segments of a pair out, and its logits are others.
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            **{
                f"{kind}_token": f"[{kind.upper()}]"
                for kind in ("unk", "cls", "sep", "pad", "mask")
            },
        },
        **(files or {}),
    }
    for name, document in documents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if tokenizer.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
