"""EuroBERT (Boizard et al. 2025): Llama's layers with attention in both directions, for European languages.

Differences from ModernBERT: norms divide by the root mean square and subtract nothing (RMSNorm, Zhang and Sennrich
2019), the embeddings are not normalized, all layers have global attention, and several heads of queries may share one
head of keys and values. A text's logits are the mean of its tokens' logits.

Shapes as in `model/bert.py`; K heads of keys and values.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import PackedLayout
from model.families.bert_names import BERT
from model.families.llama import LLAMA_NAMES, Llama, LlamaConfig
from model.pooling import first_tokens, mean_tokens


@dataclass(frozen=True)
class EuroBertConfig(LlamaConfig):
    """Defaults are the values of transformers; the 210m model has 250,000 for rope_theta."""

    model_type: ClassVar[str] = "eurobert"

    vocab_size: int = 128256
    max_position_embeddings: int = 8192
    layer_norm_eps: float = 1e-5
    pad_token_id: int = 128001
    # How tokens become a text's logits: the mean of their logits (late), or logits of their mean or of the first token.
    classifier_pooling: str = "late"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classifier_pooling not in ("late", "mean", "bos"):
            raise ValueError(f"classifier_pooling {self.classifier_pooling!r}: late, mean or bos")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `config.json`. The output matrix of a masked language model is always tied here."""
        return {**super().to_dict(), "tie_word_embeddings": True}


class EuroBert(Llama):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""


# -- heads ------------------------------------------------------------------------------------------------------------


class EuroBertSequenceClassification(nn.Module):
    """Dense, GELU and logits, of each token or of the pooled ones."""

    def __init__(self, config: EuroBertConfig, num_labels: int):
        super().__init__()
        self.pooling = config.classifier_pooling
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, num_labels)

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[B, C]`"""
        if self.pooling == "late":
            return mean_tokens(self._logits(hidden_states), layout)  # [T, C] -> [B, C]
        pool = first_tokens if self.pooling == "bos" else mean_tokens
        return self._logits(pool(hidden_states, layout))  # [B, H] -> [B, C]

    def _logits(self, x: Tensor) -> Tensor:
        return self.classifier(F.gelu(self.dense(x)))  # [..., C]


class EuroBertMaskedLM(nn.Module):
    """The word embeddings as the output matrix (tied), without a layer before; a bias where products have biases."""

    def __init__(self, config: EuroBertConfig):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.mlp_bias else None

    def forward(self, hidden_states: Tensor, word_embeddings: Tensor) -> Tensor:
        """Hidden states of masked tokens `[M, H]` and the embedding table `[V, H]` -> logits `[M, V]`."""
        return F.linear(hidden_states, word_embeddings, self.bias)  # [M, V]

    def transform(self, hidden_states: Tensor) -> Tensor:
        """Return the vectors that the output matrix multiplies: `[M, H]` -> `[M, H]`."""
        return hidden_states


EUROBERT = replace(
    BERT,
    config=EuroBertConfig,
    encoder=EuroBert,
    architecture="EuroBert",
    prefix="model.",
    encoder_names=LLAMA_NAMES,
    heads={
        "classification": {"dense": "dense", "classifier": "classifier"},
        "ner": {"classifier": "classifier"},
        "qa": {"qa_outputs": "qa_outputs"},
    },
    make_heads={"classification": EuroBertSequenceClassification, "masked_lm": EuroBertMaskedLM},
    objectives={"masked_lm": "lm_head"},
    mask_rate=0.5,
    decoder="lm_head",
    tokenizer="byte-level BPE",
    special_tokens={
        "cls": "<|begin_of_text|>",
        "sep": "<|end_of_text|>",
        "mask": "<|mask|>",
        "pad": "<|pad|>",
    },
    frame=(
        "<|begin_of_text|> $A <|end_of_text|>",
        "<|begin_of_text|> $A <|end_of_text|> $B <|end_of_text|>",
    ),
)
