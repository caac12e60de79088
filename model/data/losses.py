"""The losses of heads, from the outputs of a batch and its labels; `model/training/distillation.py` has further ones.

A loss of embeddings has its name in CONTRASTS (of related texts) or SCORED (of scored pairs).

Shapes as in `model/bert.py`, and n tokens of a window, D numbers of a vector.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from model.data.head_rows import SCALE, HeadSettings
from model.heads import IGNORE_INDEX
from service.core.encode import Encoding

# Distances of two vectors `[..., D]`, and the default margin of each.
TRIPLET_DISTANCES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "euclidean": (lambda a, b: torch.linalg.vector_norm(a - b, dim=-1), 1.0),
    "cosine": (lambda a, b: 1 - F.cosine_similarity(a, b, dim=-1), 0.2),
}


@dataclass(frozen=True)
class Batch:
    """Encodings and their examples' labels.

    In a batch of pairs, the encodings are all first texts, all second texts, and the negatives of each example.
    """

    encodings: list[Encoding]
    labels: list[NDArray[Any]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.encodings))


class Loss(NamedTuple):
    """A mean loss, and the loss of a uniform prediction, by which losses of several heads are divided."""

    value: Tensor
    uniform: float


def uniform_loss(choices: float) -> float:
    """Return the cross-entropy of a uniform prediction over `choices`, in nats."""
    return math.log(max(choices, 2))


def _joined(batch: Batch, logits: Tensor, join: Callable[..., NDArray[Any]] = np.stack) -> Tensor:
    return torch.as_tensor(join(batch.labels), device=logits.device)


def text_loss(
    logits: Tensor, batch: Batch, problem_type: str | None, weights: Tensor | None = None
) -> Loss:
    """Return the loss of logits [B, C]: cross-entropy (binary for several labels or a single one), or squared error.

    weights: of each label [C]; of its occurrences, where labels may hold together
    """
    labels = _joined(batch, logits)
    weights = None if weights is None else weights.to(logits.device)
    if problem_type == "regression":
        return Loss(F.mse_loss(logits, labels), 1.0)
    if problem_type == "multi_label_classification" or logits.shape[1] == 1:
        loss = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights)
        return Loss(loss, uniform_loss(2))
    return Loss(F.cross_entropy(logits, labels, weights), uniform_loss(logits.shape[1]))


def token_loss(logits: Tensor, batch: Batch) -> Loss:
    """Return the loss of logits [T, C]: cross-entropy at every token of the text."""
    labels = tagged(batch, logits)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
    return Loss(loss, uniform_loss(logits.shape[1]))


def tagged(batch: Batch, logits: Tensor) -> Tensor:
    """Return the labels of all tokens `[T]`, IGNORE_INDEX at tokens without one."""
    return _joined(batch, logits, np.concatenate)


def candidates(window: Encoding) -> NDArray[np.bool]:
    """Return which tokens, `[n]`, may start or end an answer: the context's, and [CLS] for no answer."""
    is_candidate = (window.sequence == 1) & (window.offsets[:, 0] < window.offsets[:, 1])
    is_candidate[0] = True
    return is_candidate


def span_loss(logits: Tensor, batch: Batch) -> Loss:
    """Return the loss of logits [T, 2]: cross-entropy of start and end, among the candidates."""
    slots, choices = among_candidates(logits, batch)
    return Loss(F.cross_entropy(slots, _joined(batch, logits)), uniform_loss(choices))


def among_candidates(logits: Tensor, batch: Batch) -> tuple[Tensor, float]:
    """Return logits `[T, 2]` as `[B, S, 2]`, minus infinity at other tokens; and the mean number of candidates."""
    is_candidate = torch.as_tensor(
        np.concatenate([candidates(window) for window in batch.encodings])
    )
    logits = logits.masked_fill(~is_candidate.to(logits.device)[:, None], -math.inf)
    sequences = logits.split([len(window) for window in batch.encodings])
    slots = pad_sequence(sequences, batch_first=True, padding_value=-math.inf)
    return slots, int(is_candidate.sum()) / len(sequences)


