"""Losses of embeddings and of graded pairs, and their gradients, equal sentence-transformers' values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, cross_encoder
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.losses import TripletDistanceMetric
from torch import Tensor

from model.data import losses as model_losses
from model.data.losses import Batch, Loss

SIZE = 6
TOLERANCE = {"rtol": 0.0, "atol": 1e-6}
SCORES = np.float32([0.2, 0.9, 0.2, 0.5, 1.0, 0.0])

Ours = Callable[[Tensor, Batch], Loss]


def vectors(columns: int) -> Tensor:
    """Random vectors, of lengths around 2, in columns below each other."""
    generator = torch.Generator().manual_seed(columns)
    return torch.randn(columns * SIZE, 5, generator=generator, dtype=torch.float64)


def texts(columns: int) -> list[Any]:
    """Labels of rows of different texts: the row and its texts, by number."""
    return [np.asarray([row, *range(100 * row, 100 * row + columns)]) for row in range(SIZE)]


def by_rows(columns: list[Tensor]) -> Tensor:
    """As a batch has them: anchors, positives, then each row's negatives together."""
    negatives = [torch.stack(columns[2:], dim=1).flatten(0, 1)] if columns[2:] else []
    return torch.cat([*columns[:2], *negatives])


def ranking(**options: Any) -> Ours:
    return lambda v, batch: model_losses.ranking_loss(v, batch, **options)


def triplet(distance: str, margin: float, normalize: bool = False) -> Ours:
    return lambda v, batch: model_losses.triplet_loss(v, batch, distance, margin, normalize)


BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
COSINE = {"distance_metric": TripletDistanceMetric.COSINE}
RANKING = losses.MultipleNegativesRankingLoss

CASES: dict[str, tuple[int, Ours, Any]] = {
    "ranking": (2, ranking(symmetric=False), RANKING(None)),
    "ranking, scale 7": (2, ranking(symmetric=False, scale=7.0), RANKING(None, scale=7.0)),
    "ranking, symmetric": (2, ranking(), RANKING(None, **BOTH)),
    "ranking, a negative": (3, ranking(symmetric=False), RANKING(None)),
    "ranking, three negatives": (5, ranking(symmetric=False), RANKING(None)),
    "ranking, negatives, symmetric": (4, ranking(), RANKING(None, **BOTH)),
    "triplet": (3, triplet("euclidean", 5.0), losses.TripletLoss(None)),
    "triplet, margin 1": (3, triplet("euclidean", 1.0), losses.TripletLoss(None, triplet_margin=1.0)),
    "triplet, cosine": (3, triplet("cosine", 0.2), losses.TripletLoss(None, **COSINE, triplet_margin=0.2)),
    "cosent": (2, model_losses.cosent_loss, losses.CoSENTLoss(None)),
    "cosine": (2, model_losses.cosine_loss, losses.CosineSimilarityLoss(None)),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "ours", "peer"), CASES.values(), ids=CASES)
def test_losses_of_embeddings(columns, ours, peer):
    """Value and gradient, to 1e-6."""
    scored = ours in model_losses.SCORED.values()
    labels = [*SCORES] if scored else texts(columns)
    own = vectors(columns).requires_grad_()
    value, _ = ours(by_rows([*own.split(SIZE)]), Batch([], labels))
    theirs = vectors(columns).requires_grad_()
    expected = peer.compute_loss_from_embeddings([*theirs.split(SIZE)], torch.as_tensor(SCORES))
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected.double(), **TOLERANCE)
    torch.testing.assert_close(own.grad, theirs.grad, **TOLERANCE)
    assert own.grad.abs().max() > 1e-2


def test_triplets_are_of_vectors_as_served():
    """Vectors have length 1 if the head's setting normalizes them."""
    peer = losses.TripletLoss(None, triplet_margin=1.0)
    unit = torch.nn.functional.normalize(vectors(3), dim=1)
    expected = peer.compute_loss_from_embeddings([*unit.split(SIZE)], torch.zeros(SIZE))
    found = triplet("euclidean", 1.0, normalize=True)(vectors(3), Batch([], texts(3)))
    torch.testing.assert_close(found.value, expected, **TOLERANCE)


class Logits(CrossEncoder):
    """A CrossEncoder that has given these scores to whatever pairs."""

    def __init__(self, logits: Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.logits = logits

    num_labels = 1
    device = torch.device("cpu")

    def preprocess(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        return {}

    def forward(self, _: Any, **__: Any) -> dict[str, Tensor]:
        return {"scores": self.logits}


@pytest.mark.parametrize(
    ("problem_type", "peer"),
    [
        (None, cross_encoder.losses.BinaryCrossEntropyLoss),
        ("single_label_classification", cross_encoder.losses.BinaryCrossEntropyLoss),
        ("regression", cross_encoder.losses.MSELoss),
    ],
)
def test_losses_of_graded_pairs(problem_type, peer):
    """A single label by cross-entropy, a regression by squared error."""
    own = vectors(1)[:, :1].float().requires_grad_()
    labels = [np.float32([score]) for score in SCORES]
    value, _ = model_losses.text_loss(own, Batch([], labels), problem_type)
    theirs = vectors(1)[:, :1].float().requires_grad_()
    pairs = [["a"] * SIZE, ["b"] * SIZE]
    expected = peer(Logits(theirs))(pairs, torch.as_tensor(SCORES))
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected, **TOLERANCE)
    torch.testing.assert_close(own.grad, theirs.grad, **TOLERANCE)
