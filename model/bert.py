"""BERT (Devlin et al. 2019), exactly, on packed tokens.

Read from top to bottom: embeddings, attention, feed-forward, layer, encoder. Post-norm, learned positions, erf GELU.
Only `attention` knows where one sequence ends and the next begins.

T tokens, M masked tokens, B sequences, H hidden, I intermediate, V vocabulary
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import AnyLayout, attention
from model.config import BertConfig
from model.pooling import first_tokens

# The erf form is BERT's, the tanh form an approximation that some descendants kept (Hendrycks and Gimpel 2016).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class Embeddings(nn.Module):
    """Token + segment + position, normalised."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.embedding_width)
        self.position = nn.Embedding(config.max_position_embeddings, config.embedding_width)
        self.token_type = nn.Embedding(config.type_vocab_size, config.embedding_width)
        self.norm = nn.LayerNorm(config.embedding_width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.word(input_ids) + self.token_type(token_type_ids) + self.position(position_ids)
        return self.dropout(self.norm(x))  # [T, H]


class SelfAttention(nn.Module):
    """Query, key and value in one projection: one matrix product, one gather."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, layout: AnyLayout, bias: Tensor | None = None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return self.output(attention(self.qkv(x), self.num_heads, layout, dropout, bias))  # [T, H]


class FeedForward(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))  # [T, H] -> [T, I] -> [T, H]


class Layer(nn.Module):
    """Post-norm: each half adds to the stream, and the sum is normalised."""

    # Where other families differ.
    make_attention: type[nn.Module] = SelfAttention
    make_feed_forward: type[nn.Module] = FeedForward

    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = self.make_attention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = self.make_feed_forward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, layout: AnyLayout, *beside: Any) -> Tensor:
        """`beside`: what else a family's attention takes."""
        x = self.attention_norm(x + self.dropout(self.attention(x, layout, *beside)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class Pooler(nn.Module):
    """The first token's last hidden state, through a dense layer and (in BERT) tanh: what BERT classifies by."""

    def __init__(self, config: BertConfig, activation: Callable[[Tensor], Tensor] = torch.tanh):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = activation

    def forward(self, hidden_states: Tensor, layout: AnyLayout) -> Tensor:
        return self.activation(self.dense(first_tokens(hidden_states, layout)))  # [B, H]


class Bert(nn.Module):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    # Where other families differ.
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
        """BERT's: normal with `initializer_range`, biases zero, norms one."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        layout: AnyLayout,
    ) -> Tensor:
        x = self.embeddings(input_ids, token_type_ids, position_ids)  # [T, H]
        shared = self.shared(position_ids, layout)
        for layer in self.in_order():
            x = layer(x, layout, shared)  # [T, H]
        return x

    def make_layers(self, config: BertConfig) -> nn.ModuleList:
        return nn.ModuleList(self.make_layer(config) for _ in range(config.num_hidden_layers))

    def in_order(self) -> Iterable[nn.Module]:
        """The layers as they are passed through."""
        return self.layers

    def shared(self, position_ids: Tensor, layout: AnyLayout) -> Any:
        """What all layers' attention takes beside the layout: here a bias of its scores, `[1, N, S, S]`, or none.

        `position_ids` [T] are for families that rotate by them.
        """
        return None


# -- what it is pretrained with ----------------------------------------------------------------------------------------


class MaskedLM(nn.Module):
    """Dense, GELU, norm, then the word embeddings themselves as the output matrix (tied), plus a bias."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_width)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.norm = nn.LayerNorm(config.embedding_width, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor, word_embeddings: Tensor) -> Tensor:
        guess = self.norm(self.activation(self.dense(hidden_states)))
        return F.linear(guess, word_embeddings, self.bias)  # [M, V]


class NextSentence(nn.Module):
    """Does the second text follow the first? Class 0 says yes, as in Google's releases.

    Where it does not it is from elsewhere (BERT), or the first one follows it (ALBERT).
    """

    def __init__(self, config: BertConfig):
        super().__init__()
        self.pooler = Pooler(config)
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden_states: Tensor, layout: AnyLayout) -> Tensor:
        return self.classifier(self.pooler(hidden_states, layout))  # [B, 2]
