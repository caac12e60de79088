"""GTE (Zhang et al. 2024): BERT with rotary positions and a gated feed-forward, for embeddings of up to 8,192 tokens.

Post-norm and segments as in BERT; rotary positions as in ModernBERT, with frequencies that may be divided, to reach
further than the pretraining did. `config.json` names the family `gte`, as transformers does, or `new`, as the original
code does.

Shapes as in `model/bert.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from model.attention import PackedLayout
from model.bert import Bert, Embeddings, Layer
from model.config import BertConfig
from model.families.modernbert import (
    ModernBertFeedForward,
    ModernBertSelfAttention,
    Rotation,
    read_theta,
    rotation,
)
from model.families.roberta import XLM_ROBERTA

# The original code's values of fields that `config.json` lacks.
ORIGINAL = {"vocab_size": 30528, "max_position_embeddings": 2048, "rope_theta": 10_000.0}
# Settings of the original code whose other values are not implemented.
REQUIRED: dict[str, Any] = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
}


@dataclass(frozen=True)
class GteConfig(BertConfig):
    """Defaults are transformers' values.

    rope_theta: base of the RoPE frequencies
    rope_factor: divisor of the RoPE frequencies
    """

    model_type: ClassVar[str] = "gte"
    words: ClassVar[Mapping[str, str | None]] = {"rope_theta": None, "rope_factor": None}

    vocab_size: int = 250048
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 8192
    type_vocab_size: int = 1
    pad_token_id: int = 1
    rope_theta: float = 160_000.0
    rope_factor: float = 1.0

    # Settings of ModernBERT that are fixed here.
    attention_bias: ClassVar[bool] = True
    mlp_bias: ClassVar[bool] = False

    def theta_of(self, layer: int) -> float:
        return self.rope_theta

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read `config.json` with the names of transformers or of the original code. Raises ValueError."""
        fields = {name: value for name, value in config.items() if value is not None}
        if fields.get("model_type") == "new":
            fields = {**ORIGINAL, **fields, "model_type": cls.model_type}
        for name, value in REQUIRED.items():
            if fields.get(name, value) != value:
                raise ValueError(f"{name} {fields[name]!r} is not {value!r}")
        read = super().from_dict(fields)
        if fields.get("head_dim") not in (None, read.head_size):
            raise ValueError(f"head_dim {fields['head_dim']!r} is not {read.head_size}")
        rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        theta, factor = read_rope(rope, fields.get("rope_theta", cls.rope_theta), read.head_size)
        return replace(read, rope_theta=theta, rope_factor=factor)

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        del fields["position_embedding_type"]
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_factor != 1:
            rope |= {"rope_type": "linear", "factor": self.rope_factor}
        return {**fields, "rope_parameters": rope}


def read_rope(rope: Mapping[str, Any], theta: float, size: int) -> tuple[float, float]:
    """Return base and divisor of the RoPE frequencies of heads of this size. Raises ValueError for unsupported scaling.

    With NTK scaling by a factor f, the slowest frequency is divided by f and the others by less (Su 2023): this equals
    a base times f and a divisor of f^(2 / D).
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("linear", "ntk"):
        return read_theta(rope, theta) or theta, 1.0
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 1 <= factor < inf:
        raise ValueError(
            f"rope_parameters (or rope_scaling): factor = {factor!r} must be a number from 1"
        )
    rest = {name: rope[name] for name in rope.keys() - {"rope_type", "type", "factor"}}
    theta = read_theta({n: value for n, value in rest.items() if value is not None}, theta) or theta
    return (theta, factor) if kind == "linear" else (theta * factor, factor ** (2 / size))


class GteEmbeddings(Embeddings):
    """Token + segment, normalized; all tokens have the first segment if there is only one. Attention adds positions."""

    has_positions = False

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """`[T]` each -> `[T, H]`."""
        if self.token_type is not None and self.token_type.num_embeddings == 1:
            token_type_ids = torch.zeros_like(token_type_ids)  # [T]
        return super().forward(input_ids, token_type_ids, position_ids)  # [T, H]


class GteFeedForward(ModernBertFeedForward):
    """ModernBERT's gated feed-forward, with a bias after it, and the halves of the wide layer in the other order."""

    def __init__(self, config: GteConfig):
        super().__init__(config)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)  # weight [H, I]

    def forward(self, x: Tensor) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        value, gate = self.up(x).chunk(2, dim=-1)  # [T, I] each
        return self.down(self.dropout(self.activation(gate) * value))  # [T, H]


class GteLayer(Layer):
    make_attention = ModernBertSelfAttention
    make_feed_forward = GteFeedForward


class Gte(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = GteEmbeddings
    make_layer = GteLayer

    def shared_inputs(self, position_ids: Tensor, layout: PackedLayout) -> Rotation:
        """The rotations of all positions."""
        config = self.config
        return rotation(position_ids, config.head_size, config.rope_theta, config.rope_factor)


LAYER = r"encoder.layer.\1"
OF_TOKENS = {"classifier": "classifier"}

GTE = replace(
    XLM_ROBERTA,
    config=GteConfig,
    encoder=Gte,
    architecture="Gte",
    mask_rate=0.3,
    prefix="gte.",
    encoder_names={
        r"embeddings\.word": ["embeddings.word_embeddings"],
        r"embeddings\.token_type": ["embeddings.token_type_embeddings"],
        r"embeddings\.norm": ["embeddings.LayerNorm"],
        r"layers\.(\d+)\.attention\.qkv": [f"{LAYER}.attention.qkv_proj"],
        r"layers\.(\d+)\.attention\.output": [f"{LAYER}.attention.o_proj"],
        r"layers\.(\d+)\.attention_norm": [f"{LAYER}.attn_ln"],
        r"layers\.(\d+)\.feed_forward\.up": [f"{LAYER}.mlp.up_gate_proj"],
        r"layers\.(\d+)\.feed_forward\.down": [f"{LAYER}.mlp.down_proj"],
        r"layers\.(\d+)\.feed_forward_norm": [f"{LAYER}.mlp_ln"],
        r"pooler\.dense": ["pooler.dense"],
    },
    heads={
        "classification": {"pooler.dense": "gte.pooler.dense", **OF_TOKENS},
        "ner": OF_TOKENS,
        "qa": {"qa_outputs": "qa_outputs"},
    },
    objectives={
        "masked_lm": "lm_head.decoder",
        "masked_lm.dense": "lm_head.dense",
        "masked_lm.norm": "lm_head.norm",
    },
)
