"""LoRA adapters (Hu et al. 2021) in folders of a checkpoint, as peft writes them, merged into the weights.

jina-embeddings-v3 has such a folder for each of its tasks.
"""

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.checkpoints.errors import CheckpointError
from model.checkpoints.json_files import read_json, read_object
from model.checkpoints.sentence_config import config_file, encoder_folder
from model.checkpoints.weight_files import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    SAFETENSORS,
    State,
    load_safetensors,
    read_tensors,
)
from model.families.registry import family_named
from model.families.spec import Family

# Settings of other methods, and of parts that are not low-rank products.
UNSUPPORTED = (
    *("use_dora", "use_rslora", "use_qalora", "fan_in_fan_out", "lora_bias", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "layer_replication", "target_parameters"),
    "trainable_token_indices",
)


def merge_adapter(folder: Path, name: str) -> Path:
    """Return a copy of a checkpoint's folder with the adapter in its folder `name` merged into the weights.

    The copy has links to the other files, and is removed when the process ends. Raises CheckpointError.
    """
    file = folder / name / ADAPTER
    if not file.is_file():
        found = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER}"))
        raise CheckpointError(f"{file} is missing; adapters here: {', '.join(found) or 'none'}")
    config = read_object(file)
    others = [key for key in UNSUPPORTED if config.get(key)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or others:
        raise CheckpointError(
            f"{file}: only a LORA adapter without biases can be merged, and without {', '.join(UNSUPPORTED)}"
        )
    family = family_named(read_json(config_file(folder)).get("model_type", "bert"))
    changes = _read_changes(folder / name / ADAPTER_WEIGHTS, config["lora_alpha"] / config["r"])
    weights = read_tensors(encoder_folder(folder))
    for tensor, own in weights.items():
        modules = _modules(family, tensor)
        if changes.keys() & modules:
            parts = zip(modules, own.float().chunk(len(modules)), strict=True)
            weights[tensor] = torch.cat([part + changes.pop(module, 0) for module, part in parts])
    if changes:
        raise CheckpointError(
            f"{file.parent}: no tensor of the checkpoint is that of {min(changes)}"
        )
    # With the names of a snapshot in the hub's cache, so that the commit is known.
    copy = Path(tempfile.mkdtemp()) / folder.parent.name / folder.name
    atexit.register(shutil.rmtree, copy.parent.parent, ignore_errors=True)
    shutil.copytree(folder.resolve(), copy, copy_function=os.symlink)
    target = copy / encoder_folder(folder).relative_to(folder) / SAFETENSORS
    target.unlink(missing_ok=True)
    save_file(weights, target)
    return copy


def _read_changes(path: Path, scale: float) -> dict[str, Tensor]:
    """Return what an adapter adds to the matrix of each module, by the module's name."""
    state: State = load_safetensors(path)
    changes = {}
    for name, second in state.items():
        for before, after in (
            ("lora_A.weight", "lora_B.weight"),
            ("lora_embedding_A", "lora_embedding_B"),
        ):
            if name.endswith(f".{after}"):
                module = name.removesuffix(f".{after}")
                change = scale * second.float() @ state[f"{module}.{before}"].float()
                change = change.T if "embedding" in after else change
                changes[module.removeprefix("base_model.model.")] = change
    return changes


def _modules(family: Family, tensor: str) -> list[str]:
    """Return the names that transformers' modules have for a tensor of the hub, or for equal parts of it."""
    name = tensor.removesuffix(".weight")
    for pattern, templates in family.module_names.items():
        if match := re.fullmatch(pattern, name):
            return [match.expand(template) for template in templates]
    return [name]
