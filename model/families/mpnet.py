"""MPNet (Song et al. 2020): RoBERTa without segments, whose attention also knows how far apart two tokens are.

The distance is put into a bucket, exact when near and on a logarithmic scale when far (as in T5, Raffel et al. 2020),
and each bucket adds a number of its own to every head's scores, the same in all layers.

T tokens, H hidden, N heads, S longest sequence
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from model.attention import AnyLayout, count_slots
from model.bert import Bert
from model.families.distilbert import DistilBertEmbeddings as DistilBertEmbeddings
from model.families.roberta import ROBERTA, RobertaConfig

FARTHEST = 128  # tokens; beyond it all is equally far


@dataclass(frozen=True)
class MPNetConfig(RobertaConfig):
    """Defaults are those of `microsoft/mpnet-base`."""

    model_type: ClassVar[str] = "mpnet"
    absent: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 512, "layer_norm_eps": 1e-12}

    vocab_size: int = 30527
    type_vocab_size: int = 0
    relative_attention_num_buckets: int = 32

    @property
    def first_position(self) -> int:
        return 2  # whatever the padding token's id


class MPNetEmbeddings(DistilBertEmbeddings):
    """Token + position, normalised; the first positions are left out, as in RoBERTa."""

    def __init__(self, config: MPNetConfig):
        super().__init__(config)
        self.first_position = config.first_position

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        positions = position_ids + self.first_position
        return super().forward(input_ids, token_type_ids, positions)  # [T, H]


class MPNet(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = MPNetEmbeddings

    def __init__(self, config: MPNetConfig, pooler: bool = True):
        super().__init__(config, pooler)
        buckets = config.relative_attention_num_buckets
        self.distances = nn.Embedding(buckets, config.num_attention_heads)
        self.init_weights(self.distances)
        self.longest = config.max_length
        away = torch.arange(-self.longest, self.longest + 1)
        # Looked up and not computed, for another runtime's logarithm may fall into another bucket.
        self.register_buffer("buckets", bucket(away, buckets), persistent=False)

    def shared(self, position_ids: Tensor, layout: AnyLayout) -> Tensor:
        places = torch.arange(count_slots(layout), device=self.buckets.device)
        buckets = self.buckets[places[None, :] - places[:, None] + self.longest]
        return self.distances(buckets).permute(2, 0, 1)[None]  # [1, N, S, S]


def bucket(distance: Tensor, count: int) -> Tensor:
    """Which of `count` buckets a key is in that stands `distance` tokens after the query.

    Half of them are for keys before (and at) the query, half for those after it; half of each are exact.
    """
    half, exact = count // 2, count // 4
    far = distance.abs()
    scale = (half - exact) / math.log(FARTHEST / exact)
    steps = torch.log(far.clamp(min=1).float() / exact) * scale
    coarse = (exact + steps.to(torch.int64)).clamp(max=half - 1)
    return torch.where(far < exact, far, coarse) + half * (distance > 0)


MPNET = replace(
    ROBERTA,
    config=MPNetConfig,
    encoder=MPNet,
    architecture="MPNet",
    tokenizer="wordpiece",
    prefix="mpnet.",
    trunk={
        **ROBERTA.trunk,
        r"distances": ["encoder.relative_attention_bias"],
        r"layers\.(\d+)\.attention\.qkv": [
            r"encoder.layer.\1.attention.attn.q",
            r"encoder.layer.\1.attention.attn.k",
            r"encoder.layer.\1.attention.attn.v",
        ],
        r"layers\.(\d+)\.attention\.output": [r"encoder.layer.\1.attention.attn.o"],
        r"layers\.(\d+)\.attention_norm": [r"encoder.layer.\1.attention.LayerNorm"],
    },
)
