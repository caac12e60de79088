"""The weight files of a checkpoint directory: which file is read, and the tensors in it.

The order is transformers': one safetensors file, safetensors shards by their index, one pickle, pickle shards by
their index. A pickle is read as tensors alone (`weights_only`), which runs no code. torch is imported where a file is
read, because a served ONNX graph needs the names of the files only.
"""

import json
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.checkpoints.errors import CheckpointError

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
ADAPTER_FILES = ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WEIGHT_FILES = (SAFETENSORS, SAFETENSORS + INDEX, PICKLE, PICKLE + INDEX)  # in the order of reading

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]


def find_weights(folder: Path) -> Path:
    """Return the weight file of a folder, or the index of its shards. Raises CheckpointError where there is none."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder / SAFETENSORS} is missing, and so are {', '.join(WEIGHT_FILES[1:])}: "
        "add one of these files"
    )


def weight_bytes(folder: Path) -> int:
    """Return the size of a folder's weight files. Raises CheckpointError where there is none."""
    path = find_weights(folder)
    names = {path.name}
    if path.name.endswith(INDEX):
        names = set(_read_index(path).values())
        _check_shards(path, names)
    return sum((folder / name).stat().st_size for name in names)


def read_tensors(folder: Path) -> State:
    """Return all tensors of a folder by their names. Raises CheckpointError naming the file."""
    path = find_weights(folder)
    load = load_safetensors if path.name.startswith(SAFETENSORS) else load_pickle
    if not path.name.endswith(INDEX):
        return load(path)
    return _read_shards(path, load)


def refuse_adapter(folder: Path) -> None:
    """Raise CheckpointError where transformers would change the weights by an adapter of peft."""
    if (folder / ADAPTER).is_file():
        raise CheckpointError(
            f"{folder / ADAPTER}: an adapter next to the weights is not read: move its two files to a folder, "
            "and export with --adapter FOLDER"
        )


# -- shards ------------------------------------------------------------------------------------------------------------


def _read_shards(index: Path, load: Callable[[Path], State]) -> State:
    shard_of = _read_index(index)
    _check_shards(index, set(shard_of.values()))
    state: State = {}
    for shard in sorted(set(shard_of.values())):
        tensors = load(index.parent / shard)
        listed = {name for name, file in shard_of.items() if file == shard}
        if missing := sorted(listed - tensors.keys()):
            raise CheckpointError(
                f"{index}: weight_map: {shard} has no tensor {missing[0]!r}: download or save the shards again"
            )
        if unlisted := sorted(tensors.keys() - listed):
            raise CheckpointError(
                f"{index}: weight_map: {unlisted[0]!r} of {shard} is not listed for that shard: save the shards again"
            )
        state |= tensors
    return state


def _read_index(index: Path) -> dict[str, str]:
    """Return the shard of each tensor. Raises CheckpointError for a tensor listed twice or outside the folder."""
    try:
        document = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and _unique's
        raise CheckpointError(f"{index}: {error}") from None
    shard_of = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{index}: weight_map must be an object of tensor names and files")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard or "\\" in shard:
            raise CheckpointError(
                f"{index}: weight_map: {name!r} is in {shard!r}, which is not the name of a file in this directory"
            )
    return shard_of


def _unique(pairs: Sequence[tuple[str, Any]]) -> Mapping[str, Any]:
    counts = Counter(name for name, _ in pairs)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(f"{name!r} is listed {count} times")
    return dict(pairs)


def _check_shards(index: Path, shards: set[str]) -> None:
    """Raise CheckpointError for a listed shard that is not there, and for one that is there and not listed."""
    if missing := sorted(shard for shard in shards if not (index.parent / shard).is_file()):
        raise CheckpointError(
            f"{index.parent / missing[0]} is missing ({len(missing)} of {len(shards)} shards in {index.name})"
        )
    stem, _, suffix = index.name.removesuffix(INDEX).partition(".")
    found = {path.name for path in index.parent.glob(f"{stem}-*-of-*.{suffix}")}
    if unlisted := sorted(found - shards):
        raise CheckpointError(
            f"{index.parent / unlisted[0]} is not in {index.name}: remove the file, or save the shards again"
        )


# -- files -------------------------------------------------------------------------------------------------------------


def load_safetensors(path: Path) -> State:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def load_pickle(path: Path) -> State:
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):  # of the version of the pickle
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):  # torch advises to run the code of the file
            reason = "it has other objects, which could run code, or is damaged"
        raise CheckpointError(
            f"{path} cannot be read as tensors alone: {reason}: save it as {SAFETENSORS}"
        ) from None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not tensors by their names")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor: save the state_dict alone"
            )
    return dict(state)
