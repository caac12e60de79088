"""Head bundles with random weights, for a bundle that gives its hidden states."""

from pathlib import Path

import torch

from export.head_bundle import write
from model.frozen import FrozenEncoder, TrainedHead, make_head
from service.core import bundle
from service.core.manifest import Head

HEADS = {
    "classification": Head(task="classification", labels=("rust", "moss", "clay")),
    "ner": Head(task="ner", labels=("O", "B-TOOL", "I-TOOL")),
    "qa": Head(task="qa", max_answer_tokens=8),
    "embedding": Head(task="embedding", pooling="mean", dimensions=64),
}


def save_head(encoder: Path, out: Path, task: str = "classification", seed: int = 0) -> Path:
    """Write the next version of a head bundle; returns its folder."""
    frozen = FrozenEncoder(bundle.load(encoder))
    torch.manual_seed(seed)
    module = make_head(HEADS[task], frozen.hidden_size)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    trained = TrainedHead(task, HEADS[task], module.export(), {}, "", 0)
    manifest = write(frozen, trained, out, "no data")
    version = manifest.version
    return out if version == "1" else out.with_name(f"{out.name}-v{version}")
