"""BERT's parameter names on the hub, and ours: one function each way.

Each kind of checkpoint is one function from our parameter name to the hub's names for it: three for the fused
query-key-value projection, one for all else. Saving splits a tensor over its names, loading joins them, and both go
through the same function.
"""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

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


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as asked; the message names the file and what is wrong."""


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


def pooler_names(name: str) -> list[str]:
    """The hub's names for a parameter of `Pooler`, in an encoder's checkpoint."""
    return [f"pooler.{name}"]


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
