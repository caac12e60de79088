"""The heads that rank documents: where a request selects none, and where it weighs several."""

import pytest

from service.errors import InvalidInput, UnknownHead
from service.tasks.reranking import Reranking, make_ranking, select_ranking_head
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


ASKED = {"query": "sea", "documents": ["ship", "sea"]}


def test_weighed_heads():
    """They read the documents and the query once, together."""
    made = engine(vectors={}, tokens=TOKENS)
    asked = Reranking(**ASKED, weights={"tokens": 1.0, "vectors": 3})

    plan = make_ranking(made, None, asked).plan(made, ())

    assert ("tokens", "vectors") == plan.heads
    assert 3 == len(plan.sizes) == len(plan.encode(slice(0, 3)))


@pytest.mark.parametrize(
    ("weights", "kind", "reason"),
    [
        ({"cross": 1.0}, UnknownHead, "no head 'cross' that gives vectors; these do: plain"),
        ({"plain": 0.5, "prompted": 0.5}, InvalidInput, "prompted has prompts, prefixes"),
        ({"plain": 0.5, "cut": 0.5}, InvalidInput, "cut has prompts, prefixes or lengths"),
        ({"plain": 0.0}, InvalidInput, "above 0"),
        ({}, InvalidInput, "above 0"),
    ],
)
def test_refused_weights(weights, kind, reason):
    """Heads without vectors, heads that read other tokens, and weights that are all 0."""
    made = engine(
        plain={},
        prompted={"prompts": {"query": "query: "}},
        cut={**TOKENS, "late_interaction": {"document_length": 8}},
        cross=CROSS,
    )
    with pytest.raises(kind, match=reason) as caught:
        make_ranking(made, None, Reranking(**ASKED, weights=weights))
    assert "weights" == caught.value.param
