"""Task heads: from the encoder's hidden states to the outputs of a task.

A head takes the last hidden state `[T, H]` and the layout, and returns logits per sequence `[B, C]` or per token
`[T, C]`. The masked language model takes the hidden states of mask tokens `[M, H]` and the word embeddings, and returns
`[M, V]`; the sparse embedding takes all hidden states, and returns `[B, V]`. `EncoderWithHeads` is one encoder with
named heads; `Pretraining` is one with the heads of pretraining.

Shapes as in `model/bert.py`: T tokens, B sequences, H hidden, C labels, M masked tokens, V vocabulary
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from model.attention import PackedLayout, real_slots, split_heads, to_slots
from model.bert import ACTIVATIONS, Bert, MaskedLM, NextSentence, Pooler
from model.config import BertConfig
from model.families.registry import family_of
from model.pooling import POOLINGS
from service.core.manifest import Head, Sparse

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


class WordLabels(NamedTuple):
    """`service.core.packing.Pairs` as tensors."""

    words: Tensor  # [B, W]
    labels: Tensor  # [B, C]
    pairs: Tensor  # [P]


class WordLSTM(nn.Module):
    """A bidirectional LSTM over the words of each sequence."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.lstm = nn.LSTM(width, width // 2, layers, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """`[B, W, D]` and the words of each sequence, `[B]` -> `[B, W, D]`."""
        if torch.onnx.is_in_onnx_export():
            return self._onnx(words, lengths)
        packed = pack_padded_sequence(words, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, _ = self.lstm(packed)
        return pad_packed_sequence(output, batch_first=True, total_length=words.shape[1])[0]

    def _onnx(self, words: Tensor, lengths: Tensor) -> Tensor:
        """One node for each layer, which has the gates in another order."""
        x, half = words.transpose(0, 1), self.lstm.hidden_size  # [W, B, D], D / 2
        for layer in range(self.lstm.num_layers):
            of_kind = {
                kind: torch.stack(
                    [self._gates(f"{kind}_l{layer}{suffix}") for suffix in ("", "_reverse")]
                )
                for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            }  # [2, 2 D, D or D / 2], or [2, 2 D]
            bias = torch.cat([of_kind["bias_ih"], of_kind["bias_hh"]], dim=1)  # [2, 4 D]
            y = torch.onnx.ops.symbolic(
                "LSTM",
                [x, of_kind["weight_ih"], of_kind["weight_hh"], bias, lengths.to(torch.int32)],
                {"hidden_size": half, "direction": "bidirectional"},
                dtype=x.dtype,
                shape=(x.shape[0], 2, x.shape[1], half),
            )  # [W, 2, B, D / 2]
            x = y.transpose(1, 2).flatten(2)  # [W, B, D]
        return x.transpose(0, 1)  # [B, W, D]

    def _gates(self, name: str) -> Tensor:
        """Return a parameter with the gates in ONNX's order: input, output, forget, cell."""
        enter, forget, cell, leave = getattr(self.lstm, name).chunk(4)
        return torch.cat([enter, leave, forget, cell])


class SpanScores(nn.Module):
    """Logits of the spans that begin at a word, for a label (GLiNER's markerV0, Zaratiana et al. 2023)."""

    def __init__(self, width: int, max_width: int):
        super().__init__()
        self.max_width = max_width
        self.project_start, self.project_end = _widened(width, width), _widened(width, width)
        self.out_project, self.prompt = _widened(2 * width, width), _widened(width, width)

    def forward(self, words: Tensor, lengths: Tensor, labels: Tensor, pairs: Tensor) -> Tensor:
        """`[B, W, D]`, the words of each sequence `[B]`, `[B, C, D]` and `[P]` -> `[P, K]`.

        The first layer of `out_project` is computed for each word, not for each span. The second one is applied to the
        labels, because the logit is its output's product with the label.
        """
        first, second = self.out_project[0], self.out_project[-1]
        of_start, of_end = first.weight.chunk(2, dim=1)  # [4 D, D] each
        starts = F.linear(F.relu(self.project_start(words)), of_start, first.bias)  # [B, W, 4 D]
        ends = F.linear(F.relu(self.project_end(words)), of_end)  # [B, W, 4 D]
        # A span beyond the last word has no meaning, and must not depend on the padding.
        count = words.shape[1]
        is_word = torch.arange(count, device=words.device) < lengths[:, None]  # [B, W]
        ends = ends * is_word[..., None]
        ends = F.pad(ends, (0, 0, 0, self.max_width))  # [B, W + K, 4 D]
        prompts = self.prompt(labels)  # [B, C, D]
        keys = (prompts @ second.weight).transpose(1, 2)  # [B, 4 D, C]
        bias = (prompts @ second.bias)[:, None]  # [B, 1, C]
        scores = [
            F.relu(starts + ends[:, more : more + count]) @ keys + bias  # [B, W, C]
            for more in range(self.max_width)
        ]
        return torch.stack(scores, dim=-1).flatten(0, 2).index_select(0, pairs)  # [P, K]


