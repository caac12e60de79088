"""Heads of every kind, and their outputs here and in transformers."""

from typing import Any

import torch
import transformers
from torch import Tensor

from model.heads import EncoderWithHeads
from service.core.manifest import Head
from service.core.packing import Packed
from tests.model.helpers import batch, ours, real, theirs

THREE = ("bad", "good", "so-so")
HEADS = {
    "single label": Head(task="classification", labels=THREE, problem_type="single_label_classification"),
    "multi-label": Head(task="classification", labels=THREE, problem_type="multi_label_classification"),
    "multi-label of one": Head(task="classification", labels=("good",), problem_type="multi_label_classification"),
    "regression": Head(task="classification", labels=("score",), problem_type="regression"),
    "no problem type": Head(task="classification", labels=THREE),
    "ner": Head(task="ner", labels=("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
    "qa": Head(task="qa"),
    "embedding": Head(task="embedding", pooling="mean", dimensions=32),
}  # fmt: skip
PEERS = {
    "classification": transformers.BertForSequenceClassification,
    "ner": transformers.BertForTokenClassification,
    "qa": transformers.BertForQuestionAnswering,
    "embedding": transformers.BertModel,
}
PACKED = batch([9, 1, 4, 16, 2])


@torch.no_grad()
def peer_output(task: str, peer: Any, packed: Packed) -> Tensor:
    """Return what our head computes, from the outputs of transformers' model."""
    found = peer(**theirs(packed))
    if task == "classification":
        return found.logits
    if task == "ner":
        return real(found.logits, packed)
    if task == "qa":
        return real(torch.stack([found.start_logits, found.end_logits], dim=-1), packed)
    parts = real(found.last_hidden_state, packed).split(packed.lengths.tolist())
    return torch.stack([part.mean(dim=0) for part in parts])


@torch.no_grad()
def our_output(model: EncoderWithHeads, name: str, packed: Packed) -> Tensor:
    return model(*ours(packed), heads=[name])[name]
