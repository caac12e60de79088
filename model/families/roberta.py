"""RoBERTa (Liu et al. 2019), and XLM-R and CamemBERT, which are RoBERTa with other training texts and vocabularies.

The encoder is BERT with other embeddings: one segment, and positions that begin after the padding token's id, as in
fairseq. The tokenizer is byte-level BPE (RoBERTa) or a unigram model (the others). Pretraining masks tokens anew in
each epoch, and has no next-sentence prediction.

Shapes as in `model/bert.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from model.bert import Bert
from model.bert import Embeddings as BertEmbeddings
from model.config import BertConfig
from model.families.bert_names import BERT


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """Defaults are the values of `roberta-base`."""

    model_type: ClassVar[str] = "roberta"
    absent: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    }

    vocab_size: int = 50265
    max_position_embeddings: int = 514
    type_vocab_size: int = 1
    layer_norm_eps: float = 1e-5
    pad_token_id: int = 1

    @property
    def first_position(self) -> int:
        """The row of the position table for a sequence's first token."""
        return self.pad_token_id + 1

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings - self.first_position


def position_rows(input_ids: Tensor, position_ids: Tensor, first: int) -> Tensor:
    """Return the row of the position table for each token, `[T]`.

    first: the row of a sequence's first token
    A padding token in a text has the row before, and later tokens do not count it, as in transformers.
    """
    padding = (input_ids == first - 1).to(position_ids.dtype)  # [T]
    before = torch.cumsum(padding, 0) - padding  # [T] padding tokens before each token
    places = torch.arange(input_ids.shape[0], device=input_ids.device)  # [T]
    counted = position_ids - before + before.index_select(0, places - position_ids)  # [T]
    return first + counted - padding * (counted + 1)


class RobertaEmbeddings(BertEmbeddings):
    """BERT's embeddings with one segment or none, and without the first positions."""

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.first_position = config.first_position

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        rows = position_rows(input_ids, position_ids, self.first_position)  # [T]
        return super().forward(input_ids, torch.zeros_like(token_type_ids), rows)  # [T, H]


class Roberta(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = RobertaEmbeddings


ROBERTA = replace(
    BERT,
    config=RobertaConfig,
    encoder=Roberta,
    architecture="Roberta",
    prefix="roberta.",
    heads=BERT.heads
    | {"classification": {"pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}},
    objectives={
        "masked_lm": "lm_head",
        "masked_lm.dense": "lm_head.dense",
        "masked_lm.norm": "lm_head.layer_norm",
    },
    decoder="lm_head.decoder",
    tokenizer="byte-level BPE",
    special_tokens={
        "cls": "<s>",
        "pad": "<pad>",
        "sep": "</s>",
        "unk": "<unk>",
        "mask": "<mask>",
        "bos": "<s>",
        "eos": "</s>",
    },
    frame=("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
)


@dataclass(frozen=True)
class XlmRobertaConfig(RobertaConfig):
    """Defaults are the values of `xlm-roberta-base`."""

    model_type: ClassVar[str] = "xlm-roberta"
    absent: ClassVar[Mapping[str, Any]] = {**RobertaConfig.absent, "vocab_size": 30522}

    vocab_size: int = 250002


@dataclass(frozen=True)
class CamembertConfig(RobertaConfig):
    """Defaults are the values of `camembert-base`."""

    model_type: ClassVar[str] = "camembert"
    absent: ClassVar[Mapping[str, Any]] = {**RobertaConfig.absent, "vocab_size": 30522}

    vocab_size: int = 32005


XLM_ROBERTA = replace(
    ROBERTA, config=XlmRobertaConfig, architecture="XLMRoberta", tokenizer="unigram"
)
CAMEMBERT = replace(ROBERTA, config=CamembertConfig, architecture="Camembert", tokenizer="unigram")
