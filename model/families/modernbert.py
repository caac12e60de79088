"""ModernBERT (Warner et al. 2024): BERT with current techniques, and up to 8,192 tokens.

Pre-norm, no biases, a gated feed-forward, and rotary positions (RoPE, Su et al. 2021) instead of a table. Every third
layer has global attention, the others have local attention within a window.

Shapes as in `model/bert.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from model.attention import FULL, Mask, PackedLayout, ScaledDotProductAttention
from model.bert import ACTIVATIONS, Bert, Projections
from model.config import BertConfig
from model.families.bert_names import BERT
from model.pooling import first_tokens, mean_tokens

GLOBAL, LOCAL = "full_attention", "sliding_attention"
CUTOFF = 2  # standard deviations, at which initial weights are truncated


@dataclass(frozen=True)
class ModernBertConfig(BertConfig):
    """Defaults are the values of `answerdotai/ModernBERT-base`."""

    model_type: ClassVar[str] = "modernbert"
    words: ClassVar[Mapping[str, str | None]] = {
        "hidden_act": "hidden_activation",
        "hidden_dropout_prob": "mlp_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "norm_eps",
    }

    widening: ClassVar[float] = 1.5

    vocab_size: int = 50368
    num_hidden_layers: int = 22
    intermediate_size: int = 1152
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 8192
    type_vocab_size: int = 0  # segments; 0 in all released checkpoints and in transformers
    layer_norm_eps: float = 1e-5
    pad_token_id: int = 50283
    # GLOBAL or LOCAL for each layer; by default every third is global, from the first on.
    layer_types: tuple[str, ...] = ()
    # Width of a local layer's window in tokens, half of it before a token and half after.
    local_attention: int = 128
    # global_rope_theta, local_rope_theta: bases of the RoPE frequencies
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    classifier_pooling: str = "cls"

    def __post_init__(self) -> None:
        super().__post_init__()
        types = self.layer_types or [
            LOCAL if i % 3 else GLOBAL for i in range(self.num_hidden_layers)
        ]
        object.__setattr__(self, "layer_types", tuple(types))
        if len(types) != self.num_hidden_layers or not set(types) <= {GLOBAL, LOCAL}:
            raise ValueError(f"layer_types: one of {GLOBAL}, {LOCAL} for each layer, not {types}")
        if self.classifier_pooling not in POOLED:
            raise ValueError(f"classifier_pooling {self.classifier_pooling!r}: cls or mean")

    def keeping(self, layers: Sequence[int]) -> Self:
        types = tuple(self.layer_types[layer] for layer in layers)
        return replace(self, num_hidden_layers=len(layers), layer_types=types)

    def theta_of(self, layer: int) -> float:
        return self.thetas[self.layer_types[layer]]

    @property
    def thetas(self) -> Mapping[str, float]:
        """Return the RoPE bases by the kind of layer."""
        return {GLOBAL: self.global_rope_theta, LOCAL: self.local_rope_theta}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read a hub `config.json`, with current names or with the names of the first release."""
        named = dict(config)
        every = named.get("global_attn_every_n_layers")
        if every and not named.get("layer_types"):
            layers = range(named.get("num_hidden_layers", cls.num_hidden_layers))
            named["layer_types"] = tuple(LOCAL if i % every else GLOBAL for i in layers)
        ropes = named.get("rope_parameters") or {}
        if unknown := sorted(ropes.keys() - {GLOBAL, LOCAL}):
            raise ValueError(f"rope_parameters: {unknown[0]!r} is none of {GLOBAL}, {LOCAL}")
        for kind, field in ((GLOBAL, "global_rope_theta"), (LOCAL, "local_rope_theta")):
            rope = ropes.get(kind) or {}
            named[field] = read_theta(rope, named.get(field))
        return super().from_dict(named)

    def to_dict(self) -> dict[str, Any]:
        named = super().to_dict()
        del named["position_embedding_type"]
        ropes = {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in self.thetas.items()
        }
        if not self.type_vocab_size:
            del named["type_vocab_size"]
        return {**named, "layer_types": [*self.layer_types], "rope_parameters": ropes}


Rotation = tuple[Tensor, Tensor]  # cosines and sines, each [T, 1, D / 2]


def read_theta(rope: Mapping[str, Any], default: float | None) -> float | None:
    """Return the RoPE base in `rope_parameters`. Raises ValueError for frequencies that depend on the length."""
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters: {rope!r} is no object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_parameters (or rope_scaling): rope_type {kind!r} is not 'default': "
            "rotations that change with the length are not supported"
        )
    if unknown := sorted(rope.keys() - {"rope_type", "type", "rope_theta"}):
        raise ValueError(
            f"rope_parameters (or rope_scaling): {unknown[0]} = {rope[unknown[0]]!r} is not supported"
        )
    return rope.get("rope_theta", default)