class TokenScores(nn.Module):
    """Logits of a word as the first, the last and any word of an entity with a label (GLiNER's token level).

    outputs: logits of each pair
    """

    PART = 256  # of the inner layer that is in memory for all pairs at once

    def __init__(self, width: int, outputs: int = 3):
        super().__init__()
        self.proj_token, self.proj_label = (nn.Linear(width, 2 * width) for _ in range(2))
        self.out_mlp = nn.Sequential(
            nn.Linear(3 * width, 4 * width), nn.Identity(), nn.ReLU(), nn.Linear(4 * width, outputs)
        )

    def forward(self, words: Tensor, lengths: Tensor, labels: Tensor, pairs: Tensor) -> Tensor:
        """`[B, W, D]`, the words of each sequence `[B]`, `[B, C, D]` and `[P]` -> `[P, K]`. K: outputs"""
        each, count = words.shape[1] * labels.shape[1], labels.shape[1]  # W * C, C
        word_of = pairs // count  # [P], of B * W
        label_of = pairs // each * count + pairs - word_of * count  # [P], of B * C
        word, word_factor = self.proj_token(words).flatten(0, 1).chunk(2, dim=-1)  # [B * W, D]
        label, label_factor = self.proj_label(labels).flatten(0, 1).chunk(2, dim=-1)  # [B * C, D]
        first, second = self.out_mlp[0], self.out_mlp[-1]
        of_word, of_label, of_product = first.weight.chunk(3, dim=1)  # [4 D, D] each
        from_word = F.linear(word, of_word, first.bias)  # [B * W, 4 D]
        from_label = F.linear(label, of_label)  # [B * C, 4 D]
        factors = word_factor.index_select(0, word_of), label_factor.index_select(0, label_of)
        product, logits = factors[0] * factors[1], second.bias  # [P, D]
        for start in range(0, len(first.weight), self.PART):
            part = slice(start, start + self.PART)
            inner = from_word[:, part].index_select(0, word_of)  # [P, PART]
            inner = inner + from_label[:, part].index_select(0, label_of)
            inner = F.relu(inner + F.linear(product, of_product[part]))
            logits = logits + F.linear(inner, second.weight[:, part])  # [P, K]
        return logits


def _widened(inputs: int, outputs: int) -> nn.Sequential:
    """Two layers, with the indices that their weights have in GLiNER's checkpoints: 0 and 3."""
    inner = nn.Linear(inputs, 4 * outputs)
    return nn.Sequential(inner, nn.ReLU(), nn.Identity(), nn.Linear(4 * outputs, outputs))


class WordLabelScores(nn.Module):
    """Logits of each word with each label of its sequence, for entities with labels of a request (GLiNER)."""

    def __init__(self, inputs: int, width: int, rnn_layers: int, max_width: int | None):
        super().__init__()
        self.projection = nn.Linear(inputs, width) if inputs != width else nn.Identity()
        self.rnn = WordLSTM(width, rnn_layers) if rnn_layers else None
        self.scores = SpanScores(width, max_width) if max_width else TokenScores(width)

    def forward(self, hidden_states: Tensor, layout: PackedLayout, of: WordLabels) -> Tensor:
        """`[T, H]` -> `[P, K]`. K: `max_width`, or 3"""
        words, labels = (
            self.projection(hidden_states.index_select(0, index.reshape(-1))).unflatten(
                0, index.shape
            )
            for index in (of.words, of.labels)
        )  # [B, W, D], [B, C, D]
        # Padding has the index of the sequence's first token, which is smaller than a word's.
        lengths = 1 + (of.words[:, 1:] > of.words[:, :-1]).sum(dim=1)  # [B]
        if self.rnn is not None:
            words = self.rnn(words, lengths)
        return self.scores(words, lengths, labels, of.pairs)  # [P, K]


class LabelScoring(NamedTuple):
    """How a GLiClass model computes its scores.

    pooling: of the whole sequence, see `POOLINGS`; "" for none
    averages: whether a label's vector is the mean from its token to the next label, or to the end of the sequence
    after: tokens from the one before a label to the one where its vector begins: 0 or 1
    scorer: what computes the scores: products of vectors (`simple`), or layers of one of gliclass's other kinds
    heads, inner: of the attention and the layers of the scorer `cross-attn`
    normalizes: whether vectors have length 1, and their products a trained scale
    has_segments: whether the tokens from the separator on are another segment for the encoder
    """

    pooling: str = "cls"
    activation: str = "gelu"
    averages: bool = False
    after: int = 0
    scorer: str = "simple"
    heads: int = 16
    inner: int = 1024
    normalizes: bool = False
    has_segments: bool = False


