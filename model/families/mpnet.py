"""MPNet (Song et al. 2020): RoBERTa without segments, and with relative positions in attention.

Each distance between two tokens has a bucket: exact for near tokens, on a logarithmic scale for far ones (as in T5,
Raffel et al. 2020). A bucket has one learned bias of the scores for each head, the same in all layers.

Shapes as in `model/bert.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from model.attention import PackedLayout, count_slots
from model.bert import Bert
from model.families.roberta import ROBERTA, RobertaConfig, RobertaEmbeddings
from service.core import packing

FARTHEST = 128  # tokens; all larger distances share a bucket


@dataclass(frozen=True)
class MPNetConfig(RobertaConfig):
    """Defaults are the values of `microsoft/mpnet-base`."""

    model_type: ClassVar[str] = "mpnet"
    absent: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 512, "layer_norm_eps": 1e-12}

    vocab_size: int = 30527
    type_vocab_size: int = 0
    relative_attention_num_buckets: int = 32

    @property
    def first_position(self) -> int:
        return 2  # for any padding token's id


class MPNet(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = RobertaEmbeddings

    def __init__(self, config: MPNetConfig, pooler: bool = True):
        super().__init__(config, pooler)
        buckets = config.relative_attention_num_buckets
        self.distances = nn.Embedding(buckets, config.num_attention_heads)
        self.init_weights(self.distances)
        self.longest = packing.round_up(config.max_length, packing.SLOT_MULTIPLE)
        away = torch.arange(-self.longest, self.longest + 1)
        # A table, because another runtime's logarithm may give another bucket.
        self.register_buffer("buckets", bucket(away, buckets), persistent=False)

    def shared_inputs(self, position_ids: Tensor, layout: PackedLayout) -> Tensor:
        """The bias of the attention scores, `[1, N, S, S]`."""
        places = torch.arange(count_slots(layout), device=self.buckets.device)  # [S]
        buckets = self.buckets[places[None, :] - places[:, None] + self.longest]  # [S, S]
        return self.distances(buckets).permute(2, 0, 1)[None]  # [1, N, S, S]


def bucket(distance: Tensor, count: int) -> Tensor:
    """Return the bucket of a key `distance` tokens after the query: a half for each side, half of each exact."""
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
    encoder_names={
        **ROBERTA.encoder_names,
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