def rope_frequencies(
    size: int, theta: float, device: torch.device | None = None, factor: float = 1.0
) -> Tensor:
    """Return the RoPE frequencies / factor, `[D / 2]` radians per token, of each pair of a head's dimensions.

    Python computes them, so that a traced graph has the same ones: the last bit of a frequency is 3e-5 radians after
    500 tokens, which large queries and keys turn into 2e-3 of attention's output.
    """
    frequencies = [theta ** (-place / size) / factor for place in range(0, size, 2)]
    return torch.tensor(frequencies, device=device)


def slow_dimensions(size: int, theta: float, reach: int) -> list[int]:
    """Return the dimensions of a head whose pairs rotate by less than a radian over `reach` tokens."""
    frequencies = rope_frequencies(size, theta).tolist()
    pairs = [pair for pair, frequency in enumerate(frequencies) if frequency * reach < 1]
    return [*pairs, *(pair + size // 2 for pair in pairs)]


def rotation(position_ids: Tensor, size: int, theta: float, factor: float = 1.0) -> Rotation:
    """Return the rotation of each pair of a head's dimensions at each position [T], from fast to slow."""
    frequencies = rope_frequencies(size, theta, position_ids.device, factor)  # [D / 2]
    angles = position_ids[:, None, None].float() * frequencies  # [T, 1, D / 2]
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, by: Rotation) -> Tensor:
    """Rotate heads of queries and keys, so that their products depend on their distance: `[T, heads, D]`."""
    first, second = heads.chunk(2, dim=-1)  # [T, heads, D / 2]
    cosines, sines = (angles.to(heads.dtype) for angles in by)
    rotated = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.cat(rotated, dim=-1)  # [T, heads, D]


class ModernBertEmbeddings(nn.Module):
    """Token and, if configured, segment (zero for the first), normalized. Attention adds positions."""

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = norm(config)
        segments, hidden = config.type_vocab_size, config.hidden_size
        self.token_type = nn.Embedding(segments, hidden, padding_idx=0) if segments else None

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.word(input_ids)  # [T, H]
        if self.token_type is not None:
            x = x + self.token_type(token_type_ids)  # [T, H]
        return self.norm(x)  # [T, H]


def norm(config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.norm_bias)


class ModernBertSelfAttention(nn.Module):
    """Multi-head self-attention with rotary positions."""

    def __init__(self, config: ModernBertConfig, mask: Mask = FULL):
        super().__init__()
        self.head_size = config.head_size
        self.qkv = Projections(config, bias=config.attention_bias)
        self.attend = ScaledDotProductAttention(config, mask)
        self.output = nn.Linear(self.qkv.widths[0], config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, layout: PackedLayout, by: Rotation) -> Tensor:
        queries, keys, values = self.qkv.widths
        qk, v = self.qkv(x).split([queries + keys, values], dim=-1)  # [T, ND + KD], [T, KD]
        heads = rotate(qk.unflatten(-1, (-1, self.head_size)), by)  # [T, N + K, D]
        q, k = heads.flatten(1).split([queries, keys], dim=-1)  # [T, ND], [T, KD]
        context = self.attend(q, k, v, layout)  # [T, ND]
        return self.output(context)  # [T, H]


class ModernBertFeedForward(nn.Module):
    """A gated feed-forward: one half of the wide layer gates the other (GeGLU, Shazeer 2020)."""

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)  # [T, I] each
        return self.down(self.dropout(self.activation(gate) * value))  # [T, H]


class ModernBertLayer(nn.Module):
    """One encoder layer, pre-norm: each half reads the normalized residual stream, and adds to it."""

    def __init__(self, config: ModernBertConfig, index: int):
        super().__init__()
        self.kind = config.layer_types[index]
        # The embeddings' output, which is the first layer's input, is already normalized.
        self.attention_norm = norm(config) if index else nn.Identity()
        mask = FULL if self.kind == GLOBAL else Mask(reach=config.local_attention // 2)
        self.attention = ModernBertSelfAttention(config, mask)
        self.feed_forward_norm = norm(config)
        self.feed_forward = ModernBertFeedForward(config)

    def forward(self, x: Tensor, layout: PackedLayout, by: Mapping[str, Rotation]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), layout, by[self.kind])
        return x + self.feed_forward(self.feed_forward_norm(x))


