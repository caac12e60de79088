"""Cohere's API where its client does not reach: answers, warnings and refusals."""

import pytest

from tests.service.api.dialects.conftest import MOST_INPUTS

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["Ada drew a comet.", "It rained in Turin."]
LONG = "word " * 600


async def test_embed(requests):
    """Version 1 has lists of numbers unless types are named; version 2 always has types."""
    vectors = (await requests.post("/embed", {"inputs": TEXTS}))["embeddings"]
    first = await requests.post("/cohere/v1/embed", {"texts": TEXTS})
    assert ("embeddings_floats", vectors, TEXTS) == (
        first["response_type"],
        first["embeddings"],
        first["texts"],
    )
    typed = {"texts": TEXTS, "embedding_types": ["ubinary", "base64"]}
    for version in ("v1", "v2"):
        found = await requests.post(f"/cohere/{version}/embed", typed)
        assert "embeddings_by_type" == found["response_type"]
        assert ["ubinary", "base64"] == [*found["embeddings"]]
    second = await requests.post("/cohere/v2/embed", {"texts": TEXTS})
    assert {"float": vectors} == second["embeddings"]
    assert ["1", "2"] == [one["meta"]["api_version"]["version"] for one in (first, second)]


async def test_long_texts(requests):
    """They are cut with a warning, or refused for NONE."""
    body = {"texts": ["a", LONG], "truncate": "END"}
    found = await requests.post("/cohere/v2/embed", body)
    assert ["texts[1]: cut to 512 tokens"] == found["meta"]["warnings"]
    status, refused = await requests.refuse("/cohere/v2/embed", {**body, "truncate": "NONE"})
    assert 400 == status
    assert "texts[1]" in refused["message"]


async def test_rerank(requests):
    """Documents are texts or objects, which an answer has whole; 100 documents are a search unit."""
    objects = [{"text": text, "title": str(place)} for place, text in enumerate(TEXTS)]
    body = {"query": "comets", "documents": objects, "return_documents": True}
    found = await requests.post("/cohere/v1/rerank", body)
    assert [objects[one["index"]] for one in found["results"]] == [
        one["document"] for one in found["results"]
    ]
    native = await requests.post("/rerank", {"query": "comets", "documents": TEXTS})
    expected = [(one["index"], one["score"]) for one in native["results"]]
    plain = await requests.post("/cohere/v2/rerank", {"query": "comets", "documents": TEXTS})
    for ranked in (found, plain):
        assert expected == [(one["index"], one["relevance_score"]) for one in ranked["results"]]
        assert {"search_units": 1} == ranked["meta"]["billed_units"]
    assert "document" not in plain["results"][0]


async def test_tokens(requests):
    """Tokens are without special tokens, with their names."""
    found = await requests.post("/cohere/v1/tokenize", {"text": TEXTS[0]})
    native = await requests.post("/tokenize", {"inputs": TEXTS[0]})
    own = [one for one in native["results"][0]["tokens"] if one["sequence"] is not None]
    assert [one["id"] for one in own] == found["tokens"]
    assert [one["token"] for one in own] == found["token_strings"]
    text = await requests.post("/cohere/v1/detokenize", {"tokens": found["tokens"]})
    assert text["text"]


async def test_models(requests):
    """Each model is listed with the endpoints that it has heads for."""
    (model,) = (await requests.get("/cohere/v1/models"))["models"]
    assert ("tasks@1", ["embed", "rerank"], 512, None) == (
        model["name"],
        model["endpoints"],
        model["context_length"],
        model["tokenizer_url"],
    )
    assert model == await requests.get("/cohere/v1/models/tasks")


@pytest.mark.parametrize(
    ("path", "body", "status", "name"),
    [
        ("v2/embed", {}, 400, "texts"),
        ("v2/embed", {"texts": ["a"], "inputs": [{"content": [{}]}]}, 400, "inputs"),
        ("v2/embed", {"texts": ["a"], "images": ["b"]}, 400, "images: not supported"),
        ("v2/embed", {"texts": ["a"], "truncate": "START"}, 400, "truncate"),
        ("v2/embed", {"texts": ["a"], "input_type": "image"}, 400, "input_type"),
        ("v2/embed", {"texts": ["a"], "max_tokens": 8}, 400, "max_tokens"),
        ("v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, 400, "int8"),
        ("v2/embed", {"texts": ["a"], "embedding_types": []}, 400, "embedding_types"),
        ("v2/embed", {"texts": ["a"], "output_dimension": 65}, 400, "65"),
        ("v2/embed", {"texts": ["a"], "model": "embed-v4.0"}, 404, "embed-v4.0"),
        ("v2/embed", {"texts": ["a"] * (MOST_INPUTS + 1)}, 400, "texts"),
        ("v2/embed", [], 400, "object"),
        ("v2/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("v2/rerank", {"query": "a", "documents": [{"title": "b"}]}, 400, "documents"),
        ("v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["c"]}, 400, "rank_fields"),
        ("v1/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 1}, 400, "chunks"),
        (
            "v2/rerank",
            {"query": "a", "documents": ["b"], "relevant_spans": {"mode": "enabled"}},
            400,
            "relevant_spans.mode",
        ),
        ("v1/tokenize", {"text": ""}, 400, "text"),
        ("v1/detokenize", {"tokens": [99999]}, 400, "99999"),
        ("v1/classify", {"inputs": ["a"]}, 404, "/cohere/v1/classify"),
    ],
)
async def test_refusals(requests, path, body, status, name):
    """An error has a message alone, which names the field or the value."""
    found, refused = await requests.refuse(f"/cohere/{path}", body)
    assert (status, {"message"}) == (found, set(refused))
    assert name in refused["message"]
