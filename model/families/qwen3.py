"""Qwen3 (Yang et al. 2025) as an encoder: a decoder, whose last token has read the whole text.

Differences from EuroBERT: a token attends to itself and to earlier tokens only, queries and keys of each head are
normalized before the rotation, heads may have another size than H / N, and classifiers read the last token. Later
layers may have a window (`use_sliding_window`).

Shapes as in `model/bert.py`; K heads of keys and values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from model.attention import Mask, PackedLayout, real_slots
from model.families.llama import LLAMA_NAMES, Llama, LlamaConfig, LlamaLayer, RMSNorm
from model.families.modernbert import GLOBAL, LOCAL, ModernBertSelfAttention, Rotation, rotate
from model.families.spec import Family

NO_TOKEN = -1  # pad_token_id where config.json has none


@dataclass(frozen=True)
class DecoderConfig(LlamaConfig):
    """The fields of decoders, whose layers may be local.

    pad_token_id: a token that classifiers do not read as the last one
    sliding_window: the tokens that a local layer's token attends to, itself included
    layer_types: GLOBAL or LOCAL for each layer; all are global by default
    """

    words: ClassVar[Mapping[str, str | None]] = {**LlamaConfig.words, "mlp_bias": None}

    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        types = tuple(self.layer_types) or (GLOBAL,) * self.num_hidden_layers
        object.__setattr__(self, "layer_types", types)
        if len(types) != self.num_hidden_layers or not {*types} <= {GLOBAL, LOCAL}:
            raise ValueError(f"layer_types: one of {GLOBAL}, {LOCAL} for each layer, not {types}")
        if LOCAL in types and not self.sliding_window:
            raise ValueError(f"layer_types: {LOCAL} needs sliding_window")

    def mask_of(self, layer: int) -> Mask:
        is_local = self.layer_types[layer] == LOCAL and self.sliding_window
        return Mask(causal=True, reach=self.sliding_window - 1 if is_local else None)

    def keeping(self, layers: Sequence[int]) -> Self:
        types = tuple(self.layer_types[layer] for layer in layers)
        return replace(self, num_hidden_layers=len(layers), layer_types=types)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "layer_types": [*self.layer_types]}


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Defaults are the values of transformers, which are the shape of no released checkpoint."""

    model_type: ClassVar[str] = "qwen3"
    absent: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32, "head_dim": 128}

    vocab_size: int = 151936
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    intermediate_size: int = 22016
    max_position_embeddings: int = 32768
    pad_token_id: int = NO_TOKEN
    use_sliding_window: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if LOCAL in self.layer_types and not self.use_sliding_window:
            raise ValueError(f"layer_types: {LOCAL} needs use_sliding_window")

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read `config.json`, in which `max_window_layers` may stand for `layer_types`."""
        fields = dict(config)
        if fields.get("use_sliding_window") and not fields.get("layer_types"):
            window = fields.get("sliding_window", 4096)
            layers = range(fields.get("num_hidden_layers") or cls.num_hidden_layers)
            first = fields.get("max_window_layers", 28) if window else len(layers)
            fields["sliding_window"] = window
            fields["layer_types"] = tuple(LOCAL if i >= first else GLOBAL for i in layers)
        return super().from_dict(fields)

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        if self.pad_token_id == NO_TOKEN:
            del fields["pad_token_id"]
        return fields


class Qwen3SelfAttention(ModernBertSelfAttention):
    """Multi-head self-attention whose queries and keys are normalized by head, then rotated."""

    make_norm: type[nn.Module] = RMSNorm

    def __init__(self, config: Qwen3Config, mask: Mask):
        super().__init__(config, mask)
        self.query_norm = self.make_norm(config.head_size, config.layer_norm_eps)
        self.key_norm = self.make_norm(config.head_size, config.layer_norm_eps)

    def forward(self, x: Tensor, layout: PackedLayout, by: Rotation) -> Tensor:
        q, k, v = self.qkv(x).split(self.qkv.widths, dim=-1)  # [T, ND], [T, KD], [T, KD]
        q = rotate(self.query_norm(q.unflatten(-1, (-1, self.head_size))), by)  # [T, N, D]
        k = rotate(self.key_norm(k.unflatten(-1, (-1, self.head_size))), by)  # [T, K, D]
        context = self.attend(q.flatten(1), k.flatten(1), v, layout)  # [T, ND]
        return self.output(context)  # [T, H]


class Qwen3Layer(LlamaLayer):
    make_attention = Qwen3SelfAttention


class Qwen3(Llama):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_layer = Qwen3Layer


# -- heads ------------------------------------------------------------------------------------------------------------


class LastTokenClassification(nn.Module):
    """Logits per text or pair, of the last token that is not padding, as a text or its template may end with one."""

    reads_ids = True

    def __init__(self, config: Qwen3Config, num_labels: int):
        super().__init__()
        self.pad = config.pad_token_id
        self.score = nn.Linear(config.hidden_size, num_labels, bias=False)

    def forward(self, hidden_states: Tensor, layout: PackedLayout, input_ids: Tensor) -> Tensor:
        """`[T, H]` and `[T]` -> `[B, C]`"""
        words = real_slots(layout) & (input_ids[layout.unpack] != self.pad)  # [B, S]
        places = torch.arange(words.shape[1], device=words.device)  # [S]
        last = (places * words).argmax(dim=1, keepdim=True)  # [B, 1]
        tokens = layout.unpack.gather(1, last)[:, 0]  # [B]
        return self.score(hidden_states.index_select(0, tokens))  # [B, C]


class DecoderTokenClassification(nn.Module):
    """Logits per token, each from the tokens up to it."""

    def __init__(self, config: Qwen3Config, num_labels: int):
        super().__init__()
        self.score = nn.Linear(config.hidden_size, num_labels)

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[T, C]`"""
        return self.score(hidden_states)  # [T, C]


END = "<|endoftext|>"

QWEN3 = Family(
    config=Qwen3Config,
    encoder=Qwen3,
    architecture="Qwen3",
    prefix="model.",
    encoder_names={
        r"layers\.(\d+)\.attention\.query_norm": [r"layers.\1.self_attn.q_norm"],
        r"layers\.(\d+)\.attention\.key_norm": [r"layers.\1.self_attn.k_norm"],
        **LLAMA_NAMES,
    },
    heads={
        "classification": {"score": "score"},
        "ner": {"score": "score"},
        "qa": {"qa_outputs": "qa_outputs"},
    },
    make_heads={"classification": LastTokenClassification, "ner": DecoderTokenClassification},
    decoder="lm_head",
    tokenizer="byte-level BPE",
    special_tokens={"pad": END, "sep": END},
    frame=(f"$A {END}", f"$A $B {END}"),
)
