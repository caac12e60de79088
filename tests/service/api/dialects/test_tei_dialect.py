"""The API of text-embeddings-inference where its clients do not reach."""

import numpy as np
import pytest

from service.tasks.embedding import Embedding
from service.tasks.late_interaction import TokenEmbedding
from service.tasks.sparse_embedding import SparseEmbedding
from tests.service.fakes import VECTORS


@pytest.mark.parametrize(
    ("asked", "input_type"),
    [({}, "document"), ({"prompt_name": "query"}, "query"), ({"truncate": False}, "document")],
)
async def test_embed_all(client, engine, asked, input_type):
    """The vectors of all tokens of each text, by the head of late interaction."""
    response = await client.post("/tei/embed_all", json={"inputs": ["a", "b"], **asked})
    assert [VECTORS.tolist()] * 2 == response.json()
    task = engine.asked
    assert isinstance(task, TokenEmbedding)
    assert (input_type, asked.get("truncate", True)) == (task.input_type, task.truncate)


async def test_embed_sparse(client, engine):
    """The weights of tokens of each text, by the sparse head."""
    body = {"inputs": ["a", "b"], "truncate": False, "prompt_name": None}
    response = await client.post("/tei/embed_sparse", json=body)
    expected = [{"index": 2, "value": 0.5}, {"index": 5, "value": 1.25}]
    assert [expected] * 2 == response.json()
    assert SparseEmbedding(inputs=["a", "b"], truncate=False) == engine.asked


async def test_prompts(client, engine):
    """A request may name a prompt of the head."""
    response = await client.post("/tei/embed", json={"inputs": "a", "prompt_name": "query"})
    assert 200 == response.status_code
    assert isinstance(engine.asked, Embedding)
    assert "query" == engine.asked.prompt_name
    refused = await client.post("/tei/embed_all", json={"inputs": "a", "prompt_name": "passage"})
    assert (422, "Validation") == (refused.status_code, refused.json()["error_type"])
    assert "prompt_name" in refused.json()["error"]


@pytest.mark.asyncio(loop_scope="module")
async def test_vectors_and_weights_of_tokens(requests):
    """They equal the answers of the native routes."""
    body = {"inputs": ["Ada drew a comet.", "It rained in Turin."]}
    vectors = (await requests.post("/embed-tokens", body))["embeddings"]
    for expected, found in zip(vectors, await requests.post("/tei/embed_all", body), strict=True):
        np.testing.assert_allclose(expected, found, atol=1e-6)
    weights = (await requests.post("/embed-sparse", body))["embeddings"]
    for one, found in zip(weights, await requests.post("/tei/embed_sparse", body), strict=True):
        assert one["indices"] == [each["index"] for each in found]
        np.testing.assert_allclose(one["values"], [each["value"] for each in found], atol=1e-6)
