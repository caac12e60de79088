"""Scores through HTTP of the default bundle's heads."""

import httpx
import numpy as np
import pytest

from benchmarks import scores

pytestmark = pytest.mark.e2e


def test_a_service_describes_its_heads_as_the_reader_of_rows_needs_them(mini_url):
    model = httpx.get(f"{mini_url}/models").raise_for_status().json()["models"][0]
    heads = {name: scores.read_head(head) for name, head in model["heads"].items()}
    tasks = {name: head.task for name, head in heads.items()}
    assert tasks == {
        "sentiment": "classification",
        "topic": "classification",
        "entities": "ner",
        "answers": "qa",
        "embeddings": "embedding",
    }
    assert ["negative", "neutral", "positive"] == list(heads["sentiment"].labels)


def test_requests_of_a_sender_are_answered_in_order(mini_url):
    """More inputs than one request has, for each kind of path."""
    texts = ["A delight from start to finish.", "A dull and careless film."] * 20
    with httpx.Client(base_url=mini_url) as client:
        labels = scores.Sender(client, "sentiment")("/classify", texts)
        vectors = scores.Sender(client, "embeddings")("/embed", texts)
    assert ["positive", "negative"] * 20 == [result[0]["label"] for result in labels]
    np.testing.assert_allclose(vectors, vectors[:2] * 20, atol=1e-5)
    assert np.abs(np.subtract(*vectors[:2])).max() > 0.01
