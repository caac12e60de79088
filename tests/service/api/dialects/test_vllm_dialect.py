"""The API of vLLM's pooling models: answers and errors."""

import base64

import numpy as np
import pytest

from service.core.manifest import Head
from tests.service.api.dialects.conftest import MOST_INPUTS

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["Ada drew a comet.", "It rained in Turin."]
LONG = "word " * 600


async def test_classify(requests):
    """The best label, and the scores of all in the order of the head."""
    native = (await requests.post("/classify", {"inputs": TEXTS}))["results"]
    found = (await requests.post("/vllm/classify", {"input": TEXTS}))["data"]
    labels = ["negative", "neutral", "positive"]
    for index, (one, expected) in enumerate(zip(found, native, strict=True)):
        by_label = {each["label"]: each["score"] for each in expected}
        assert [by_label[label] for label in labels] == one["probs"]
        assert (index, expected[0]["label"], 3) == (one["index"], one["label"], one["num_classes"])
    for name in ("use_activation", "activation", "softmax"):
        raw = (await requests.post("/vllm/classify", {"input": TEXTS, name: False}))["data"]
        assert not 0.99 < sum(raw[0]["probs"]) < 1.01


@pytest.mark.parametrize("path", ["/vllm/score", "/vllm/v1/score"])
async def test_score(requests, path):
    """One text with several, or pairs, by a cross-encoder; in the order of the request."""
    native = await requests.post("/rerank", {"query": TEXTS[0], "documents": TEXTS})
    expected = [one["score"] for one in sorted(native["results"], key=lambda one: one["index"])]
    for first, second in (("text_1", "text_2"), ("queries", "items"), ("data_1", "data_2")):
        found = (await requests.post(path, {first: TEXTS[0], second: TEXTS}))["data"]
        assert pytest.approx(expected) == [one["score"] for one in found]
    pairs = await requests.post(path, {"queries": TEXTS, "documents": TEXTS[::-1]})
    (crossed,) = (await requests.post("/rerank", {"query": TEXTS[1], "documents": TEXTS[:1]}))[
        "results"
    ]
    assert pytest.approx(crossed["score"]) == pairs["data"][1]["score"]
    raw = await requests.post(path, {"text_1": TEXTS[0], "text_2": TEXTS, "use_activation": False})
    assert expected != [one["score"] for one in raw["data"]]


@pytest.mark.parametrize("path", ["/vllm/rerank", "/vllm/v1/rerank", "/vllm/v2/rerank"])
async def test_rerank(requests, path):
    """Documents by falling score, always with their texts; top_n 0 is all."""
    asked = {"query": "comets", "documents": TEXTS}
    native = (await requests.post("/rerank", {**asked, "return_text": True}))["results"]
    found = (await requests.post(path, {**asked, "top_n": 0}))["results"]
    assert [(one["index"], one["text"]) for one in native] == [
        (one["index"], one["document"]["text"]) for one in found
    ]
    assert 1 == len((await requests.post(path, {**asked, "top_n": 1}))["results"])


async def test_pooling(requests):
    """Vectors of texts unless the request names another task."""
    vectors = (await requests.post("/embed", {"inputs": TEXTS}))["embeddings"]
    body = {"input": TEXTS, "request_id": "mine"}
    found = await requests.post("/vllm/pooling", body)
    assert vectors == [one["data"] for one in found["data"]]
    assert "pool-mine" == found["id"]
    coded = await requests.post("/vllm/pooling", {**body, "encoding_format": "base64"})
    decoded = [np.frombuffer(base64.b64decode(one["data"]), "<f4") for one in coded["data"]]
    np.testing.assert_allclose(vectors, decoded, atol=1e-6)
    plain = await requests.post("/vllm/pooling", {**body, "use_activation": False, "dimensions": 8})
    norms = [np.linalg.norm(one["data"]) for one in plain["data"]]
    assert not np.allclose(1, norms)
    labels = await requests.post("/vllm/pooling", {**body, "task": "classify"})
    probabilities = (await requests.post("/vllm/classify", body))["data"]
    np.testing.assert_allclose(
        [one["probs"] for one in probabilities], [one["data"] for one in labels["data"]], atol=1e-6
    )


