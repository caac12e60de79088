"""What sets one kind of encoder apart from another, for all who need not know which one it is.

A family's own file has its configuration, its encoder and one `Family` that says how the hub calls its parts; the table
in `families.py` has a row for each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from model.config import BertConfig

# What is asked about the second of two texts in pretraining: is it the next one or from elsewhere, are they in order.
Pairs = Literal["nsp", "sop"]

# Our parameter's stem (what stands before `.weight` or `.bias`), as a pattern -> the hub's, three for a fused one.
Stems = Mapping[str, list[str]]

SUFFIXES = {
    "classification": "ForSequenceClassification",
    "ner": "ForTokenClassification",
    "qa": "ForQuestionAnswering",
    "embedding": "Model",
}


@dataclass(frozen=True)
class Family:
    """One kind of encoder.

    architecture: how the names of the hub's classes begin
    prefix: of the encoder's parameters where heads stand beside it
    trunk: the hub's names for the encoder's parameters
    heads: for the parameters of the heads, by task
    make_heads: makers of those that are not as in `heads.py`, by task: of the configuration and the number of labels;
        and of what it is pretrained with, "masked_lm" or all of it, "pretraining"
    objectives: for those of what it is pretrained with
    pair_objective: what it is asked about two texts, if `objectives` has an answer to that
    mask_rate: the share of the tokens that are hidden in pretraining
    decoder: the output matrix of its masked language model, which is the word embeddings'
    activation: after the dense layer between the first token and the classes
    tokenizer: how its tokenizer cuts: words by their pieces, or bytes, or whole texts by the likeliest pieces
    special_tokens: as the tokenizer spells them, in the order of their ids
    frame: how they stand around a text, and around a pair; `:1` is for the second segment
    """

    config: type[BertConfig]
    encoder: type[nn.Module]
    architecture: str
    prefix: str
    trunk: Stems
    heads: Mapping[str, Mapping[str, str]]
    make_heads: Mapping[str, Callable[..., nn.Module]] = field(default_factory=dict)
    objectives: Mapping[str, str] = field(default_factory=dict)
    pair_objective: Pairs = "nsp"
    mask_rate: float = 0.15
    decoder: str = "cls.predictions.decoder"
    activation: Callable[[Tensor], Tensor] = torch.tanh
    tokenizer: Literal["wordpiece", "byte-level BPE", "unigram"] = "wordpiece"
    special_tokens: Mapping[str, str] = field(
        default_factory=lambda: {
            kind: f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")
        }
    )
    frame: tuple[str, str] = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")

    @property
    def model_type(self) -> str:
        """What `config.json` calls it."""
        return self.config.model_type

    @property
    def pairs(self) -> Pairs | None:
        """What it is asked about two texts in pretraining; None if it is given one at a time."""
        return self.pair_objective if "next_sentence.classifier" in self.objectives else None

    def architecture_of(self, task: str) -> str:
        """The hub's class for a task."""
        return self.architecture + SUFFIXES[task]
