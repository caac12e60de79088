"""Task heads: from the encoder's hidden states to the outputs of a task.

A head takes the last hidden state `[T, H]` and the layout, and returns logits per sequence `[B, C]` or per token
`[T, C]`. The masked language model takes the hidden states of mask tokens `[M, H]` and the word embeddings, and returns
`[M, V]`; the sparse embedding takes all hidden states, and returns `[B, V]`. `EncoderWithHeads` is one encoder with
named heads; `Pretraining` is one with the heads of pretraining.

Shapes as in `model/bert.py`: T tokens, B sequences, H hidden, C labels, M masked tokens, V vocabulary
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import PackedLayout, to_slots
from model.bert import MaskedLM, NextSentence, Pooler
from model.config import BertConfig
from model.families.registry import family_of
from model.pooling import POOLINGS
from service.core import bundle

VOCABULARY_PART = 4096  # tokens whose logits are in memory at once; limits the memory of a batch
IGNORE_INDEX = -100  # a label that losses skip
Inputs = tuple[Tensor, Tensor, Tensor, PackedLayout]  # ids, segments, positions [T]
# By objective: logits [n, C] and classes [n], or logits [n] and 0 or 1 [n].
Predictions = dict[str, tuple[Tensor, Tensor]]


class SequenceClassification(nn.Module):
    """Logits per text or pair: single label, multi-label and regression differ in loss and decoding only."""

    def __init__(self, config: BertConfig, num_labels: int):
        super().__init__()
        self.pooler = Pooler(config, family_of(config).activation)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, num_labels)

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[B, C]`."""
        pooled = self.pooler(hidden_states, layout)  # [B, H]
        return self.classifier(self.dropout(pooled))  # [B, C]


class TokenClassification(nn.Module):
    """Logits per token, for named entities."""

    def __init__(self, config: BertConfig, num_labels: int):
        super().__init__()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, num_labels)

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[T, C]`."""
        return self.classifier(self.dropout(hidden_states))  # [T, C]


class Spans(nn.Module):
    """Start and end logits per token; the first token's are the logits of "no answer" (SQuAD 2.0)."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[T, 2]`."""
        return self.qa_outputs(hidden_states)  # [T, 2]


class SentenceEmbedding(nn.Module):
    """One vector per sequence: pooled tokens (several ways are concatenated), then dense layers. Not normalized."""

    def __init__(self, pooling: str | Sequence[str] = "mean", dense: nn.Sequential | None = None):
        super().__init__()
        self.pooling = (pooling,) if isinstance(pooling, str) else tuple(pooling)
        for mode in self.pooling:
            if mode not in POOLINGS:
                raise ValueError(f"pooling {mode!r}: one of {', '.join(POOLINGS)}")
        self.dense = dense if dense is not None else nn.Sequential()

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[B, D]`. D: H for each pooling, or the width of the last dense layer"""
        parts = [POOLINGS[mode](hidden_states, layout) for mode in self.pooling]  # [B, H] each
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)  # [B, modes * H]
        return self.dense(pooled)  # [B, D]