class ModernBert(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = ModernBertEmbeddings
    has_pooler = False

    def __init__(self, config: ModernBertConfig, pooler: bool = True):
        super().__init__(config, pooler)
        self.norm = norm(config)

    def make_layers(self, config: ModernBertConfig) -> nn.ModuleList:
        return nn.ModuleList(ModernBertLayer(config, i) for i in range(config.num_hidden_layers))

    def init_weights(self, module: nn.Module) -> None:
        """Initialize with a truncated normal, scaled by 1 / sqrt(2 * layers) for outputs to the residual stream."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-CUTOFF * std, b=CUTOFF * std)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0.0
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, ModernBertLayer):
            for projection in (module.attention.output, module.feed_forward.down):
                projection.weight.data /= math.sqrt(2 * self.config.num_hidden_layers)

    def shared_inputs(self, position_ids: Tensor, layout: PackedLayout) -> dict[str, Rotation]:
        """The rotations of all positions, by the kind of layer."""
        size, thetas = self.config.head_size, self.config.thetas
        return {kind: rotation(position_ids, size, theta) for kind, theta in thetas.items()}

    def forward(self, *inputs: Any) -> Tensor:
        return self.norm(super().forward(*inputs))  # [T, H]


# -- heads ------------------------------------------------------------------------------------------------------------

POOLED = {"cls": first_tokens, "mean": mean_tokens}


class Transform(nn.Module):
    """Dense, GELU, norm, before every classifier: `[..., H]` -> `[..., H]`."""

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.norm = norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(nn.functional.gelu(self.dense(x)))


class ModernBertTokenClassification(nn.Module):
    """Logits per token; two labels for the start and end of an answer."""

    def __init__(self, config: ModernBertConfig, num_labels: int = 2):
        super().__init__()
        self.head = Transform(config)
        self.classifier = nn.Linear(config.hidden_size, num_labels)

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        return self.classifier(self.head(hidden_states))  # [T, C]


class ModernBertSequenceClassification(ModernBertTokenClassification):
    """Logits per text or pair."""

    def __init__(self, config: ModernBertConfig, num_labels: int):
        super().__init__(config, num_labels)
        self.pooled = POOLED[config.classifier_pooling]

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        pooled = self.pooled(hidden_states, layout)  # [B, H]
        return super().forward(pooled, layout)  # [B, C]


class ModernBertMaskedLM(Transform):
    """Dense, GELU, norm, then the word embeddings as the output matrix (tied), plus a bias."""

    def __init__(self, config: ModernBertConfig):
        super().__init__(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor, word_embeddings: Tensor) -> Tensor:
        return nn.functional.linear(self.transform(hidden_states), word_embeddings, self.bias)

    def transform(self, hidden_states: Tensor) -> Tensor:
        """What is multiplied by the output matrix: `[M, H]` -> `[M, H]`."""
        return super().forward(hidden_states)


HEAD = {"head.dense": "head.dense", "head.norm": "head.norm", "classifier": "classifier"}

MODERNBERT = replace(
    BERT,
    config=ModernBertConfig,
    encoder=ModernBert,
    architecture="ModernBert",
    prefix="model.",
    encoder_names={
        r"embeddings\.word": ["embeddings.tok_embeddings"],
        r"embeddings\.token_type": ["embeddings.token_type_embeddings"],
        r"embeddings\.norm": ["embeddings.norm"],
        r"layers\.(\d+)\.attention_norm": [r"layers.\1.attn_norm"],
        r"layers\.(\d+)\.attention\.qkv": [r"layers.\1.attn.Wqkv"],
        r"layers\.(\d+)\.attention\.output": [r"layers.\1.attn.Wo"],
        r"layers\.(\d+)\.feed_forward_norm": [r"layers.\1.mlp_norm"],
        r"layers\.(\d+)\.feed_forward\.up": [r"layers.\1.mlp.Wi"],
        r"layers\.(\d+)\.feed_forward\.down": [r"layers.\1.mlp.Wo"],
        r"norm": ["final_norm"],
    },
    heads={"classification": HEAD, "ner": HEAD, "qa": HEAD},
    make_heads={
        "classification": ModernBertSequenceClassification,
        "ner": ModernBertTokenClassification,
        "qa": ModernBertTokenClassification,
        "masked_lm": ModernBertMaskedLM,
    },
    objectives={
        "masked_lm": "decoder",
        "masked_lm.dense": "head.dense",
        "masked_lm.norm": "head.norm",
    },
    mask_rate=0.3,
    decoder="decoder",
    tokenizer="byte-level BPE",
)
