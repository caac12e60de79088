"""`Family`: the properties of one kind of encoder, for code that works with any.

A family's module has its configuration, its encoder, and one `Family` with the hub's names for its parts.
`registry.FAMILIES` has all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from model.config import SUFFIXES, BertConfig

# The pretraining objective on two texts: next sentence prediction, or sentence order prediction.
Pairs = Literal["nsp", "sop"]

# Our parameter's name without `.weight` or `.bias`, as a pattern -> the hub's, three for the fused query, key, value.
Stems = Mapping[str, list[str]]

PRETRAINING = "ForPreTraining"  # a masked language model with another head


@dataclass(frozen=True)
class Family:
    """One kind of encoder."""

    config: type[BertConfig]
    encoder: type[nn.Module]
    architecture: str  # prefix of the hub's class names
    prefix: str  # of the encoder's parameters in checkpoints with heads
    encoder_names: Stems
    # The hub's names for the parameters of the heads, by task.
    heads: Mapping[str, Mapping[str, str]]
    # By task, a function of configuration and number of labels that makes a head unlike that in `heads.py`; also
    # "masked_lm" for the masked language model head, and "pretraining" for the module that is pretrained.
    make_heads: Mapping[str, Callable[..., nn.Module]] = field(default_factory=dict)
    # The hub's names for the parameters of the pretraining heads.
    objectives: Mapping[str, str] = field(default_factory=dict)
    # A tensor of the hub without `.weight`, as a pattern -> the modules of transformers that share its rows equally.
    module_names: Stems = field(default_factory=dict)
    # The objective on two texts, used if `objectives` has a classifier for it.
    pair_objective: Pairs = "nsp"
    mask_rate: float = 0.15  # the share of tokens that pretraining masks
    # The hub's name of the masked language model's output matrix, which is tied to the word embeddings.
    decoder: str = "cls.predictions.decoder"
    activation: Callable[[Tensor], Tensor] = torch.tanh  # after the dense layer of the pooler
    fits_half: bool = True  # whether activations of released checkpoints fit in fp16
    tokenizer: Literal["wordpiece", "byte-level BPE", "unigram"] = "wordpiece"  # its algorithm
    # The tokenizer's, in the order of their ids.
    special_tokens: Mapping[str, str] = field(
        default_factory=lambda: {
            kind: f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")
        }
    )
    # The templates of special tokens for a text and for a pair; `:1` marks the second segment.
    frame: tuple[str, str] = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")

    @property
    def model_type(self) -> str:
        """The family's `model_type` in `config.json`."""
        return self.config.model_type

    @property
    def has_masked_lm(self) -> bool:
        """Whether the family has a masked language model; without it, there is no pretraining here."""
        return "masked_lm" in self.objectives

    @property
    def pairs(self) -> Pairs | None:
        """The pretraining objective on two texts; None if pretraining uses single texts."""
        return self.pair_objective if "next_sentence.classifier" in self.objectives else None

    def head_stems(self, task: str) -> Mapping[str, str]:
        """Return the hub's names for the parameters of a task's head, by our names within the head."""
        masked_lm = {n: hub for n, hub in self.objectives.items() if n.startswith("masked_lm")}
        if task == "sparse-embedding":
            return masked_lm
        if task == "fill-mask":
            return {
                n.removeprefix("masked_lm").removeprefix("."): hub for n, hub in masked_lm.items()
            }
        return self.heads.get(task, {})  # an embedding has no parameters of its own

    def architecture_of(self, task: str) -> str:
        """Return the hub's class name for a task."""
        return self.architecture + SUFFIXES["fill-mask" if task == "sparse-embedding" else task]
