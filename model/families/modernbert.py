"""ModernBERT (Warner et al. 2024): what was learnt since BERT, and 8,192 tokens.

Pre-norm, no biases, a gated feed-forward, and positions by rotation (Su et al. 2021) instead of a table. One layer of
three looks at everything, the others at what is near. Each keeps to its sequence, for `attention` sees to that, and the
rotation only needs each token's position.

T tokens, H hidden, I intermediate, N heads, D head size, S longest sequence
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from model.attention import AnyLayout, attention, count_slots
from model.bert import ACTIVATIONS
from model.config import BertConfig
from model.families.bert_names import BERT
from model.pooling import first_tokens, mean_tokens

GLOBAL, LOCAL = "full_attention", "sliding_attention"
CUTOFF = 2  # standard deviations, of initial weights


@dataclass(frozen=True)
class ModernBertConfig(BertConfig):
    """Defaults are those of `answerdotai/ModernBERT-base`.

    layer_types: GLOBAL or LOCAL for each layer; by default every third is global, from the first on
    local_attention: tokens that a local layer looks at, half of them before and half after
    global_rope_theta, local_rope_theta: how slowly the slowest rotation goes
    type_vocab_size: texts of an input that are told apart; in what was released none are, and transformers would not
    """

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
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-5
    pad_token_id: int = 50283
    layer_types: tuple[str, ...] = ()
    local_attention: int = 128
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
        """By the kind of layer."""
        return {GLOBAL: self.global_rope_theta, LOCAL: self.local_rope_theta}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Both as it is written now and as it was at first."""
        said = dict(config)
        every = said.get("global_attn_every_n_layers")
        if every and not said.get("layer_types"):
            layers = range(said.get("num_hidden_layers", cls.num_hidden_layers))
            said["layer_types"] = tuple(LOCAL if i % every else GLOBAL for i in layers)
        ropes = said.get("rope_parameters") or {}
        if unknown := sorted(ropes.keys() - {GLOBAL, LOCAL}):
            raise ValueError(f"rope_parameters: {unknown[0]!r} is none of {GLOBAL}, {LOCAL}")
        for kind, field in ((GLOBAL, "global_rope_theta"), (LOCAL, "local_rope_theta")):
            rope = ropes.get(kind) or {}
            said[field] = read_theta(rope, said.get(field))
        return super().from_dict(said)

    def to_dict(self) -> dict[str, Any]:
        said = super().to_dict()
        del said["position_embedding_type"]
        ropes = {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in self.thetas.items()
        }
        if not self.type_vocab_size:
            del said["type_vocab_size"]
        return {**said, "layer_types": [*self.layer_types], "rope_parameters": ropes}


Rotation = tuple[Tensor, Tensor]  # cosines and sines, each [T, 1, 1, D / 2]


def read_theta(rope: Mapping[str, Any], otherwise: float | None) -> float | None:
    """Of a configuration's `rope_parameters`. Raises ValueError for rotations that change with the length."""
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters: {rope!r} is no object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_parameters (or rope_scaling): rope_type {kind!r} is not 'default': "
            "rotations that change with the length are not supported"
        )
    if unknown := sorted(rope.keys() - {"rope_type", "type", "rope_theta"}):
        raise ValueError(f"rope_parameters: {unknown[0]} = {rope[unknown[0]]!r} is not supported")
    return rope.get("rope_theta", otherwise)


def rotation_speeds(size: int, theta: float, device: torch.device | None = None) -> Tensor:
    """`[D / 2]` radians per token, of each pair of a head's numbers.

    Python computes them, so that a traced graph has the same: the last bit of one is 3e-5 radians after 500 tokens,
    which large queries and keys make 2e-3 of what attention gives.
    """
    return torch.tensor([theta ** (-place / size) for place in range(0, size, 2)], device=device)