def ranking_loss(
    vectors: Tensor, batch: Batch, scale: float = SCALE, symmetric: bool = True
) -> Loss:
    """Return the loss of vectors [2B + N, D]: each anchor ranks its positive among all positives and N negatives.

    Multiple negatives ranking (Henderson et al. 2017): cross-entropy of `scale` times the cosines.
    symmetric: the mean with the loss of positives, each of which ranks its anchor among all anchors.
    Candidates that are right for an anchor are left out: positives of its row or of an equal anchor,
    and texts that equal its positive.
    """
    size = len(batch.labels)
    first, others = F.normalize(vectors, dim=1).split([size, len(vectors) - size])
    scores = scale * first @ others.T  # [B, B + N]
    numbers, anchors, positives = np.stack([labels[:3] for labels in batch.labels], axis=1)
    negatives = np.concatenate([labels[3:] for labels in batch.labels])
    right = positives[:, None] == np.concatenate([positives, negatives])
    right[:, :size] |= (numbers[:, None] == numbers) | (anchors[:, None] == anchors)
    np.fill_diagonal(right, False)
    scores = scores.masked_fill(torch.as_tensor(right, device=scores.device), -math.inf)
    own = torch.arange(size, device=scores.device)
    forward = Loss(F.cross_entropy(scores, own), uniform_loss(scores.shape[1]))
    if not symmetric:
        return forward
    backward = F.cross_entropy(scores[:, :size].T, own)
    return Loss((forward.value + backward) / 2, (forward.uniform + uniform_loss(size)) / 2)


def triplet_loss(
    vectors: Tensor, batch: Batch, distance: str, margin: float | None, normalize: bool
) -> Loss:
    """Return the loss of vectors [2B + N, D]: negatives must be farther from the anchor than its positive by a margin.

    The mean of max(0, margin + distance to the positive - distance to the negative) (Schroff et al.
    2015; Reimers and Gurevych 2019). normalize: of unit vectors, for heads that normalize
    """
    measure, default = TRIPLET_DISTANCES[distance]
    margin = default if margin is None else margin
    size = len(batch.labels)
    vectors = F.normalize(vectors, dim=1) if normalize else vectors
    anchors, positives, negatives = vectors.split([size, size, len(vectors) - 2 * size])
    counts = torch.as_tensor([len(labels) - 3 for labels in batch.labels], device=vectors.device)
    near = measure(anchors, positives).repeat_interleave(counts)
    far = measure(anchors.repeat_interleave(counts, dim=0), negatives)
    return Loss(F.relu(margin + near - far).mean(), margin)


def _ranking(s: HeadSettings) -> Callable[[Tensor, Batch], Loss]:
    return functools.partial(ranking_loss, scale=s.scale, symmetric=s.symmetric)


def _triplet(s: HeadSettings) -> Callable[[Tensor, Batch], Loss]:
    return functools.partial(
        triplet_loss, distance=s.distance, margin=s.margin, normalize=s.normalize
    )


CONTRASTS = {"ranking": _ranking, "triplet": _triplet}


def cosent_loss(vectors: Tensor, batch: Batch) -> Loss:
    """Return the loss of vectors [2B, D]: a pair with a higher score must have a higher cosine.

    CoSENT (Su 2022): log(1 + sum of exp(20 * (cosine of the lower score - cosine of the higher score))).
    """
    cosines = F.cosine_similarity(*vectors.chunk(2))
    scores = _joined(batch, vectors)
    excess = SCALE * (cosines[:, None] - cosines)  # [B, B] row minus column
    wrong = excess[scores[:, None] < scores]
    terms = torch.cat([wrong.new_zeros(1), wrong])
    return Loss(torch.logsumexp(terms, dim=0), uniform_loss(len(terms)))


def cosine_loss(vectors: Tensor, batch: Batch) -> Loss:
    """Return the loss of vectors [2B, D]: squared error of the cosine against the score."""
    cosines = F.cosine_similarity(*vectors.chunk(2))
    return Loss(F.mse_loss(cosines, _joined(batch, vectors)), 1.0)


def token_weights(logits: Tensor) -> Tensor:
    """Return the weights of tokens, log(1 + relu(logit)) (SPLADE, Formal et al. 2021)."""
    return torch.log1p(F.relu(logits))


def sparse_loss(logits: Tensor, batch: Batch, loss: Callable[[Tensor, Batch], Loss]) -> Loss:
    """Return the loss of the weights of tokens, from logits [2B + N, V]."""
    return loss(token_weights(logits), batch)


@dataclass(frozen=True)
class FlopsRegularizer:
    """The FLOPS regularizer of sparse embeddings (Paria et al. 2020), with the schedule of its weight.

    weight: after the ramp
    ramp: share of the steps over which the weight rises from 0, by the square of the progress (Formal et al. 2021); 0
        for no rise
    """

    weight: float
    ramp: float

    def weight_at(self, progress: float) -> float:
        """Return the weight; progress is from 0 at the first step of the run to 1 at the last."""
        return self.weight * min(1.0, progress / self.ramp) ** 2 if self.ramp else self.weight

    def loss(self, logits: Tensor) -> Loss:
        """Return the sum over the vocabulary of the squared mean weight, from logits [2B + N, V].

        It is the operations of a dot product of two texts. It makes most weights 0.
        """
        return Loss(token_weights(logits).mean(dim=0).square().sum(), 1.0)


SCORED = {"cosent": cosent_loss, "cosine": cosine_loss}
