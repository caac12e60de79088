"""Static embeddings: a text's vector is the mean of a table's vectors for its tokens, without an encoder.

sentence-transformers' StaticEmbedding and model2vec (Tulkens and van Dongen 2024) are such models. A batch may have
texts without tokens, but a packed sequence has at least one: so each sequence begins with a token of zeros that does
not count (`START`).

Shapes as in `model/bert.py`
"""

from collections.abc import Sequence

from torch import Tensor, nn

from model.attention import PackedLayout, real_slots, to_slots
from model.config import BertConfig
from model.heads import EncoderWithHeads, WordLabels
from service.core.manifest import Head

START = "<quartet-start>"  # the token before each text


class StaticTable(nn.Module):
    """The vector of each token and 1 for a token that counts, 0 for another."""

    def __init__(self, table: Tensor, counted: Tensor):
        super().__init__()
        self.embeddings = nn.ModuleDict({"word": nn.Embedding.from_pretrained(table)})  # [V, H]
        self.counted = nn.Embedding.from_pretrained(counted[:, None])  # [V, 1]

    def forward(self, input_ids: Tensor, layout: PackedLayout) -> Tensor:
        """The mean over the tokens of a sequence that count, zeros if there are none: `[T]` -> `[B, H]`."""
        slots = to_slots(input_ids[:, None], layout)[..., 0]  # [B, S]
        weights = self.counted(slots)[..., 0] * real_slots(layout)  # [B, S]
        sums = weights[:, None] @ self.embeddings["word"](slots)  # [B, 1, H]
        return sums[:, 0] / weights.sum(dim=1, keepdim=True).clamp(min=1)  # [B, H]


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
        self.heads = nn.ModuleDict({"embedding": nn.Sequential(*dense)})

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout,
        heads: list[str] | None = None,
        positions: Tensor | None = None,
        of: WordLabels | None = None,
    ) -> dict[str, Tensor]:
        """Return the vectors, `[B, D]`."""
        return {"embedding": self.heads["embedding"](self.encoder(input_ids, layout))}
