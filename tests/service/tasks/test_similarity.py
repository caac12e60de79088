"""The two sides of a comparison get the prompts and heads of their input types."""

from typing import Any

import numpy as np
import pytest

from service.tasks.similarity import Similarity, VectorRanking
from tests.service.tasks.helpers import WORDS, engine

PROMPTS = {"query": "query: ", "document": "passage: "}


def read(made: Any, task: Similarity) -> list[list[str]]:
    """The words of each text and, last, of the source."""
    items = task.plan(made, ()).encode(slice(0, len(task.inputs) + 1))
    return [[WORDS[index] for index in item.windows[0].input_ids[1:-1]] for item in items]


def test_prompts():
    """The source is a query and the texts are documents, or all have the default prompt."""
    made = engine(vectors={"prompts": PROMPTS, "default_prompt": "document"})
    sides = read(made, VectorRanking(source="sea", inputs=["ship", "sea"]))
    assert [["passage:", "ship"], ["passage:", "sea"], ["query:", "sea"]] == sides
    same = read(made, Similarity(source="sea", inputs=["ship"]))
    assert [["passage:", "ship"], ["passage:", "sea"]] == same


@pytest.mark.parametrize("named", [(), ("document",), ("query",)])
def test_heads(named):
    """Each side has the vector of its own head, with either head named or none."""
    made = engine(document={"input_type": "document"}, query={"input_type": "query"})
    plan = VectorRanking(source="sea", inputs=["ship"]).plan(made, named)
    assert ("document", "query") == plan.heads
    items = plan.encode(slice(0, 2))
    outputs = [{"document": np.float32([1, 0, 0, 0]), "query": np.float32([0, 1, 0, 0])}]
    assert [1, 0, 0, 0] == plan.decode(0, items[0], outputs).tolist()
    assert [0, 1, 0, 0] == plan.decode(1, items[1], outputs).tolist()