class TokenEmbedding(nn.Module):
    """One vector per token, from its hidden state by dense layers. Not normalized."""

    def __init__(self, dense: nn.Sequential):
        super().__init__()
        self.dense = dense

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[T, D]`."""
        return self.dense(hidden_states)  # [T, D]


class HiddenStates(nn.Module):
    """The last hidden states themselves, for heads outside this model."""

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        return hidden_states


class SparseEmbedding(nn.Module):
    """A logit of each token of the vocabulary per sequence (SPLADE, Formal et al. 2021).

    It is the largest of the masked language model's logits over the sequence's tokens, for a part of the vocabulary at
    a time: all logits `[T, V]` would take more memory than the encoder. The weight of the token, log(1 + relu(logit)),
    is left to what uses the output, because a runtime's logarithm may depend on the place of a number in the batch.
    """

    def __init__(self, masked_lm: nn.Module):
        super().__init__()
        self.masked_lm = masked_lm

    def forward(
        self, hidden_states: Tensor, word_embeddings: Tensor, layout: PackedLayout
    ) -> Tensor:
        """`[T, H]` and the embedding table `[V, E]` -> `[B, V]`."""
        slots = to_slots(self.masked_lm.transform(hidden_states), layout)  # [B, S, E]
        bias, parts = self.masked_lm.bias, []
        for start in range(0, len(word_embeddings), VOCABULARY_PART):
            part = slice(start, start + VOCABULARY_PART)
            own = None if bias is None else bias[part]  # [part]
            # [B * S, E] and [part, E] -> [B * S, part]
            logits = F.linear(slots.flatten(0, 1), word_embeddings[part], own)
            # Padding slots contain the sequence's own first token, which does not change the maximum.
            parts.append(logits.view(*slots.shape[:2], -1).amax(dim=1))  # [B, part]
        return torch.cat(parts, dim=1)  # [B, V]


class TokenWeights(nn.Module):
    """A weight per token, of at least 0 (bge-m3's sparse head, Chen et al. 2024)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """`[T, H]` -> `[T, 1]`."""
        return F.relu(self.linear(hidden_states))  # [T, 1]


def make_head(config: BertConfig, head: bundle.Head) -> nn.Module:
    """Return a new head for its description in a manifest."""
    make = family_of(config).make_heads.get(head.task)
    if make is not None:
        return make(config, len(head.labels) or 2)
    match head.task:
        case "classification":
            return SequenceClassification(config, len(head.labels))
        case "ner":
            return TokenClassification(config, len(head.labels))
        case "qa":
            return Spans(config)
        case "fill-mask":
            return make_masked_lm(config)
        case "embedding":
            return SentenceEmbedding(head.pooling_modes or "mean")
        case "late-interaction":
            width = head.dimensions or config.hidden_size
            return TokenEmbedding(nn.Sequential(nn.Linear(config.hidden_size, width, bias=False)))
        case "sparse-embedding":
            sparse = head.sparse or bundle.Sparse()
            if sparse.source == "tokens":
                return TokenWeights(config.hidden_size)
            return SparseEmbedding(make_masked_lm(config))
        case "hidden-states":
            return HiddenStates()


def make_masked_lm(config: BertConfig) -> nn.Module:
    """Return a new masked language model head: `MaskedLM`, or the family's own module."""
    return family_of(config).make_heads.get("masked_lm", MaskedLM)(config)


class EncoderWithHeads(nn.Module):
    """One encoder, its heads by name, and the manifest's description of each."""

    def __init__(self, config: BertConfig, heads: Mapping[str, bundle.Head]):
        super().__init__()
        self.config = config
        self.described = dict(heads)
        self.encoder = family_of(config).encoder(config, pooler=False)
        self.heads = nn.ModuleDict()
        for name, head in heads.items():
            try:
                self.heads[name] = make_head(config, head)
            except KeyError:  # ModuleDict has a method of that name, or splits names at dots
                raise ValueError(f"a head cannot be named {name!r}: choose another name") from None
        self.heads.apply(self.encoder.init_weights)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout,
        heads: list[str] | None = None,
        positions: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return these heads' outputs, [B, C], [T, C] or [M, V]; positions: packed indices of mask tokens, [M]."""
        hidden_states = self.encoder(input_ids, token_type_ids, position_ids, layout)  # [T, H]
        names = self.described if heads is None else heads
        inputs = (hidden_states, input_ids, layout, positions)
        return {name: self._output(name, *inputs) for name in names}

    def _output(
        self,
        name: str,
        hidden_states: Tensor,
        input_ids: Tensor,
        layout: PackedLayout,
        positions: Tensor | None,
    ) -> Tensor:
        head, words = self.heads[name], self.encoder.embeddings.word.weight  # [V, E]
        if isinstance(head, SparseEmbedding):
            return head(hidden_states, words.to(hidden_states.dtype), layout)  # [B, V]
        if getattr(head, "reads_ids", False):
            return head(hidden_states, layout, input_ids)  # [B, C]
        if not self.described[name].per_mask:
            return head(hidden_states, layout)  # [B, C] or [T, C]
        at_masks = hidden_states if positions is None else hidden_states.index_select(0, positions)
        return head(at_masks, words.to(at_masks.dtype))  # [M, V]


class Pretraining(nn.Module):
    """The encoder with a masked language model head and, optionally, a next-sentence head. weights: of each loss"""

    def __init__(self, config: BertConfig, next_sentence: bool = True):
        super().__init__()
        self.config = config
        family = family_of(config)
        self.encoder = family.encoder(config, pooler=False)
        self.masked_lm = make_masked_lm(config)
        self.next_sentence = NextSentence(config) if next_sentence else None
        for head in (self.masked_lm, self.next_sentence):
            if head is not None:
                head.apply(self.encoder.init_weights)
        self.pair_objective = family.pair_objective
        self.weights = {"mlm": 1.0} | ({self.pair_objective: 1.0} if next_sentence else {})

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules of a checkpoint, by folder in it: one for all."""
        return {"": self}

    @property
    def architecture(self) -> str:
        """The suffix of the hub's class name."""
        return "ForMaskedLM" if self.next_sentence is None else "ForPreTraining"

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout,
        masked: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Token logits at the packed indices `masked` [M] (or all) and next-sentence logits [B, 2]."""
        hidden_states = self.encoder(input_ids, token_type_ids, position_ids, layout)  # [T, H]
        # [M, H]; without `masked`, M is T
        at_masked = hidden_states if masked is None else hidden_states.index_select(0, masked)
        token_logits = self.masked_lm(at_masked, self.encoder.embeddings.word.weight)  # [M, V]
        if self.next_sentence is None:
            return token_logits, None
        return token_logits, self.next_sentence(hidden_states, layout)  # [M, V], [B, 2]

    def predictions(
        self, inputs: Inputs, masked: Tensor, labels: Tensor, is_next: Tensor
    ) -> Predictions:
        """Return logits and targets of masked tokens [M] and, with a next-sentence head, of pairs [B], by objective."""
        token_logits, next_logits = self(*inputs, masked)  # [M, V], [B, 2]
        predictions = {"mlm": (token_logits, labels)}
        if next_logits is not None:
            predictions[self.pair_objective] = (next_logits, is_next)
        return predictions


def losses_of(predictions: Predictions) -> dict[str, Tensor]:
    """Return the mean loss of each objective: cross-entropy of logits [n, C], binary cross-entropy of logits [n]."""
    losses = {}
    for name, (logits, targets) in predictions.items():
        is_binary = logits.dim() == 1
        loss = F.binary_cross_entropy_with_logits if is_binary else F.cross_entropy
        losses[name] = loss(logits.float(), targets.float() if is_binary else targets)
    return losses


def accuracies_of(predictions: Predictions) -> dict[str, Tensor]:
    """Return the share of right predictions of each objective."""
    return {
        name: ((logits > 0) if logits.dim() == 1 else logits.argmax(-1)).eq(targets).float().mean()
        for name, (logits, targets) in predictions.items()
    }


def make_pretraining(config: BertConfig, next_sentence: bool) -> nn.Module:
    """Return a new encoder with its pretraining heads: `Pretraining`, or the family's own module."""
    make = family_of(config).make_heads.get("pretraining", Pretraining)
    return make(config, next_sentence)