def slow_dimensions(size: int, theta: float, reach: int) -> list[int]:
    """Those of a head's numbers whose pairs turn by less than a radian over `reach` tokens."""
    speeds = rotation_speeds(size, theta).tolist()
    pairs = [pair for pair, speed in enumerate(speeds) if speed * reach < 1]
    return [*pairs, *(pair + size // 2 for pair in pairs)]


def rotation(position_ids: Tensor, size: int, theta: float) -> Rotation:
    """By how much each pair of a head's numbers is turned at each position, from fast to slow."""
    speeds = rotation_speeds(size, theta, position_ids.device)
    angles = position_ids[:, None, None, None].float() * speeds
    return angles.cos(), angles.sin()


def rotate(qkv: Tensor, num_heads: int, by: Rotation) -> Tensor:
    """Turn queries and keys `[T, 3H]`, so that their product knows how far apart they are; values stay."""
    halves = qkv.view(qkv.shape[0], 3, num_heads, 2, -1)  # len() would fix T in an exported graph
    first, second = halves[:, :2, :, 0], halves[:, :2, :, 1]  # [T, 2, N, D / 2]
    cosines, sines = (angles.to(qkv.dtype) for angles in by)
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.cat([torch.stack(turned, dim=3), halves[:, 2:]], dim=1).view_as(qkv)


class ModernBertEmbeddings(nn.Module):
    """Token and, where the configuration has that, the text it is of, normalised: to the first nothing is added.

    Where it stands, attention will know.
    """

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = norm(config)
        texts = config.type_vocab_size
        self.token_type = nn.Embedding(texts, config.hidden_size, padding_idx=0) if texts else None

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        x = self.word(input_ids)  # [T, H]
        return self.norm(x if self.token_type is None else x + self.token_type(token_type_ids))


def norm(config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.norm_bias)


class ModernBertSelfAttention(nn.Module):
    """Query, key and value in one projection; the first two are turned."""

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        biased = config.attention_bias
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=biased)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=biased)

    def forward(
        self, x: Tensor, layout: AnyLayout, by: Rotation, bias: Tensor | None = None
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        turned = rotate(self.qkv(x), self.num_heads, by)
        return self.output(attention(turned, self.num_heads, layout, dropout, bias))  # [T, H]


class ModernBertFeedForward(nn.Module):
    """One half of the wide layer says how much of the other passes (GeGLU, Shazeer 2020)."""

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
    """Pre-norm: each half looks at the stream normalised, and adds to the stream as it is."""

    def __init__(self, config: ModernBertConfig, index: int):
        super().__init__()
        self.kind = config.layer_types[index]
        # The first layer's input has just been normalised.
        self.attention_norm = norm(config) if index else nn.Identity()
        self.attention = ModernBertSelfAttention(config)
        self.feed_forward_norm = norm(config)
        self.feed_forward = ModernBertFeedForward(config)

    def forward(self, x: Tensor, layout: AnyLayout, by: Rotation, bias: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), layout, by, bias)
        return x + self.feed_forward(self.feed_forward_norm(x))


class ModernBert(nn.Module):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    pooler = None
    has_pooler = False

    def __init__(self, config: ModernBertConfig, pooler: bool = True):
        super().__init__()
        self.config = config
        self.embeddings = ModernBertEmbeddings(config)
        self.layers = nn.ModuleList(
            ModernBertLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = norm(config)
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        """Normal within two standard deviations; what adds to the stream begins smaller the more layers there are."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-CUTOFF * std, b=CUTOFF * std)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0.0
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, ModernBertLayer):
            for adding in (module.attention.output, module.feed_forward.down):
                adding.weight.data /= math.sqrt(2 * self.config.num_hidden_layers)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        layout: AnyLayout,
    ) -> Tensor:
        x = self.embeddings(input_ids, token_type_ids)
        c = self.config
        turns = {
            kind: rotation(position_ids, c.head_size, theta) for kind, theta in c.thetas.items()
        }
        biases = {GLOBAL: None, LOCAL: nearness(count_slots(layout), c.local_attention // 2, x)}
        for layer in self.layers:
            x = layer(x, layout, turns[layer.kind], biases[layer.kind])
        return self.norm(x)


def nearness(longest: int, reach: int, like: Tensor) -> Tensor:
    """`[1, 1, S, S]`: nothing is added to the scores of keys within reach, and what forbids the others to those."""
    places = torch.arange(longest, device=like.device)
    far = (places[None, :] - places[:, None]).abs() > reach
    forbidding = (
        torch.finfo(torch.float16).min / 2
    )  # no sum with a score is infinite in any precision
    return (far * forbidding).to(like.dtype)[None, None]


# -- heads ------------------------------------------------------------------------------------------------------------

POOLED = {"cls": first_tokens, "mean": mean_tokens}


class Transform(nn.Module):
    """Dense, GELU, norm: what stands before every classifier."""

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.norm = norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(nn.functional.gelu(self.dense(x)))


class ModernBertTokenClassification(nn.Module):
    """Logits per token; of two labels for an answer's start and end."""

    def __init__(self, config: ModernBertConfig, num_labels: int = 2):
        super().__init__()
        self.head = Transform(config)
        self.classifier = nn.Linear(config.hidden_size, num_labels)

    def forward(self, hidden_states: Tensor, layout: AnyLayout) -> Tensor:
        return self.classifier(self.head(hidden_states))  # [T, C]


class ModernBertSequenceClassification(ModernBertTokenClassification):
    """Logits per text or pair."""

    def __init__(self, config: ModernBertConfig, num_labels: int):
        super().__init__(config, num_labels)
        self.pooled = POOLED[config.classifier_pooling]

    def forward(self, hidden_states: Tensor, layout: AnyLayout) -> Tensor:
        return super().forward(self.pooled(hidden_states, layout), layout)  # [B, C]


class ModernBertMaskedLM(Transform):
    """Then the word embeddings themselves as the output matrix (tied), plus a bias."""

    def __init__(self, config: ModernBertConfig):
        super().__init__(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor, word_embeddings: Tensor) -> Tensor:
        guess = super().forward(hidden_states)
        return nn.functional.linear(guess, word_embeddings, self.bias)  # [M, V]


HEAD = {"head.dense": "head.dense", "head.norm": "head.norm", "classifier": "classifier"}

MODERNBERT = replace(
    BERT,
    config=ModernBertConfig,
    encoder=ModernBert,
    architecture="ModernBert",
    prefix="model.",
    trunk={
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
