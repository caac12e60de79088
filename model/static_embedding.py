"""Static embeddings: a text's vector is the mean of a table's vectors for its tokens, without an encoder.

sentence-transformers' StaticEmbedding and model2vec (Tulkens and van Dongen 2024) are such models. A batch may have
texts without tokens, but a packed sequence has at least one: so each sequence begins with a token of zeros that does
not count (`START`).

Shapes as in `model/bert.py`
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.attention import PackedLayout
from model.config import BertConfig
from model.heads import EncoderWithHeads
from model.pooling import mean_tokens
from service.core.manifest import Head

START = "<quartet-start>"  # the token before each text
LEAST = 1e-6  # less than the share of a single token in the longest sequence


class StaticTable(nn.Module):
    """The vector of each token and, as the last number, 1 for a token that counts and 0 for another."""

    def __init__(self, table: Tensor, counted: Tensor):
        super().__init__()
        self.embeddings = nn.ModuleDict({"word": nn.Embedding.from_pretrained(table)})  # [V, H]
        self.counted = nn.Embedding.from_pretrained(counted[:, None])  # [V, 1]

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor, layout: PackedLayout
    ) -> Tensor:
        """`[T]` each -> `[T, H + 1]`."""
        return torch.cat([self.embeddings["word"](input_ids), self.counted(input_ids)], dim=-1)


class StaticMean(nn.Module):
    """The mean over the tokens of a sequence that count, zeros if there are none, then dense layers."""

    def __init__(self, dense: Sequence[nn.Module] = ()):
        super().__init__()
        self.dense = nn.Sequential(*dense)

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H + 1]` -> `[B, D]`."""
        # In fp64, whose sums have the same rounded result in any batch: dense layers may enlarge a difference.
        means = mean_tokens(hidden_states.double(), layout)  # [B, H + 1]
        vectors = means[:, :-1] / means[:, -1:].clamp(min=LEAST)  # [B, H]
        return self.dense(vectors.to(hidden_states.dtype))  # [B, D]


class StaticModel(EncoderWithHeads):
    """A table with an embedding head, in place of an encoder with heads.

    table: `[V, H]`, zeros for `START`
    counted: `[V]`, 1 for tokens that count and 0 for others
    """

    def __init__(self, table: Tensor, counted: Tensor, head: Head, dense: Sequence[nn.Module] = ()):
        nn.Module.__init__(self)
        self.config = BertConfig(
            vocab_size=len(table), hidden_size=table.shape[1], num_attention_heads=1
        )
        self.described = {"embedding": head}
        self.encoder = StaticTable(table, counted)
        self.heads = nn.ModuleDict({"embedding": StaticMean(dense)})