async def test_pooling_of_tokens(requests):
    """A matrix for each text, whose base64 has the vectors one after the other."""
    expected = (await requests.post("/embed-tokens", {"inputs": TEXTS}))["embeddings"]
    body = {"input": TEXTS, "task": "token_embed"}
    found = (await requests.post("/vllm/pooling", body))["data"]
    coded = (await requests.post("/vllm/pooling", {**body, "encoding_format": "base64"}))["data"]
    for matrix, plain, packed in zip(expected, found, coded, strict=True):
        np.testing.assert_allclose(matrix, plain["data"], atol=1e-6)
        numbers = np.frombuffer(base64.b64decode(packed["data"]), "<f4")
        np.testing.assert_allclose(matrix, numbers.reshape(len(matrix), -1), atol=1e-6)


async def test_token_ids(requests):
    """Ids belong to the tokenizer of the model."""
    native = await requests.post("/tokenize", {"inputs": TEXTS[0]})
    tokens = native["results"][0]["tokens"]
    ids = [one["id"] for one in tokens if one["sequence"] is not None]
    found = await requests.post("/vllm/pooling", {"input": ids})
    expected = await requests.post("/vllm/pooling", {"input": TEXTS[0]})
    np.testing.assert_allclose(expected["data"][0]["data"], found["data"][0]["data"], atol=1e-6)


async def test_long_texts(requests):
    """They are refused, or cut for -1."""
    status, refused = await requests.refuse("/vllm/classify", {"input": [LONG]})
    assert (400, "BadRequestError", 400) == (
        status,
        refused["error"]["type"],
        refused["error"]["code"],
    )
    body = {"input": [LONG], "truncate_prompt_tokens": -1}
    found = await requests.post("/vllm/classify", body)
    assert [0] == found["usage"]["truncated"]
    pair = {"text_1": "a", "text_2": LONG}
    assert 400 == (await requests.refuse("/vllm/score", pair))[0]
    assert await requests.post("/vllm/score", {**pair, "truncate_prompt_tokens": -1})


@pytest.mark.parametrize(
    ("path", "body", "status", "name"),
    [
        ("classify", {}, 400, "input"),
        ("classify", {"messages": [{}], "input": "a"}, 400, "messages"),
        ("classify", {"input": "a", "truncate_prompt_tokens": 8}, 400, "truncate_prompt_tokens"),
        ("classify", {"input": "a", "priority": 1}, 400, "priority"),
        ("classify", {"input": "a", "add_special_tokens": False}, 400, "add_special_tokens"),
        ("classify", {"input": [[99999]]}, 400, "99999"),
        ("classify", {"input": ["a"] * (MOST_INPUTS + 1)}, 400, "input"),
        ("classify", {"input": "a", "model": "huge"}, 404, "huge"),
        ("pooling", {"input": "a", "task": "token_classify"}, 400, "task"),
        ("pooling", {"input": "a", "embed_dtype": "float16"}, 400, "embed_dtype"),
        ("pooling", {"input": "a", "endianness": "big"}, 400, "endianness"),
        ("score", {}, 400, "text_1"),
        ("score", {"text_1": "a"}, 400, "text_1"),
        ("score", {"text_1": "a", "documents": "b"}, 400, "text_1"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "text_1 and text_2"),
        ("score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 8}, 400, "max_tokens"),
        ("score", {"text_1": "a", "text_2": ["b"] * (MOST_INPUTS + 1)}, 413, "9"),
        ("rerank", {"documents": ["a"]}, 400, "query"),
    ],
)
async def test_refusals(requests, path, body, status, name):
    """An error has OpenAI's form, with the status as its code."""
    found, refused = await requests.refuse(f"/vllm/{path}", body)
    status = 400 if status == 413 else status
    assert (status, status) == (found, refused["error"]["code"])
    assert name in refused["error"]["message"]


async def test_scores_by_vectors(client_with, engine):
    """Without a cross-encoder, one text is compared with others by vectors of tokens, else of texts."""
    body = {"text_1": "a", "text_2": ["b", "c"]}
    async with client_with() as client:
        for kind in ("LateInteractionRanking", "VectorRanking"):
            if kind == "VectorRanking":
                heads = dict(engine.manifest.heads)
                del heads["tokens"]
                engine.manifest = type(engine.manifest)(heads=heads)
            found = (await client.post("/vllm/score", json=body)).json()
            assert [0, 1] == [one["index"] for one in found["data"]]
            assert kind == type(engine.asked).__name__
            pairs = await client.post(
                "/vllm/score", json={"text_1": ["a", "b"], "text_2": ["b", "c"]}
            )
            assert 400 == pairs.status_code
            assert "cross-encoder" in pairs.json()["error"]["message"]
        tokens = await client.post("/vllm/pooling", json={"input": "a"})
        assert "Embedding" == type(engine.asked).__name__
        assert 200 == tokens.status_code
    assert isinstance(engine.manifest.heads["sentiment"], Head)
