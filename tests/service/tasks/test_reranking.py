"""The head that ranks documents where a request selects none."""

from typing import Any

import pytest

from service.tasks.reranking import select_ranking_head
from tests.service.tasks.helpers import engine

CROSS = {"task": "classification", "labels": ["relevance"], "pooling": None, "dimensions": None}
CLASSES = {**CROSS, "labels": ["good", "bad"]}
TOKENS = {"task": "late-interaction", "pooling": None, "late_interaction": {}}
BOTH = ("late-interaction", "embedding")


@pytest.mark.parametrize(
    ("heads", "tasks", "expected"),
    [
        ({"classes": CLASSES, "cross": CROSS, "vectors": {}}, BOTH, None),
        ({"vectors": {}, "tokens": TOKENS}, BOTH, "tokens"),
        ({"classes": CLASSES, "first": {}, "second": {}}, BOTH, "first"),
        ({"vectors": {}}, ("late-interaction",), None),
        ({"classes": CLASSES}, BOTH, None),
    ],
)
def test_ranking_heads(heads: dict[str, Any], tasks: Any, expected: str | None) -> None:
    """A cross-encoder ranks, selected by None; else the first head of the first of the tasks."""
    assert expected == select_ranking_head(engine(**heads), tasks)
