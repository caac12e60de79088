"""The default bundle answers the examples of the page and of the API documentation rightly, and by a margin."""

import json
import re
from typing import Any

import httpx
import pytest

from service.api.openapi import EXAMPLES, ClassifyRequest, NerRequest, QaRequest, RerankRequest
from tests.conftest import ROOT

pytestmark = pytest.mark.e2e

FILE = ROOT / "service" / "api" / "static" / "examples.js"
LEAST = 0.7  # score of a right label, and of an entity
MARGIN = 0.2  # of the right answer's score over the second one's
SIMILARITY_MARGIN = 0.1  # of the right text's cosine over the next one's
RANK_MARGIN = 0.05  # of the right document's score over the second one's


def page_examples() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the examples of the page, by box and by name: the module is JSON but for bare keys and last commas."""
    text = FILE.read_text(encoding="utf-8").split("EXAMPLES = ")[1].rstrip().removesuffix(";")
    text = re.sub(r"^(\s+)([\w-]+):", r'\1"\2":', text, flags=re.MULTILINE)
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(re.sub(r",(\s*[}\]])", r"\1", text))
    return found


PAGE = page_examples()


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(url + path, json=body).raise_for_status().json()["results"]


@pytest.mark.parametrize(
    ("head", "body", "labels"),
    [
        ("sentiment", {"inputs": "What a wonderful film!"}, ["positive"]),
        ("sentiment", PAGE["classify"]["A happy guest"], ["positive"]),
        ("sentiment", PAGE["classify"]["A broken kettle"], ["negative"]),
        ("topic", PAGE["classify"]["From the news"], ["Business"]),
        ("sentiment", PAGE["analyze"]["A happy guest"], ["positive"]),
        ("sentiment", EXAMPLES[ClassifyRequest]["one text"], ["negative"]),
        ("sentiment", EXAMPLES[ClassifyRequest]["several texts, best label each"], ["positive", "negative"]),
        ("sentiment", EXAMPLES[ClassifyRequest]["pairs of texts"], ["positive", "negative"]),
    ],
)  # fmt: skip
def test_labels(mini_url, head, body, labels):
    best = [result[0] for result in post(mini_url, "/classify", {**body, "head": head})]
    assert [each["label"] for each in best] == labels
    assert min(each["score"] for each in best) >= LEAST


@pytest.mark.parametrize(
    ("body", "entities"),
    [
        (
            PAGE["entities"]["A laboratory"],
            "Marie Curie/PER, Warsaw/LOC, Paris/LOC, Pierre Curie/PER, Nobel Prize/MISC",
        ),
        (PAGE["entities"]["An engine"], "Ada Lovelace/PER, Charles Babbage/PER, London/LOC, Oxford/LOC"),
        (PAGE["entities"]["With emoji"], "Anna Schmidt/PER, Siemens/ORG, Munich/LOC, Microsoft/ORG, Oslo/LOC"),
        (PAGE["analyze"]["A happy guest"], "Marta Lindqvist/PER, Oslo/LOC"),
        (EXAMPLES[NerRequest]["entities"], "Ada Lovelace/PER, Charles Babbage/PER, London/LOC"),
        (EXAMPLES[NerRequest]["every token"] | {"aggregation_strategy": "first"}, "Piraeus/LOC, Naxos/LOC"),
    ],
)  # fmt: skip
def test_entities(mini_url, body, entities):
    [found] = post(mini_url, "/ner", body)
    assert ", ".join(f"{each['word']}/{each['entity_group']}" for each in found) == entities
    assert min(each["score"] for each in found) >= LEAST


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (PAGE["answers"]["A lighthouse"], "1923"),
        (PAGE["answers"]["A bridge"], "Ines Valdor"),
        (PAGE["answers"]["No answer"], ""),
        (EXAMPLES[QaRequest]["one question"], "at six o'clock"),
        (EXAMPLES[QaRequest]["several questions, or no answer"]["inputs"][0], "Marta Silva"),
        (EXAMPLES[QaRequest]["several questions, or no answer"]["inputs"][1] | {"handle_impossible_answer": True}, ""),
    ],
)  # fmt: skip
def test_answers(mini_url, body, answer):
    [[best, second]] = post(mini_url, "/qa", {**body, "top_k": 2})
    assert best["answer"] == answer
    assert best["score"] >= second["score"] + MARGIN


@pytest.mark.parametrize("name", list(PAGE["similarity"]))
def test_similar_texts(mini_url, name):
    """The second text of the list means the same as the first."""
    source, same, *others = PAGE["similarity"][name]["inputs"].split("\n")
    [best, *rest] = post(mini_url, "/similarity", {"source": source, "inputs": [same, *others]})
    assert best >= max(rest) + SIMILARITY_MARGIN


@pytest.mark.parametrize(
    ("body", "right"),
    [
        (PAGE["rerank"]["A lost card"], 0),
        (PAGE["rerank"]["A garden"], 0),
        (EXAMPLES[RerankRequest]["by the vectors of an embedding head"], 1),
    ],
)
def test_ranked_documents(mini_url, body, right):
    documents = body["documents"]
    if isinstance(documents, str):  # the page has one document a line
        documents = documents.split("\n")
    fields = {"query": body["query"], "documents": documents, "head": "embeddings"}
    best, second, *_ = post(mini_url, "/rerank", fields)
    assert best["index"] == right
    assert best["score"] >= second["score"] + RANK_MARGIN
