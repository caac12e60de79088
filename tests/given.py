"""Directories as optimum writes them: an encoder's graph with random weights, and the files next to it."""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from model.families.bert_names import BERT
from model.tokenizer import train
from tests import hub, samples

LABELS = ("sea", "sky", "trade")
TAGS = ("O", "B-PER", "I-PER")
POSITIONS = 128
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
AUTO = {
    "classification": transformers.AutoModelForSequenceClassification,
    "ner": transformers.AutoModelForTokenClassification,
    "qa": transformers.AutoModelForQuestionAnswering,
    "embedding": transformers.AutoModel,
}
OUTPUTS = {
    "classification": ("logits",),
    "ner": ("logits",),
    "qa": ("start_logits", "end_logits"),
    "embedding": ("last_hidden_state",),
}
Network = Any  # transformers does not say


class Named(nn.Module):
    """A model of transformers with inputs by their places and some of its outputs."""

    def __init__(self, model: Network, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**dict(zip(self.inputs, arrays, strict=True)))
        return tuple(found[name] for name in self.outputs)


def save_given(folder: Path, model_type: str, task: str, **shape: Any) -> Network:
    """Write a model of two layers and its tokenizer as transformers does; returns the model."""
    tokenizer = train(samples.corpus(), vocab_size=500)
    labels = {"classification": LABELS, "ner": TAGS}.get(task, ())
    fields = {"max_position_embeddings": POSITIONS, "embedding_size": 32}
    fields |= {"id2label": dict(enumerate(labels))} if labels else {}
    fields = {**hub.SHAPE, **fields, **shape}
    return hub.save_beside(tokenizer, BERT, POSITIONS, folder, AUTO[task], model_type, **fields)


def save_graph(
    path: Path,
    model: Network,
    outputs: tuple[str, ...],
    inputs: tuple[str, ...] = INPUTS,
    *,
    dynamo: bool = False,
) -> None:
    """Export a model as optimum does, or by dynamo."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = torch.tensor([[2, *range(10, 22), 3], [2, *range(30, 36), 3, *[0] * 6]])
    arrays = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": 0 * ids}
    axes = dict(enumerate(("B", "S")))
    if dynamo:
        dims = {axis: torch.export.Dim(name) for axis, name in axes.items()}
        how: dict[str, Any] = {"dynamic_shapes": (tuple(dims for _ in inputs),), "verbose": False}
        how |= {"dynamo": True, "opset_version": 18, "external_data": False}
    else:
        how = {"dynamic_axes": dict.fromkeys(inputs, axes), "dynamo": False, "opset_version": 17}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(
            Named(model, inputs, outputs).eval(),
            tuple(arrays[name] for name in inputs),
            str(path),
            input_names=[*inputs],
            output_names=[*outputs],
            **how,
        )
