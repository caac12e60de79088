"""DeBERTa (He et al. 2020; v3: He et al. 2021): disentangled attention, with content and position kept apart.

Embeddings contain no positions. The attention score of two tokens is the sum of content to content, content to
position (c2p) and position to content (p2c), where a position is the distance of the two tokens. All layers share one
table of distance embeddings: one row per distance in version 1, logarithmic buckets for large distances in later ones.
Layers of later versions may project the table with the projections of tokens.

Shapes as in `model/bert.py`, and K distances to each side.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import (
    PackedLayout,
    ScaledDotProductAttention,
    count_slots,
    from_slots,
    real_slots,
    split_heads,
    to_slots,
)
from model.bert import Bert, Layer, Projections
from model.config import BertConfig
from model.families.bert_names import BERT
from service.core import packing

CONV_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu}
TERMS = ("c2p", "p2c")  # content to position, position to content


@dataclass(frozen=True)
class DebertaConfig(BertConfig):
    """Defaults are the values of `DebertaConfig` in transformers, which has BERT's positions only."""

    model_type: ClassVar[str] = "deberta"
    released: ClassVar[Mapping[str, Any]] = {
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": [*TERMS],
    }

    vocab_size: int = 50265
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-7
    embedding_size: int | None = None  # width of the embedding tables, where it is not hidden_size
    relative_attention: bool = False  # whether scores depend on distances
    # The largest distance with its own row; -1 for max_position_embeddings.
    max_relative_positions: int = -1
    position_biased_input: bool = True  # whether embeddings contain positions
    pos_att_type: tuple[str, ...] = ()  # a subset of TERMS

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pos_att_type", tuple(self.pos_att_type))
        if not set(self.pos_att_type) <= set(TERMS):
            raise ValueError(f"pos_att_type: of {', '.join(TERMS)}, not {self.pos_att_type}")
        if not self.relative_attention and not self.position_biased_input:
            raise ValueError("neither relative_attention nor position_biased_input: no positions")

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def farthest(self) -> int:
        """The distance, in tokens, that all larger ones are treated as."""
        maximum = self.max_relative_positions
        return maximum if maximum > 0 else self.max_position_embeddings

    @property
    def distances(self) -> int:
        """K: rows of the table for tokens before, and the same number for tokens after."""
        return self.farthest

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        terms = config.get("pos_att_type") or ()
        terms = terms.lower().split("|") if isinstance(terms, str) else terms
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        for field, ours in (
            ("pooler_hidden_size", hidden),
            ("attention_head_size", hidden and heads and hidden // heads),
        ):
            if config.get(field) not in (None, ours):
                raise ValueError(f"{field} {config[field]!r} is not {ours!r}")
        return super().from_dict({**config, "pos_att_type": tuple(term.strip() for term in terms)})

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        del fields["position_embedding_type"]
        fields["pos_att_type"] = [*self.pos_att_type] or None
        fields["pooler_hidden_size"] = self.hidden_size
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class DebertaV2Config(DebertaConfig):
    """The configuration of versions 2 and 3."""

    model_type: ClassVar[str] = "deberta-v2"
    released: ClassVar[Mapping[str, Any]] = {
        **DebertaConfig.released,
        "position_buckets": 256,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    }

    vocab_size: int = 128100
    hidden_size: int = 1536
    num_hidden_layers: int = 24
    num_attention_heads: int = 24
    intermediate_size: int = 6144
    position_buckets: int = -1  # rows of the table for each side; -1 for one per distance
    share_att_key: bool = False  # whether distances use the tokens' projections
    norm_rel_ebd: str = "none"  # "layer_norm" where the table is normalized, else "none"
    # Width, in tokens, of a convolution parallel to the first layer; 0 for none.
    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_act: str = "tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_rel_ebd not in ("none", "layer_norm"):
            raise ValueError(f"norm_rel_ebd {self.norm_rel_ebd!r}: none or layer_norm")
        if self.conv_act not in CONV_ACTIVATIONS:
            raise ValueError(f"conv_act {self.conv_act!r}: one of {', '.join(CONV_ACTIVATIONS)}")

    @property
    def distances(self) -> int:
        return self.position_buckets if self.position_buckets > 0 else self.farthest


def bucket(distance: Tensor, count: int, farthest: int) -> Tensor:
    """Return the bucket of each signed distance: exact up to count / 2, then logarithmic up to about `farthest`."""
    half = count // 2
    magnitude = distance.abs().clamp(min=half)
    log_range = torch.log(torch.tensor((farthest - 1) / half))
    coarse = torch.ceil(torch.log(magnitude / half) / log_range * (half - 1)).to(torch.int64) + half
    return torch.where(distance.abs() <= half, distance, distance.sign() * coarse)


class DebertaEmbeddings(nn.Module):
    """Token, and segment and position where the configuration has them, projected from E to H and normalized."""

    def __init__(self, config: DebertaConfig):
        super().__init__()
        width = config.embedding_width
        self.word = nn.Embedding(config.vocab_size, width)
        positions = config.max_position_embeddings if config.position_biased_input else 0
        self.position = nn.Embedding(positions, width) if positions else None
        segments = config.type_vocab_size
        self.token_type = nn.Embedding(segments, width) if segments else None
        wider = config.hidden_size != width
        self.project = nn.Linear(width, config.hidden_size, bias=False) if wider else nn.Identity()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.word(input_ids)  # [T, E]
        if self.position is not None:
            x = x + self.position(position_ids)
        if self.token_type is not None:
            x = x + self.token_type(token_type_ids)
        return self.dropout(self.norm(self.project(x)))  # [T, H]


@dataclass(frozen=True)
class Distances:
    """The rows of distance embeddings for a batch. Column j of scores by distance is the distance j - S."""

    table: Tensor  # [2K, H]
    keys: Tensor  # [2S] row of the key of each distance, for c2p
    queries: Tensor  # [2S] row of the query of each distance, for p2c


class Table(nn.Module):
    """Embeddings of 2K distances; a batch uses the rows of the distances that occur in it."""

    def __init__(self, config: DebertaConfig):
        super().__init__()
        self.rows = nn.Embedding(2 * config.distances, config.hidden_size)
        has_norm = isinstance(config, DebertaV2Config) and config.norm_rel_ebd == "layer_norm"
        eps = config.layer_norm_eps
        self.norm = nn.LayerNorm(config.hidden_size, eps=eps) if has_norm else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        longest = config.max_position_embeddings
        self.longest = packing.round_up(longest, packing.SLOT_MULTIPLE)
        distance = torch.arange(-self.longest, self.longest + 1)
        if isinstance(config, DebertaV2Config) and config.position_buckets > 0:
            distance = bucket(distance, config.position_buckets, config.farthest)
        # A table, because another runtime's logarithm may give another bucket.
        index = (distance + config.distances).clamp(0, 2 * config.distances - 1)
        self.register_buffer("index", index, persistent=False)

    def forward(self, layout: PackedLayout) -> Distances:
        longest = count_slots(layout)
        distance = torch.arange(-longest, longest, device=self.index.device)  # [2S]
        every = torch.arange(self.rows.num_embeddings, device=distance.device)  # [2K]
        table = self.dropout(self.norm(self.rows(every)))  # [2K, H]
        keys, queries = (
            self.index.index_select(0, self.longest + d) for d in (-distance, distance)
        )  # [2S] each
        return Distances(table, keys, queries)


class DebertaSelfAttention(nn.Module):
    """Disentangled self-attention: tokens have query, key and value, distances have a key (c2p) and a query (p2c)."""

    def __init__(self, config: DebertaConfig):
        super().__init__()
        self.num_heads, self.widths = config.num_attention_heads, config.attention_widths
        self.terms = config.pos_att_type if config.relative_attention else ()
        # A sum of more terms has a larger variance.
        self.scale = (config.head_size * (1 + len(config.pos_att_type))) ** -0.5
        self.qkv = self.make_token_projection(config)
        self.positions = nn.ModuleDict(self.make_distance_projections(config))
        self.attend = ScaledDotProductAttention(config, scale=self.scale)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def make_token_projection(self, config: Any) -> nn.Module:
        return Projections(config)

    def make_distance_projections(self, config: Any) -> dict[str, nn.Module]:
        """Return a projection for each term; a term without one uses that of tokens."""
        own = () if config.share_att_key else self.terms
        return {term: nn.Linear(config.hidden_size, config.hidden_size) for term in own}

    def forward(self, x: Tensor, layout: PackedLayout, distances: Distances | None) -> Tensor:
        q, k, v = self.qkv(x).split(self.widths, dim=-1)  # [T, H] each
        bias = None if distances is None else self.bias(q, k, layout, distances)
        context = self.attend(q, k, v, layout, bias)  # [T, H]
        return self.output(context)  # [T, H]

    def bias(
        self, q: Tensor, k: Tensor, layout: PackedLayout, distances: Distances
    ) -> Tensor | None:
        """Return the distances' part of the scores, `[B, N, S, S]`; None without terms."""
        query, key = (split_heads(to_slots(x, layout), self.num_heads) for x in (q, k))
        table = distances.table.to(q.dtype)  # [2K, H]
        total = None
        if "c2p" in self.terms:
            keys = self.project("c2p", table).index_select(0, distances.keys)  # [2S, H]
            total = shift(query @ self.columns(keys))  # [B, N, S, 2S] -> [B, N, S, S]
        if "p2c" in self.terms:
            queries = self.project("p2c", table).index_select(0, distances.queries)  # [2S, H]
            scores = shift(key @ self.columns(queries)).transpose(-1, -2)  # [B, N, S, S]
            total = scores if total is None else total + scores
        return None if total is None else total * self.scale

    def project(self, term: str, table: Tensor) -> Tensor:
        """Return the key (c2p) or the query (p2c) of each row of the table, `[2K, H]`."""
        if term in self.positions:
            return self.positions[term](table)
        part = 1 if term == "c2p" else 0  # the tokens' keys, or their queries
        return F.linear(table, self.qkv.weight.chunk(3)[part], self.qkv.bias.chunk(3)[part])

    def columns(self, rows: Tensor) -> Tensor:
        """`[2S, H]` -> `[N, D, 2S]`"""
        return rows.view(rows.shape[0], self.num_heads, -1).permute(1, 2, 0)


def shift(scores: Tensor) -> Tensor:
    """Scores by distance to scores by position, in row i the columns from S - i: `[..., S, 2S]` -> `[..., S, S]`.

    As in Transformer-XL (Dai et al. 2019): viewed with rows of 2S - 1, each row begins one column earlier.
    """
    longest = scores.shape[-2]
    rest = scores.flatten(-2)[..., longest:]  # [..., S * (2S - 1)]
    return rest.view(*scores.shape[:-1], 2 * longest - 1)[..., :longest]  # [..., S, S]


class Interleaved(nn.Module):
    """The projection of version 1: rows ordered by head, and keys without a bias."""

    def __init__(self, config: DebertaConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.rows = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(config.hidden_size))
        self.v_bias = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x).view(x.shape[0], self.num_heads, 3, -1)  # [T, N, 3, D]
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])  # [3H]
        return rows.transpose(1, 2).reshape(x.shape[0], -1) + bias  # [T, 3H]


