"""Scores through HTTP of the default bundle's heads."""

import httpx
import pytest

from benchmarks import scores

pytestmark = pytest.mark.e2e


def test_a_service_describes_its_heads_as_the_reader_of_rows_needs_them(mini_url: str) -> None:
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
    assert ["negative", "positive"] == list(heads["sentiment"].labels)
