"""What the checkpoints of GLiNER and GLiClass share: an encoder's configuration within their own, and marker tokens."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from model.checkpoints.config_table import check_config
from model.checkpoints.errors import CheckpointError
from model.checkpoints.hub_names import Names, encoder_names, from_hub, names_on_hub, with_encoder
from model.checkpoints.reader import make_encoder
from model.checkpoints.settings_table import shown
from model.checkpoints.tokenizer_files import read_tokenizer
from model.checkpoints.unused_tensors import check_unused
from model.checkpoints.weight_files import read_tensors
from model.config import MOST
from model.families.registry import family_named
from model.heads import EncoderWithHeads
from service.core.manifest import Head


def check_settings(
    path: Path, document: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise CheckpointError for a setting with another value than those that are served, the default first."""
    for name, values in known.items():
        value = document.get(name, values[0])
        if value not in values:
            served = " or ".join(map(shown, values))
            raise CheckpointError(
                f"{path}: {name} = {shown(value)} cannot be served, only {served}"
            )


def read_encoder_config(
    path: Path, document: Mapping[str, Any], package: str, **changes: Any
) -> dict[str, Any]:
    """Return the configuration of the encoder. Raises CheckpointError where it is missing."""
    encoder = document.get("encoder_config")
    if not isinstance(encoder, dict):
        raise CheckpointError(
            f"{path}: encoder_config is missing: load the model with the package {package}, and write it with "
            "save_pretrained, which writes encoder_config and the tokenizer"
        )
    return {"model_type": "deberta-v2", **encoder, **changes}


def load_with_head(
    folder: Path,
    path: Path,
    encoder: Mapping[str, Any],
    head: tuple[str, Head],
    make: Callable[[int], nn.Module],
    prefix: str,
    head_name: Callable[[str], list[str]],
    changed: Callable[[dict[str, Any]], None] = lambda tensors: None,
) -> EncoderWithHeads:
    """Return an encoder with its head, from one file of weights. Raises CheckpointError.

    head: its name and its description
    make: returns the head's module, for the encoder's width
    prefix, head_name: the names of the encoder's tensors, and of a parameter of the head, in the file
    changed: changes the tensors of the file
    """
    check_config(path, encoder)
    tensors = read_tensors(folder)
    changed(tensors)
    try:
        family = family_named(encoder["model_type"])
        config = family.config.from_dict(encoder)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: encoder_config: {error}") from None

    def make_model() -> EncoderWithHeads:
        model = EncoderWithHeads(config, dict([head]))
        model.heads[head[0]] = make(config.hidden_size)
        return model

    def of_head(name: str) -> list[str]:
        return head_name(name.split(".", 2)[2])  # heads.<name>.<rest>

    model = make_encoder(make_model, config, folder)
    names: Names = with_encoder(encoder_names(family, prefix), of_head)
    from_hub(model, tensors, names, str(folder))
    present, used = (
        [name.removeprefix(prefix) for name in found]
        for found in (tensors, names_on_hub(model, names))
    )
    check_unused(present, used, family, str(folder), heads=False)
    return model.eval()


def read_number(
    path: Path, document: Mapping[str, Any], name: str, default: int, least: int = 1
) -> int:
    """Return a whole number of a configuration. Raises CheckpointError."""
    value = document.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise CheckpointError(
            f"{path}: {name} = {shown(value)} must be a whole number from {least} to {MOST}"
        )
    return value


def read_marker(folder: Path, path: Path, name: str, token: object, package: str) -> int:
    """Return the id of a marker token that a setting names. Raises CheckpointError where the tokenizer has none."""
    found: int | None = read_tokenizer(folder).token_to_id(str(token))
    if found is None:
        raise CheckpointError(
            f"{path}: {name} = {shown(token)} is no token of the tokenizer: write the model again with the "
            f"package {package}"
        )
    return found
