"""ELECTRA (Clark et al. 2020): BERT with narrower embeddings, taught to tell replaced tokens from real ones.

A small generator, a masked language model, fills in blanks; the encoder that is kept says of each token whether the
generator put it there. So it learns from every token and not only from the few that were masked.

T tokens, H hidden, E embedding
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from model.bert import BERT, Bert
from model.bert import Embeddings as BertEmbeddings
from model.config import BertConfig
from model.roberta import ROBERTA


@dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """Defaults are those of `google/electra-small-discriminator`."""

    model_type: ClassVar[str] = "electra"

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024

    @property
    def embedding_width(self) -> int:
        return self.embedding_size


class Embeddings(BertEmbeddings):
    """BERT's, E wide, and brought to H where that differs."""

    def __init__(self, config: ElectraConfig):
        super().__init__(config)
        differ = config.embedding_size != config.hidden_size
        self.project = (
            nn.Linear(config.embedding_size, config.hidden_size) if differ else nn.Identity()
        )

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.project(super().forward(input_ids, token_type_ids, position_ids))  # [T, H]


class Electra(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = Embeddings
    has_pooler = False


ELECTRA = replace(
    BERT,
    config=ElectraConfig,
    encoder=Electra,
    architecture="Electra",
    prefix="electra.",
    trunk={**BERT.trunk, r"embeddings\.project": ["embeddings_project"]},
    heads=ROBERTA.heads,
    objectives={
        "masked_lm": "generator_lm_head",
        "masked_lm.dense": "generator_predictions.dense",
        "masked_lm.norm": "generator_predictions.LayerNorm",
    },
    decoder="generator_lm_head",
    activation=F.gelu,
)
