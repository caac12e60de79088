"""What descendants of Llama (Touvron et al. 2023) share: RMS norms, rotary positions, and grouped attention.

Shapes as in `model/bert.py`; K heads of keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from model.attention import FULL, Mask, PackedLayout
from model.bert import Bert
from model.config import BertConfig
from model.families.modernbert import (
    ModernBertFeedForward,
    ModernBertSelfAttention,
    Rotation,
    read_theta,
    rotation,
)


@dataclass(frozen=True)
class LlamaConfig(BertConfig):
    """The fields of Llama's descendants. head_dim: D, by default H / N; num_key_value_heads: K, by default N"""

    words: ClassVar[Mapping[str, str | None]] = {
        "hidden_dropout_prob": None,
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "rms_norm_eps",
        "type_vocab_size": None,
    }
    activations: ClassVar[tuple[str, ...]] = ("silu",)

    hidden_act: str = "silu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (
            ("num_key_value_heads", self.num_attention_heads),
            ("head_dim", self.hidden_size // self.num_attention_heads),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.num_attention_heads % self.num_key_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of"
                f" num_key_value_heads {self.num_key_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_dim {self.head_size} is odd: rotary positions need pairs")

    @property
    def head_size(self) -> int:
        assert self.head_dim is not None
        return self.head_dim

    @property
    def num_key_heads(self) -> int:
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    def mask_of(self, layer: int) -> Mask:
        """Return the keys that a layer's queries attend to."""
        return FULL

    def theta_of(self, layer: int) -> float:
        return self.rope_theta

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return super().from_dict(
            {**config, "rope_theta": read_theta(rope, config.get("rope_theta"))}
        )

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        del fields["position_embedding_type"]
        rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
        return {**fields, "rope_parameters": rope}


class RMSNorm(nn.Module):
    """Divide each row by its root mean square, and multiply by weights: `[..., W]` -> `[..., W]`."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))  # [W]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.float().square().mean(dim=-1, keepdim=True)  # [..., 1]
        scaled = x.float() * torch.rsqrt(mean_square + self.eps)  # [..., W]
        return self.weight * scaled.to(x.dtype)  # [..., W]


class WordEmbeddings(nn.Module):
    """Token embeddings alone: `[T]` -> `[T, H]`. Attention adds positions."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)  # [V, H]

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.word(input_ids)  # [T, H]


class LlamaLayer(nn.Module):
    """One layer, pre-norm: each half reads the normalized residual stream, and adds to it."""

    make_norm: type[nn.Module] = RMSNorm
    make_attention: type[nn.Module] = ModernBertSelfAttention

    def __init__(self, config: LlamaConfig, index: int):
        super().__init__()
        self.attention_norm = self.make_norm(config.hidden_size, config.layer_norm_eps)
        self.attention = self.make_attention(config, config.mask_of(index))
        self.feed_forward_norm = self.make_norm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = ModernBertFeedForward(config)

    def forward(self, x: Tensor, layout: PackedLayout, by: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), layout, by)  # [T, H]
        return x + self.feed_forward(self.feed_forward_norm(x))  # [T, H]


class Llama(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = WordEmbeddings
    make_layer = LlamaLayer
    make_norm: type[nn.Module] = RMSNorm
    has_pooler = False

    def __init__(self, config: LlamaConfig, pooler: bool = True):
        super().__init__(config, pooler)
        self.norm = self.make_norm(config.hidden_size, config.layer_norm_eps)

    def make_layers(self, config: LlamaConfig) -> nn.ModuleList:
        return nn.ModuleList(self.make_layer(config, i) for i in range(config.num_hidden_layers))

    def shared_inputs(self, position_ids: Tensor, layout: PackedLayout) -> Rotation:
        """The rotations of all positions."""
        return rotation(position_ids, self.config.head_size, self.config.rope_theta)

    def forward(self, *inputs: Any) -> Tensor:
        return self.norm(super().forward(*inputs))  # [T, H]


LLAMA_NAMES = {
    r"embeddings\.word": ["embed_tokens"],
    r"layers\.(\d+)\.attention_norm": [r"layers.\1.input_layernorm"],
    r"layers\.(\d+)\.attention\.qkv": [rf"layers.\1.self_attn.{part}_proj" for part in "qkv"],
    r"layers\.(\d+)\.attention\.output": [r"layers.\1.self_attn.o_proj"],
    r"layers\.(\d+)\.feed_forward_norm": [r"layers.\1.post_attention_layernorm"],
    r"layers\.(\d+)\.feed_forward\.up": [r"layers.\1.mlp.gate_proj", r"layers.\1.mlp.up_proj"],
    r"layers\.(\d+)\.feed_forward\.down": [r"layers.\1.mlp.down_proj"],
    r"norm": ["norm"],
}