def _score_layers(width: int, inner: int, activation: type[nn.Module]) -> nn.Sequential:
    """`[..., 2 H]` -> `[..., 1]`."""
    first, second = nn.Linear(2 * width, inner), nn.Linear(inner, inner // 2)
    return nn.Sequential(first, activation(), second, activation(), nn.Linear(inner // 2, 1))


class LayerScores(nn.Module):
    """Logits that three layers compute from the vectors of a text and of a label."""

    def __init__(self, width: int):
        super().__init__()
        self.mlp = _score_layers(width, 256, nn.ReLU)

    def forward(self, texts: Tensor, labels: Tensor, real: Tensor) -> Tensor:
        """`[B, 1, H]` and `[B, C, H]` -> `[B, C, 1]`."""
        return self.mlp(torch.cat([texts.expand_as(labels), labels], dim=-1))


class CrossScores(nn.Module):
    """Logits that three layers compute from the vector of a label and its attention to all tokens."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.heads = heads
        self.q_norm, self.kv_norm, self.norm = (nn.LayerNorm(width) for _ in range(3))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.score_mlp = _score_layers(width, inner, nn.GELU)

    def forward(self, tokens: Tensor, labels: Tensor, real: Tensor) -> Tensor:
        """`[B, S, H]`, `[B, C, H]` and the slots that have a token `[B, S]` -> `[B, C, 1]`."""
        parts = self.q(self.q_norm(labels)), self.k(self.kv_norm(tokens)), self.v(tokens)
        query, key, value = (split_heads(part, self.heads) for part in parts)  # [B, N, C or S, D]
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5  # [B, N, C, S]
        weights = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(dim=-1)
        context = self.norm(self.out((weights @ value).transpose(1, 2).flatten(2)))  # [B, C, H]
        return self.score_mlp(torch.cat([context, labels], dim=-1))


class TextLabelScores(nn.Module):
    """A logit of each label that a request names, for a text (GLiClass, Stepanov et al. 2025)."""

    def __init__(self, inputs: int, width: int, scoring: LabelScoring):
        super().__init__()
        self.scoring = scoring
        self.pool = POOLINGS[scoring.pooling] if scoring.pooling else to_slots
        activation = ACTIVATIONS[scoring.activation]
        self.text, self.label = (Projector(inputs, width, activation) for _ in range(2))
        self.scores = {
            "simple": lambda: None,
            "weighted-dot": lambda: TokenScores(inputs, outputs=1),
            "mlp": lambda: LayerScores(inputs),
            "cross-attn": lambda: CrossScores(inputs, scoring.heads, scoring.inner),
        }[scoring.scorer]()
        self.scale = nn.Parameter(torch.ones(1))
        self.has_segments = scoring.has_segments

    def forward(self, hidden_states: Tensor, layout: PackedLayout, of: WordLabels) -> Tensor:
        """`[T, H]` -> `[P, 1]`. A sequence has one word."""
        batch, words, labels = *of.words.shape, of.labels.shape[1]
        texts = self.text(self.pool(hidden_states, layout))  # [B, H], or [B, S, H] unpooled
        texts = texts[:, None] if texts.ndim == 2 else texts  # [B, 1 or S, H]
        vectors = self.label(self._labels(hidden_states, layout, of.labels))  # [B, C, H]
        if self.scoring.normalizes:
            texts, vectors = (x / (x.norm(dim=-1, keepdim=True) + 1e-8) for x in (texts, vectors))
        if self.scores is None:
            logits = (texts * vectors).sum(dim=-1, keepdim=True)  # [B, C, 1]
        elif isinstance(self.scores, LayerScores | CrossScores):
            logits = self.scores(texts, vectors, real_slots(layout))  # [B, C, 1]
        else:
            every = torch.arange(batch * labels, device=texts.device)  # [B * C]
            logits = self.scores(texts, layout.lengths, vectors, every)  # [B * C, 1]
        if self.scoring.normalizes:
            logits = logits * self.scale
        logits = logits.view(batch, 1, labels).expand(-1, words, -1)  # [B, W, C]
        return logits.reshape(-1, 1).index_select(0, of.pairs)  # [P, 1]

    def _labels(self, hidden_states: Tensor, layout: PackedLayout, starts: Tensor) -> Tensor:
        """The vector of each label, whose first token is given: `[T, H]` and `[B, C]` -> `[B, C, H]`."""
        if not self.scoring.averages:
            return hidden_states.index_select(0, starts.reshape(-1)).unflatten(0, starts.shape)
        firsts = layout.first_indices[:, None]  # [B, 1]
        following = torch.cat([starts[:, 1:], firsts], dim=1)  # [B, C]
        end = firsts + layout.lengths[:, None]  # [B, 1]
        # Padding is the sequence's first token, which is before a label.
        ends = torch.where(following > starts, following - self.scoring.after, end)  # [B, C]
        slots = layout.unpack[:, None]  # [B, 1, S], the packed index of each slot's token
        is_own = (slots >= starts[..., None]) & (slots < ends[..., None])  # [B, C, S]
        weights = (is_own & real_slots(layout)[:, None]).to(hidden_states.dtype)
        sums = weights @ to_slots(hidden_states, layout)  # [B, C, H]
        return sums / weights.sum(dim=-1, keepdim=True).clamp(min=1)


class Projector(nn.Module):
    """Two linear layers with an activation between."""

    def __init__(self, inputs: int, width: int, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(inputs, width), nn.Linear(width, inputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H]` -> `[..., H]`."""
        return self.linear_2(self.activation(self.linear_1(x)))


def make_head(config: BertConfig, head: Head) -> nn.Module:
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
            sparse = head.sparse or Sparse()
            if sparse.source == "tokens":
                return TokenWeights(config.hidden_size)
            return SparseEmbedding(make_masked_lm(config))
        case "hidden-states":
            return HiddenStates()
        case "zero-shot-ner":
            width = config.hidden_size
            max_width = head.label_prompt.max_width if head.label_prompt else None
            return WordLabelScores(width, width, 0, max_width)
        case "zero-shot-classification":
            return TextLabelScores(config.hidden_size, config.hidden_size, LabelScoring())


def make_masked_lm(config: BertConfig) -> nn.Module:
    """Return a new masked language model head: `MaskedLM`, or the family's own module."""
    return family_of(config).make_heads.get("masked_lm", MaskedLM)(config)


class EncoderWithHeads(nn.Module):
    """One encoder, its heads by name, and the manifest's description of each.

    encoder: one without a pooler, in place of a new one, whose initial weights take seconds
    """

    def __init__(
        self, config: BertConfig, heads: Mapping[str, Head], encoder: Bert | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.described = dict(heads)
        self.encoder = encoder or family_of(config).encoder(config, pooler=False)
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
        of: WordLabels | None = None,
    ) -> dict[str, Tensor]:
        """Return these heads' outputs, [B, C], [T, C], [M, V] or [P, K].

        positions: packed indices of mask tokens, [M]
        of: words and labels of heads for labels of a request, whose `token_type_ids` mark them
        """
        if of is not None:  # the marks of the text are odd, see `service.core.packing`
            is_segment = any(getattr(head, "has_segments", False) for head in self.heads.values())
            zeros = torch.zeros_like(token_type_ids)  # [T]
            token_type_ids = token_type_ids % 2 if is_segment else zeros
        hidden_states = self.encoder(input_ids, token_type_ids, position_ids, layout)  # [T, H]
        names = self.described if heads is None else heads
        inputs = (hidden_states, input_ids, layout, positions, of)
        return {name: self._output(name, *inputs) for name in names}

    def _output(
        self,
        name: str,
        hidden_states: Tensor,
        input_ids: Tensor,
        layout: PackedLayout,
        positions: Tensor | None,
        of: WordLabels | None,
    ) -> Tensor:
        head, words = self.heads[name], self.encoder.embeddings.word.weight  # [V, E]
        if isinstance(head, WordLabelScores | TextLabelScores):
            return head(hidden_states, layout, of)  # [P, K]
        if isinstance(head, SparseEmbedding):
            return head(hidden_states, words.to(hidden_states.dtype), layout)  # [B, V]
        if getattr(head, "reads_ids", False):
            return head(hidden_states, layout, input_ids)  # [B, C]
        if not self.described[name].per_mask:
            return head(hidden_states, layout)  # [B, C] or [T, C]
        at_masks = hidden_states if positions is None else hidden_states.index_select(0, positions)
        return head(at_masks, words.to(at_masks.dtype))  # [M, V]


def encoder_layers(encoder: nn.Module) -> Iterator[nn.Module]:
    """Yield the encoder's layers; ALBERT's are in groups."""
    for layer in encoder.layers:
        yield from layer if isinstance(layer, nn.ModuleList) else [layer]


def mix_layers(encoder: nn.Module, weights: Sequence[float], first: int) -> None:
    """Replace the encoder's output by a weighted mean of its hidden states, by forward hooks.

    weights: of the outputs of the layers from `first` on, where 0 is the embeddings' output
    """
    states: list[Tensor] = []  # [T, H] each

    def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
        states.append(output)

    def mix(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        kept = [*states[first:-1], output]  # a last norm follows the layers in some families
        states.clear()
        return sum(w * x for w, x in zip(weights, kept, strict=True)) / sum(weights)  # [T, H]

    for module in (encoder.embeddings, *encoder_layers(encoder)):
        module.register_forward_hook(keep)
    encoder.register_forward_hook(mix)


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