class FirstSelfAttention(DebertaSelfAttention):
    """The disentangled self-attention of version 1."""

    def make_token_projection(self, config: DebertaConfig) -> nn.Module:
        return Interleaved(config)

    def make_distance_projections(self, config: DebertaConfig) -> dict[str, nn.Module]:
        hidden = config.hidden_size
        return {term: nn.Linear(hidden, hidden, bias=term == "p2c") for term in self.terms}


class Convolution(nn.Module):
    """A convolution over the neighbors of each token in its sequence, added to the first layer's output."""

    def __init__(self, config: DebertaV2Config):
        super().__init__()
        hidden, kernel = config.hidden_size, config.conv_kernel_size
        padding = (kernel - 1) // 2
        self.around = nn.Conv1d(hidden, hidden, kernel, padding=padding, groups=config.conv_groups)
        self.activation = CONV_ACTIVATIONS[config.conv_act]
        self.norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, layer_input: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[T, H]`. x: the first layer's output; layer_input: its input, [T, H]"""
        # Zeros after the end of a sequence.
        slots = to_slots(layer_input, layout) * real_slots(layout)[:, :, None]  # [B, S, H]
        slots = self.around(slots.transpose(1, 2)).transpose(1, 2)  # [B, S, H]
        convolved = from_slots(slots, layout)  # [T, H]
        return self.norm(x + self.activation(self.dropout(convolved)))  # [T, H]


class FirstVersionLayer(Layer):
    make_attention = FirstSelfAttention


class SecondVersionLayer(Layer):
    make_attention = DebertaSelfAttention


class ConvolvedLayer(SecondVersionLayer):
    """A layer with a parallel convolution of its input."""

    def __init__(self, config: DebertaV2Config):
        super().__init__(config)
        self.convolution = Convolution(config)

    def forward(self, x: Tensor, layout: PackedLayout, *shared: Any) -> Tensor:
        return self.convolution(super().forward(x, layout, *shared), x, layout)  # [T, H]


class Deberta(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = DebertaEmbeddings
    make_layer = FirstVersionLayer
    has_pooler = False

    def __init__(self, config: DebertaConfig, pooler: bool = True):
        super().__init__(config, pooler)
        self.distances = Table(config) if config.relative_attention else None
        if self.distances is not None:
            self.distances.apply(self.init_weights)

    def shared_inputs(self, position_ids: Tensor, layout: PackedLayout) -> Distances | None:
        return None if self.distances is None else self.distances(layout)


class DebertaV2(Deberta):
    """The encoder of versions 2 and 3, with the same inputs and output."""

    make_layer = SecondVersionLayer

    def make_layers(self, config: DebertaV2Config) -> nn.ModuleList:
        layers = super().make_layers(config)
        if config.conv_kernel_size:
            layers[0] = ConvolvedLayer(config)
        return layers


LAYER = r"layers\.(\d+)"

DEBERTA = replace(
    BERT,
    config=DebertaConfig,
    encoder=Deberta,
    architecture="Deberta",
    prefix="deberta.",
    encoder_names={
        **BERT.encoder_names,
        r"embeddings\.project": ["embeddings.embed_proj"],
        r"distances\.rows": ["encoder.rel_embeddings"],
        rf"{LAYER}\.attention\.qkv\.rows": [r"encoder.layer.\1.attention.self.in_proj"],
        rf"{LAYER}\.attention\.qkv": [r"encoder.layer.\1.attention.self"],
        rf"{LAYER}\.attention\.positions\.c2p": [r"encoder.layer.\1.attention.self.pos_proj"],
        rf"{LAYER}\.attention\.positions\.p2c": [r"encoder.layer.\1.attention.self.pos_q_proj"],
    },
    heads=BERT.heads
    | {"classification": {"pooler.dense": "pooler.dense", "classifier": "classifier"}},
    objectives={name: hub for name, hub in BERT.objectives.items() if "masked_lm" in name},
    activation=F.gelu,
    tokenizer="byte-level BPE",
)
DEBERTA_V2 = replace(
    DEBERTA,
    config=DebertaV2Config,
    encoder=DebertaV2,
    architecture="DebertaV2",
    encoder_names={
        **DEBERTA.encoder_names,
        r"distances\.norm": ["encoder.LayerNorm"],
        r"layers\.0\.convolution\.around": ["encoder.conv.conv"],
        r"layers\.0\.convolution\.norm": ["encoder.conv.LayerNorm"],
        rf"{LAYER}\.attention\.qkv": [
            r"encoder.layer.\1.attention.self.query_proj",
            r"encoder.layer.\1.attention.self.key_proj",
            r"encoder.layer.\1.attention.self.value_proj",
        ],
        rf"{LAYER}\.attention\.positions\.c2p": [r"encoder.layer.\1.attention.self.pos_key_proj"],
        rf"{LAYER}\.attention\.positions\.p2c": [r"encoder.layer.\1.attention.self.pos_query_proj"],
    },
    tokenizer="unigram",
)
