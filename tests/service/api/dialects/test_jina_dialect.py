"""Jina's reranking, and what its embeddings add to OpenAI's."""

import numpy as np
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["Ada drew a comet.", "It rained in Turin."]


async def test_rerank(requests):
    """Documents are texts or objects with a text; an answer has their texts where the request wants them."""
    native = await requests.post("/rerank", {"query": "comets", "documents": TEXTS})
    expected = [(one["index"], one["score"]) for one in native["results"]]
    for documents in (TEXTS, [{"text": text} for text in TEXTS]):
        body = {"query": "comets", "documents": documents, "return_documents": True}
        found = await requests.post("/v1/rerank", body)
        results = found["results"]
        assert expected == [(one["index"], one["relevance_score"]) for one in results]
        assert [{"text": TEXTS[index]} for index, _ in expected] == [
            one["document"] for one in results
        ]
        assert found["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "status", "name"),
    [
        ({}, 422, "query"),
        ({"query": "a", "documents": [{"image": "b"}]}, 422, "documents"),
        ({"query": "a", "documents": ["b"], "return_embeddings": True}, 422, "return_embeddings"),
        ({"query": "a", "documents": ["b"], "model": "jina-reranker-v3"}, 404, "jina-reranker-v3"),
    ],
)
async def test_refusals(requests, body, status, name):
    """An error is a text."""
    found, refused = await requests.refuse("/v1/rerank", body)
    assert (status, {"detail"}) == (found, set(refused))
    assert name in refused["detail"]


@pytest.mark.parametrize(
    ("asked", "native"),
    [
        ({"task": "retrieval.query"}, {"input_type": "query"}),
        ({"task": "separation", "embedding_type": "float"}, {}),
        ({"normalized": False}, {"normalize": False}),
        ({"embedding_type": "ubinary", "late_chunking": False}, {"output_dtype": "ubinary"}),
    ],
)
async def test_embeddings(requests, asked, native):
    """The fields of Jina's API select what the native fields do."""
    expected = (await requests.post("/embed", {"inputs": TEXTS, **native}))["embeddings"]
    found = await requests.post("/v1/embeddings", {"input": TEXTS, **asked})
    np.testing.assert_allclose(expected, [one["embedding"] for one in found["data"]], atol=1e-6)


@pytest.mark.parametrize(
    "asked",
    [
        {"task": "translation"},
        {"late_chunking": True},
        {"embedding_type": "int8"},
        {"truncate": False, "input": "word " * 600},
        {"input": [{"image": "a"}]},
    ],
)
async def test_refused_embeddings(requests, asked):
    """What the service does not have is refused by its name."""
    status, refused = await requests.refuse("/v1/embeddings", {"input": "a", **asked})
    assert (400, True) == (
        status,
        next(iter(asked)) in refused["error"]["message"] or "input" in asked,
    )
