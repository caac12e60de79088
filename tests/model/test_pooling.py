"""Each way to pool gives sentence-transformers' vectors, in any batch."""

from typing import Any, get_args

import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Pooling

from model.attention import PackedLayout
from model.heads import SentenceEmbedding
from model.pooling import POOLINGS
from service.core import packing
from service.core.manifest import PoolingMode

LENGTHS = [3, 1, 9, 5]
WIDTH = 6
TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}
CASES = [*POOLINGS, ("mean", "cls"), ("lasttoken", "max", "weightedmean")]


def test_modes():
    """Manifests, PyTorch and sentence-transformers have the same modes."""
    assert {*POOLINGS} == {*get_args(PoolingMode)} == {*Pooling.POOLING_MODES}


@pytest.mark.parametrize("pooling", CASES)
def test_sentence_transformers(pooling):
    """Of packed states, and of a sequence by itself."""
    states = torch.randn(sum(LENGTHS), WIDTH) - 3  # a padding slot of zeros would be the maximum
    layout = packing.make_layout(LENGTHS)
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    padded = torch.full((len(LENGTHS), 9, WIDTH), 7.0)
    padded[mask] = states
    features = {"token_embeddings": padded, "attention_mask": mask.long()}
    expected = Pooling(WIDTH, pooling)(features)["sentence_embedding"]
    head = SentenceEmbedding(pooling)

    torch.testing.assert_close(head(states, PackedLayout.of(layout)), expected, **TOLERANCE)
    for row, part in enumerate(states.split(LENGTHS)):
        alone = head(part, PackedLayout.of(packing.make_layout([len(part)])))
        torch.testing.assert_close(alone[0], expected[row], **TOLERANCE)
