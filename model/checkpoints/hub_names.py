"""Conversion between our parameter names and the hub's.

Each kind of checkpoint is one function from our parameter name to the hub's names for it: three for the fused
query-key-value projection, one for all others. Saving splits a tensor over its names, loading joins them.
"""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from model.bert import Projections
from model.checkpoints.errors import CheckpointError
from model.families.spec import Family

Tensors = dict[str, Tensor]
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # all are read as float32
Names = Callable[[str], list[str]]


def encoder_names(family: Family, prefix: str = "") -> Names:
    """Return the function for parameters of the encoder."""

    def names(name: str) -> list[str]:
        stem, _, kind = name.rpartition(".")
        for ours, theirs in family.encoder_names.items():
            if match := re.fullmatch(ours, stem):
                return [f"{prefix}{match.expand(template)}.{kind}" for template in theirs]
        raise AssertionError(f"{name} is not a parameter of the encoder; this is a bug")

    return names


def with_encoder(encoder: Names, others: Names) -> Names:
    """Return the function for a module that has an encoder and other parts."""

    def names(name: str) -> list[str]:
        of_encoder = name.startswith("encoder.")
        return encoder(name.removeprefix("encoder.")) if of_encoder else others(name)

    return names


def single_names(family: Family, task: str) -> Names:
    """Return the function for an `EncoderWithHeads` with one head, for this task."""

    stems = family.head_stems(task)

    def of_head(name: str) -> list[str]:
        _, _, rest = name.split(".", 2)  # heads.<name>.<rest>
        stem, _, kind = rest.rpartition(".")
        return [f"{stems[stem]}.{kind}"]

    return with_encoder(encoder_names(family, family.prefix), of_head)


def joint_names(family: Family) -> Names:
    """Return the function for a joint checkpoint: the hub's names for the encoder, our names for the heads."""
    return with_encoder(encoder_names(family), lambda name: [name])


def pretraining_names(family: Family) -> Names:
    """Return the function for an encoder with its pretraining heads."""

    def of_objective(name: str) -> list[str]:
        stem, _, kind = name.rpartition(".")
        return [f"{family.objectives[stem]}.{kind}"]

    return with_encoder(encoder_names(family, family.prefix), of_objective)


def within(names: Names, part: str) -> Names:
    """Return the function for a part of a module."""
    return lambda name: names(f"{part}.{name}")


def pooler_names(family: Family) -> Names:
    """Return the function for a `Pooler` in an encoder's checkpoint."""
    return within(encoder_names(family), "pooler")


def to_hub(module: nn.Module, names: Names) -> Tensors:
    """Return a module's parameters under the hub's names."""
    hub = {}
    for ours, tensor in module.state_dict().items():
        theirs = names(ours)
        owner = module.get_submodule(ours.rpartition(".")[0])
        is_split = isinstance(owner, Projections) and len(theirs) > 1
        sizes = owner.widths if is_split else len(tensor) // len(theirs)
        pieces = tensor.detach().cpu().split(sizes)
        hub.update((name, piece.contiguous()) for name, piece in zip(theirs, pieces, strict=True))
    return hub


def names_on_hub(module: nn.Module, names: Names) -> set[str]:
    """Return the hub's names for a module's parameters."""
    return {theirs for ours in module.state_dict() for theirs in names(ours)}


def from_hub(
    module: nn.Module, hub: Mapping[str, Tensor], names: Names, where: str, prefix: str = ""
) -> None:
    """Fill a module from a state under the hub's names, with or without `prefix`. Raises CheckpointError."""
    found = {name.removeprefix(prefix): tensor for name, tensor in hub.items()}
    if len(found) < len(hub):
        twice = next(name for name in hub if prefix + name in hub)
        raise CheckpointError(
            f"{where}: {twice} and {prefix}{twice} are both there: remove one of the two"
        )
    wanted = {name.removeprefix(prefix): tensor for name, tensor in to_hub(module, names).items()}
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} tensors are missing: {', '.join(missing[:3])} ..."
        )
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            shapes = f"{tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
            raise CheckpointError(f"{where}: {name} has shape {shapes}")
        check_numbers(name, found[name], where)
    parts = {
        ours: [found[name.removeprefix(prefix)] for name in names(ours)]
        for ours in module.state_dict()
    }
    module.load_state_dict({ours: torch.cat(tensors) for ours, tensors in parts.items()})


def check_numbers(name: str, tensor: Tensor, where: str) -> None:
    """Raise CheckpointError naming a tensor that holds other than finite floating-point numbers of at least 16 bits."""
    if tensor.dtype not in FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{where}: {name} has dtype {kind}: only {', '.join(str(f)[6:] for f in FLOATS)} are supported: "
            "quantized weights must be saved in full precision first"
        )
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{where}: {name} has numbers that are not finite (NaN or infinity)")


# Names in old files and in the original code of GTE, and the current ones: of tensors, and of classes.
RENAMED = {
    r"LayerNorm\.gamma$": "LayerNorm.weight",
    r"LayerNorm\.beta$": "LayerNorm.bias",
    r"^new\.": "gte.",
    r"^New(?=Model|For)": "Gte",
}


def modern_name(name: str) -> str:
    """Return the current name of a tensor or a class."""
    for old, current in RENAMED.items():
        name = re.sub(old, current, name)
    return name


def modern_names(state: Mapping[str, Tensor]) -> Tensors:
    """Return tensors by their current names."""
    return {modern_name(name): tensor for name, tensor in state.items()}
