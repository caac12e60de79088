"""BERT (Devlin et al. 2019), exactly, on packed tokens.

Read from top to bottom: embeddings, attention, feed-forward, layer, encoder, pretraining heads. Post-norm, learned
positions, erf GELU. Only `attention` knows where one sequence ends and the next begins.

Shapes: a comment at the end of a line is the shape of the line's result. In all modules of `model/`

    T  tokens of the batch, packed: all sequences one after the other, without padding
    B  sequences            S  tokens of the longest sequence
    H  hidden size          N  attention heads          D  head size, H / N
    I  intermediate size    E  embedding width (BERT: H)
    V  vocabulary           M  masked tokens            C  labels of a head

A model that pads would have `[B, S, H]` where this one has `[T, H]`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import PackedLayout, ScaledDotProductAttention
from model.config import BertConfig
from model.pooling import first_tokens

# BERT's GELU is the erf form; the tanh form approximates it (Hendrycks and Gimpel 2016). Some descendants use others.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class Embeddings(nn.Module):
    """Token + segment + position, normalized."""

    # Other families have no segments, or no table of positions.
    has_positions = True

    def __init__(self, config: BertConfig):
        super().__init__()
        width = config.embedding_width
        self.word = nn.Embedding(config.vocab_size, width)  # [V, E]
        positions = config.max_position_embeddings if self.has_positions else 0
        segments = config.type_vocab_size
        self.position = nn.Embedding(positions, width) if positions else None  # [positions, E]
        self.token_type = nn.Embedding(segments, width) if segments else None  # [segments, E]
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """`[T]` each -> `[T, E]`."""
        x = self.word(input_ids)  # [T, E]
        if self.token_type is not None:
            x = x + self.token_type(token_type_ids)  # [T, E]
        if self.position is not None:
            x = x + self.position(position_ids)  # [T, E]
        return self.dropout(self.norm(x))  # [T, E]


class Projections(nn.Linear):
    """Queries, keys and values as one product: `[T, H]` -> `[T, sum of widths]`."""

    def __init__(self, config: BertConfig, bias: bool = True):
        self.widths = config.attention_widths  # ND, KD, KD; in BERT H each
        super().__init__(config.hidden_size, sum(self.widths), bias)


class SelfAttention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.qkv = Projections(config)  # weight [3H, H]
        self.attend = ScaledDotProductAttention(config)
        self.output = nn.Linear(self.qkv.widths[0], config.hidden_size)  # weight [H, H]

    def forward(self, x: Tensor, layout: PackedLayout, bias: Tensor | None = None) -> Tensor:
        """`[T, H]` -> `[T, H]`. bias: added to the attention scores, `[1 or B, N, S, S]`"""
        q, k, v = self.qkv(x).split(self.qkv.widths, dim=-1)  # [T, H] each
        context = self.attend(q, k, v, layout, bias)  # [T, H]
        return self.output(context)  # [T, H]


class FeedForward(nn.Module):
    """Two linear layers with an activation between, applied to each token."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)  # weight [I, H]
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)  # weight [H, I]
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        x = self.activation(self.up(x))  # [T, I]
        return self.down(x)  # [T, H]


class Layer(nn.Module):
    """One encoder layer, post-norm: each half adds to the residual stream, and the sum is normalized."""

    # Other families replace these.
    make_attention: type[nn.Module] = SelfAttention
    make_feed_forward: type[nn.Module] = FeedForward

    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = self.make_attention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = self.make_feed_forward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, layout: PackedLayout, *shared: Any) -> Tensor:
        """`[T, H]` -> `[T, H]`. shared: further inputs of the family's attention, see `Bert.shared_inputs`"""
        x = self.attention_norm(x + self.dropout(self.attention(x, layout, *shared)))  # [T, H]
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))  # [T, H]


class Pooler(nn.Module):
    """The first token's last hidden state through a dense layer and, in BERT, tanh: the input of BERT's classifiers."""

    def __init__(self, config: BertConfig, activation: Callable[[Tensor], Tensor] = torch.tanh):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = activation

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[B, H]`."""
        first = first_tokens(hidden_states, layout)  # [B, H]
        return self.activation(self.dense(first))  # [B, H]


class Bert(nn.Module):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    # Other families replace these.
    make_embeddings: type[nn.Module] = Embeddings
    make_layer: type[nn.Module] = Layer
    has_pooler = True

    def __init__(self, config: BertConfig, pooler: bool = True):
        super().__init__()
        self.config = config
        self.embeddings = self.make_embeddings(config)
        self.layers = self.make_layers(config)
        self.pooler = Pooler(config) if pooler and self.has_pooler else None
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        """Initialize as BERT: normal with `initializer_range`, biases zero, norms one."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor, layout: PackedLayout
    ) -> Tensor:
        """`[T]` each -> `[T, H]`. layout: where each sequence is among the T tokens"""
        x = self.embeddings(input_ids, token_type_ids, position_ids)  # [T, H]
        shared = self.shared_inputs(position_ids, layout)
        for layer in self.layers_in_order():
            x = layer(x, layout, shared)  # [T, H]
        return x

    # -- hooks for other families: BERT has L different layers, and positions in its embeddings only

    def make_layers(self, config: BertConfig) -> nn.ModuleList:
        return nn.ModuleList(self.make_layer(config) for _ in range(config.num_hidden_layers))

    def layers_in_order(self) -> Iterable[nn.Module]:
        """Return the layers in the order in which a forward pass applies them."""
        return self.layers

    def shared_inputs(self, position_ids: Tensor, layout: PackedLayout) -> Any:
        """Return the input that all layers' attention shares: None in BERT; elsewhere a bias or a rotation."""
        return None


# -- pretraining heads -------------------------------------------------------------------------------------------------


class MaskedLM(nn.Module):
    """Dense, GELU, norm, then the word embeddings as the output matrix (tied), plus a bias."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_width)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.norm = nn.LayerNorm(config.embedding_width, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # [V]

    def forward(self, hidden_states: Tensor, word_embeddings: Tensor) -> Tensor:
        """Hidden states of masked tokens `[M, H]` and the embedding table `[V, E]` -> logits `[M, V]`."""
        transformed = self.transform(hidden_states)  # [M, E]
        return F.linear(transformed, word_embeddings, self.bias)  # [M, V]

    def transform(self, hidden_states: Tensor) -> Tensor:
        """Return the vectors that the output matrix multiplies: `[M, H]` -> `[M, E]`."""
        return self.norm(self.activation(self.dense(hidden_states)))  # [M, E]


class NextSentence(nn.Module):
    """Logits for two classes of a pair of texts; class 0 is "the second follows the first", as in Google's releases.

    Class 1 is a random second text (BERT), or the two texts in reverse order (ALBERT).
    """

    def __init__(self, config: BertConfig):
        super().__init__()
        self.pooler = Pooler(config)
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[B, 2]`."""
        pooled = self.pooler(hidden_states, layout)  # [B, H]
        return self.classifier(pooled)  # [B, 2]
