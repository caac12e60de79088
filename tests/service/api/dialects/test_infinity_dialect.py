"""infinity's API: answers, and errors in its three forms."""

import base64

import numpy as np
import pytest

from tests.service.api.dialects.conftest import MOST_INPUTS

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["Ada drew a comet.", "It rained in Turin."]


async def test_embeddings(requests):
    """Vectors as numbers or base64, by what infinity's own client sends for the defaults."""
    vectors = (await requests.post("/embed", {"inputs": TEXTS}))["embeddings"]
    defaults = {"model": "default/not-specified", "dimensions": 0, "modality": "text"}
    body = {"input": TEXTS, **defaults, "user": "a"}
    found = await requests.post("/infinity/embeddings", body)
    assert vectors == [one["embedding"] for one in found["data"]]
    assert ("list", "tasks@1") == (found["object"], found["model"])
    assert found["id"].startswith("infinity-")
    coded = await requests.post("/infinity/embeddings", {**body, "encoding_format": "base64"})
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded["data"]]
    np.testing.assert_allclose(vectors, decoded, atol=1e-6)
    short = await requests.post("/infinity/embeddings", {**body, "dimensions": 8})
    assert {8} == {len(one["embedding"]) for one in short["data"]}


async def test_long_texts_are_reported(requests):
    """The usage names the texts that were cut."""
    found = await requests.post("/infinity/embeddings", {"input": ["a", "word " * 600]})
    assert [1] == found["usage"]["truncated"]


async def test_classify(requests):
    """Labels by falling score, or logits."""
    native = (await requests.post("/classify", {"inputs": TEXTS}))["results"]
    found = await requests.post("/infinity/classify", {"input": TEXTS})
    assert native == found["data"]
    raw = await requests.post("/infinity/classify", {"input": TEXTS, "raw_scores": True})
    assert not 0.99 < sum(one["score"] for one in raw["data"][0]) < 1.01


async def test_rerank(requests):
    """Documents by falling score, with their texts where the request wants them."""
    asked = {"query": "comets", "documents": TEXTS}
    native = (await requests.post("/rerank", {**asked, "return_text": True}))["results"]
    body = {**asked, "return_documents": True, "top_n": 2}
    found = await requests.post("/infinity/rerank", body)
    assert "rerank" == found["object"]
    assert [(one["index"], one["score"], one["text"]) for one in native] == [
        (one["index"], one["relevance_score"], one["document"]) for one in found["results"]
    ]


async def test_pages(requests):
    """What the model can do, and that it is ready."""
    (model,) = (await requests.get("/infinity/models"))["data"]
    assert ("tasks@1", ["embed", "rerank", "classify"]) == (model["id"], model["capabilities"])
    assert (await requests.get("/infinity/health"))["unix"] > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "name"),
    [
        ("embeddings", {}, 422, "input"),
        ("embeddings", {"input": "a", "modality": "image"}, 422, "modality"),
        ("embeddings", {"input": "a", "dimensions": 65}, 422, "65"),
        ("embeddings", {"input": ["a"] * (MOST_INPUTS + 1)}, 422, "input"),
        ("embeddings", {"input": "a", "model": "BAAI/bge"}, 400, "BAAI/bge"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 422, "top_n"),
        ("embeddings_image", {"input": "a"}, 404, "embeddings_image"),
    ],
)
async def test_refusals(requests, path, body, status, name):
    """Bodies: a list of faults; models: OpenAI's error; paths: a text."""
    found, refused = await requests.refuse(f"/infinity/{path}", body)
    assert status == found
    assert name in str(refused)
    match status:
        case 422:
            assert [{"loc", "msg", "type"}] == [set(fault) for fault in refused["detail"]]
        case 400:
            assert {"message", "type", "param", "code"} == set(refused["error"])
        case _:
            assert isinstance(refused["detail"], str)
