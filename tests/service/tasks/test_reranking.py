"""The head that ranks documents where a request selects none."""

import pytest

from service.tasks.reranking import select_ranking_head
from tests.service.tasks.helpers import engine

CROSS = {"task": "classification", "labels": ["relevance"], "pooling": None, "dimensions": None}
CLASSES = {**CROSS, "labels": ["good", "bad"]}
TOKENS = {"task": "late-interaction", "pooling": None, "late_interaction": {}}


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ({"classes": CLASSES, "cross": CROSS, "vectors": {}}, None),
        ({"vectors": {}, "tokens": TOKENS}, "tokens"),
        ({"classes": CLASSES, "first": {}, "second": {}}, "first"),
        ({"classes": CLASSES}, None),
    ],
)
def test_ranking_heads(heads, expected):
    """A cross-encoder ranks, selected by None; else the first head of the first task that gives vectors."""
    assert expected == select_ranking_head(engine(**heads))
