"""Gemma 3 (Gemma Team 2025) and EmbeddingGemma (Vera et al. 2025): a decoder, or with attention in both directions.

Differences from Qwen3: norms multiply by 1 + weight, and each half of a layer has a second norm before its sum. The
embeddings are multiplied by sqrt(H), and scores by 1 / sqrt(query_pre_attn_scalar). Five of six layers are local, with
frequencies of their own. With `use_bidirectional_attention`, tokens attend to later ones, too.

Shapes as in `model/bert.py`; K heads of keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from model.attention import Mask, PackedLayout, ScaledDotProductAttention
from model.families.llama import LlamaLayer, RMSNorm, WordEmbeddings
from model.families.modernbert import GLOBAL, LOCAL, Rotation, read_theta, rotation
from model.families.qwen3 import QWEN3, DecoderConfig, Qwen3, Qwen3SelfAttention

PATTERN = 6  # every sixth layer is global by default


@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """Defaults are the values of transformers.

    sliding_window: as in Qwen3, but twice the reach of a local layer where attention has both directions
    rope_theta, local_rope_theta: bases of the RoPE frequencies of global and local layers
    """

    model_type: ClassVar[str] = "gemma3_text"
    words: ClassVar[Mapping[str, str | None]] = {
        **DecoderConfig.words,
        "hidden_act": "hidden_activation",
        "local_rope_theta": "rope_local_base_freq",
    }
    activations: ClassVar[tuple[str, ...]] = ("gelu_pytorch_tanh",)
    absent: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4, "head_dim": 256}

    vocab_size: int = 262208
    hidden_size: int = 2304
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    intermediate_size: int = 9216
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = 4096
    use_bidirectional_attention: bool = False
    rope_theta: float = 1_000_000.0
    local_rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", _layer_types(self.num_hidden_layers, PATTERN))
        super().__post_init__()

    def mask_of(self, layer: int) -> Mask:
        if not self.use_bidirectional_attention:
            return super().mask_of(layer)
        is_local = self.layer_types[layer] == LOCAL and self.sliding_window
        return Mask(reach=self.sliding_window // 2 if is_local else None)

    def theta_of(self, layer: int) -> float:
        return self.thetas[self.layer_types[layer]]

    @property
    def thetas(self) -> Mapping[str, float]:
        """Return the RoPE bases by the kind of layer."""
        return {GLOBAL: self.rope_theta, LOCAL: self.local_rope_theta}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read a hub `config.json`, with current names or with the names of the first release."""
        fields = dict(config)
        ropes = fields.pop("rope_parameters", None) or {}
        if unknown := sorted(ropes.keys() - {GLOBAL, LOCAL}):
            raise ValueError(f"rope_parameters: {unknown[0]!r} is none of {GLOBAL}, {LOCAL}")
        for kind, field in ((GLOBAL, "rope_theta"), (LOCAL, "rope_local_base_freq")):
            fields[field] = read_theta(ropes.get(kind) or {}, fields.get(field))
        if fields.get("sliding_window_pattern") and not fields.get("layer_types"):
            layers = fields.get("num_hidden_layers") or cls.num_hidden_layers
            fields["layer_types"] = _layer_types(layers, fields["sliding_window_pattern"])
        return super().from_dict(fields)

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        del fields["rope_local_base_freq"]
        ropes = {kind: {"rope_type": "default", "rope_theta": t} for kind, t in self.thetas.items()}
        return {**fields, "rope_parameters": ropes}


def _layer_types(layers: int, pattern: int) -> tuple[str, ...]:
    return tuple(LOCAL if (i + 1) % pattern else GLOBAL for i in range(layers))


class GemmaNorm(RMSNorm):
    """Divide each row by its root mean square, and multiply by 1 + weights: `[..., W]` -> `[..., W]`."""

    def __init__(self, width: int, eps: float):
        super().__init__(width, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.float().square().mean(dim=-1, keepdim=True)  # [..., 1]
        scaled = x.float() * torch.rsqrt(mean_square + self.eps)  # [..., W]
        return (scaled * (1 + self.weight.float())).to(x.dtype)  # [..., W]


class GemmaEmbeddings(WordEmbeddings):
    """Token embeddings times sqrt(H): `[T]` -> `[T, H]`."""

    def __init__(self, config: Gemma3Config):
        super().__init__(config)
        self.scale = config.hidden_size**0.5

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*inputs) * self.scale  # [T, H]


class GemmaSelfAttention(Qwen3SelfAttention):
    make_norm = GemmaNorm

    def __init__(self, config: Gemma3Config, mask: Mask):
        super().__init__(config, mask)
        self.attend = ScaledDotProductAttention(config, mask, config.query_pre_attn_scalar**-0.5)


class GemmaLayer(LlamaLayer):
    """One layer, with a norm before and after each half, which adds to the residual stream."""

    make_norm = GemmaNorm
    make_attention = GemmaSelfAttention

    def __init__(self, config: Gemma3Config, index: int):
        super().__init__(config, index)
        self.kind = config.layer_types[index]
        self.attention_output_norm = GemmaNorm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward_output_norm = GemmaNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, layout: PackedLayout, by: Mapping[str, Rotation]) -> Tensor:
        attended = self.attention(self.attention_norm(x), layout, by[self.kind])  # [T, H]
        x = x + self.attention_output_norm(attended)  # [T, H]
        return x + self.feed_forward_output_norm(self.feed_forward(self.feed_forward_norm(x)))


class Gemma3(Qwen3):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = GemmaEmbeddings
    make_layer = GemmaLayer
    make_norm = GemmaNorm

    def shared_inputs(self, position_ids: Tensor, layout: PackedLayout) -> dict[str, Rotation]:
        """The rotations of all positions, by the kind of layer."""
        size, thetas = self.config.head_size, self.config.thetas
        return {kind: rotation(position_ids, size, theta) for kind, theta in thetas.items()}


LAYER = r"layers\.(\d+)"

GEMMA3 = replace(
    QWEN3,
    config=Gemma3Config,
    encoder=Gemma3,
    architecture="Gemma3Text",
    encoder_names={
        rf"{LAYER}\.attention_output_norm": [r"layers.\1.post_attention_layernorm"],
        rf"{LAYER}\.feed_forward_norm": [r"layers.\1.pre_feedforward_layernorm"],
        rf"{LAYER}\.feed_forward_output_norm": [r"layers.\1.post_feedforward_layernorm"],
        **{
            ours: theirs
            for ours, theirs in QWEN3.encoder_names.items()
            if "feed_forward_norm" not in ours
        },
    },
    tokenizer="unigram",
    special_tokens={"pad": "<pad>", "sep": "<eos>", "cls": "<bos>", "unk": "<unk>"},
    frame=("<bos> $A <eos>", "<bos> $A <eos> <bos> $B <eos>"),
    fits_half=False,
)
