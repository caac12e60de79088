import asyncio
import base64
import time
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from service import errors
from service.api.native_routes import base64_of, numbers
from service.tasks.analysis import Analysis
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.late_interaction import LateInteractionRanking, TokenEmbedding
from service.tasks.mask_filling import MaskFilling
from service.tasks.question_answering import QuestionAnswering
from service.tasks.reranking import Reranking
from service.tasks.similarity import Similarity, VectorRanking
from service.tasks.sparse_embedding import SparseEmbedding
from service.tasks.zero_shot import ZeroShot
from tests.service.fakes import VECTOR, VECTORS, WEIGHTS, FakeEngine

Client = httpx.AsyncClient

QUESTION = {"question": "When does it open?", "context": "At six."}
BODIES: dict[str, Any] = {
    "/classify": {"inputs": "a"},
    "/ner": {"inputs": "a"},
    "/qa": QUESTION,
    "/embed": {"inputs": "a"},
    "/embed-tokens": {"inputs": "a"},
    "/embed-sparse": {"inputs": "a"},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
    "/similarity": {"source": "a", "inputs": "b"},
    "/zero-shot": {"inputs": "a", "labels": ["good", "bad"]},
    "/analyze": {"inputs": "a"},
    "/fill-mask": {"inputs": "a"},
}


def several(path: str) -> dict[str, Any]:
    """A body with three inputs."""
    return (
        {**BODIES[path], "inputs": ["a", "b", "c"]} if path != "/qa" else {"inputs": [QUESTION] * 3}
    )


USAGE = {"tokens": 7, "windows": 1, "truncated": []}

each_task = pytest.mark.parametrize("path", BODIES)


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert set(error) == {"code", "message", "param"}
    return response.status_code, error["code"], error["param"]


async def test_classify_answers_with_labels(client):
    """The response has a list of labels for each input, the model, the head and the usage."""
    response = await client.post("/classify", json={"inputs": ["a", "b"], "top_k": 1})
    assert response.json() == {
        "model": "tiny@1",
        "head": "sentiment",
        "results": [[{"label": "good", "score": 0.75}]] * 2,
        "usage": USAGE,
    }


async def test_classify_sends_its_texts(client, engine):
    """Every field reaches the engine."""
    body = {
        "inputs": "a",
        "text_pair": "b",
        "model": "tiny",
        "head": "topic",
        "top_k": 2,
        "truncate": False,
        "stride": 8,
        "threshold": 0.25,
        "function_to_apply": "sigmoid",
        "calibrated": True,
    }
    await client.post("/classify", json=body)
    assert engine.heads == ("topic",)
    assert engine.asked == Classification(
        inputs=["a"],
        text_pair=["b"],
        top_k=2,
        truncate=False,
        stride=8,
        threshold=0.25,
        function_to_apply="sigmoid",
        calibrated=True,
    )


async def test_ner_answers_with_entities(client, engine):
    """Grouped entities go by `entity_group`, ungrouped ones by `entity`, with their B- or I-."""
    grouped = await client.post("/ner", json={"inputs": "In Oslo"})
    shown = {"score": 0.5, "word": "Oslo", "start": 3, "end": 7}
    assert grouped.json()["results"] == [[{"entity_group": "LOC", **shown}]]
    response = await client.post("/ner", json={"inputs": "a", "aggregation_strategy": "none"})
    assert response.json()["results"] == [[{"entity": "B-LOC", **shown}]]
    assert engine.heads == ()
    assert engine.asked == EntityRecognition(
        inputs=["a"],
        aggregation_strategy="none",
        truncate="window",
        stride=None,
        offset_unit="code_point",
    )


@pytest.mark.parametrize("body", [QUESTION, {"inputs": [QUESTION, QUESTION]}], ids=["one", "list"])
async def test_qa_answers_with_spans(client, engine, body):
    """A list of spans for each question, in either form."""
    response = await client.post("/qa", json=body)
    count = len(body.get("inputs", [body]))
    found = {"answer": "six", "score": 0.5, "start": 4, "end": 7}
    assert response.json()["results"] == [[found]] * count
    assert engine.asked == QuestionAnswering(
        questions=[QUESTION["question"]] * count,
        contexts=[QUESTION["context"]] * count,
        top_k=1,
        handle_impossible_answer=False,
        truncate="window",
        stride=None,
        offset_unit="code_point",
    )
    assert engine.ticket is not None
    assert ("inputs[{}]" if "inputs" in body else "context") == engine.ticket.place


async def test_embed_answers_with_vectors(client, engine):
    """Numbers by default, one vector for each input."""
    response = await client.post("/embed", json={"inputs": ["a", "b"], "dimensions": 3})
    assert response.json() == {
        "model": "tiny@1",
        "head": "embeddings",
        "embeddings": [VECTOR.tolist()] * 2,
        "usage": USAGE,
    }
    assert engine.asked == Embedding(inputs=["a", "b"], normalize=None, dimensions=3)


async def test_embed_passes_its_options(client, engine):
    """The prompt, the input type and the type of the numbers reach the task."""
    options = {"prompt_name": "query", "input_type": "query", "output_dtype": "binary"}
    assert 200 == (await client.post("/embed", json={"inputs": "a", **options})).status_code
    assert engine.asked == Embedding(inputs=["a"], **options)
    assert 200 == (await client.post("/embed", json={"inputs": "a", "prompt": ""})).status_code
    assert engine.asked == Embedding(inputs=["a"], prompt="")


DTYPES = "output_dtype: must be one of 'float', 'int8', 'uint8', 'bin"


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (
            "/embed",
            {"prompt": "", "prompt_name": "query"},
            "prompt",
            "send prompt or prompt_name, not both",
        ),
        ("/embed", {"prompt": "a" * 2049}, "prompt", "prompt: must have at most 2048 characters"),
        (
            "/embed",
            {"input_type": "passage"},
            "input_type",
            "input_type: must be one of 'query' or 'document'",
        ),
        ("/embed", {"output_dtype": "int4"}, "output_dtype", DTYPES),
        *(("/embed-sparse", {"top_k": top_k}, "top_k", "") for top_k in (0, -1, 1.5, "2", True)),
        *(("/fill-mask", {"top_k": top_k}, "top_k", "") for top_k in (0, 101)),
        ("/fill-mask", {"targets": []}, "targets", ""),
        ("/fill-mask", {"targets": [1]}, "targets[0]", ""),
        ("/fill-mask", {"truncate": "cut"}, "truncate", ""),
    ],
)
async def test_options_are_checked(client, path, fields, param, message):
    """Options that no head has, and those out of range, are refused by their names before the engine is asked."""
    response = await client.post(path, json={"inputs": "_", **fields})
    assert (422, "invalid", param) == error_of(response)
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_integers(dtype):
    """Integers are shown as integers, and their bytes as base64."""
    vector = np.array([1, 127, 0], dtype)
    assert [1, 127, 0] == orjson.loads(
        orjson.dumps(numbers(vector), option=orjson.OPT_SERIALIZE_NUMPY)
    )
    np.testing.assert_array_equal(vector, np.frombuffer(base64.b64decode(base64_of(vector)), dtype))


async def test_embed_answers_in_base64(client):
    """Base64 is of little-endian float32."""
    response = await client.post("/embed", json={"inputs": "a", "encoding_format": "base64"})
    (text,) = response.json()["embeddings"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), "<f4"), VECTOR)


async def test_embed_tokens_answers_with_vectors(client, engine):
    """A list of vectors for each input, as numbers or each in base64."""
    body = {"inputs": ["a", "b"], "input_type": "query", "truncate": False, "head": "tokens"}
    response = await client.post("/embed-tokens", json=body)
    assert response.json() == {
        "model": "tiny@1",
        "head": "tokens",
        "embeddings": [VECTORS.tolist()] * 2,
        "usage": USAGE,
    }
    assert engine.asked == TokenEmbedding(inputs=["a", "b"], input_type="query", truncate=False)
    assert engine.heads == ("tokens",)

    body = {"inputs": "a", "encoding_format": "base64"}
    ((*texts,),) = (await client.post("/embed-tokens", json=body)).json()["embeddings"]
    vectors = [np.frombuffer(base64.b64decode(text), "<f4") for text in texts]
    np.testing.assert_array_equal(vectors, VECTORS)
    assert engine.asked == TokenEmbedding(inputs=["a"], input_type="document")


async def test_embed_sparse_answers_with_weights(client, engine):
    """Ids and weights for each input, with their tokens where the request wants them."""
    body = {"inputs": ["a", "b"], "top_k": 2, "truncate": False, "head": "weights"}
    response = await client.post("/embed-sparse", json=body)
    shown = {"indices": WEIGHTS.indices.tolist(), "values": WEIGHTS.values.tolist()}
    assert [shown] * 2 == response.json()["embeddings"]
    assert engine.asked == SparseEmbedding(inputs=["a", "b"], top_k=2, truncate=False)
    assert engine.heads == ("weights",)

    named = await client.post("/embed-sparse", json={"inputs": "a", "return_tokens": True})
    assert [{**shown, "tokens": ["token 2", "token 5"]}] == named.json()["embeddings"]


async def test_rerank_sorts_documents(client, engine):
    """The best documents come first, with their places in the request and, if asked for, their texts."""
    body = {
        "query": "q",
        "documents": ["a", "b", "c"],
        "top_n": 2,
        "return_text": True,
        "raw_scores": True,
        "truncate": True,
        "stride": 8,
        "head": "relevance",
    }
    response = await client.post("/rerank", json=body)
    assert response.json() == {
        "model": "tiny@1",
        "head": "relevance",
        "results": [
            {"index": 2, "score": 0.5, "text": "c"},
            {"index": 1, "score": 0.25, "text": "b"},
        ],
        "usage": USAGE,
    }
    assert engine.heads == ("relevance",)
    assert engine.asked == Reranking(
        query="q", documents=["a", "b", "c"], raw_scores=True, truncate=True, stride=8
    )


async def test_rerank_by_vectors(client, engine):
    """An embedding head ranks by cosines, equal ones in the order of the request."""
    body = {"query": "q", "documents": ["a", "b"], "head": "embeddings", "truncate": False}
    response = await client.post("/rerank", json=body)
    found = response.json()["results"]
    assert [0, 1] == [one["index"] for one in found]
    assert [1.0, 1.0] == pytest.approx([one["score"] for one in found])
    assert engine.asked == VectorRanking(source="q", inputs=["a", "b"], truncate=False)


async def test_rerank_by_vectors_of_tokens(client, engine):
    """A head of late interaction ranks by the best document token for each query token."""
    body = {"query": "q", "documents": ["a", "b"], "head": "tokens", "stride": 4}
    response = await client.post("/rerank", json=body)
    assert [(0, 2.0), (1, 2.0)] == [
        (one["index"], one["score"]) for one in response.json()["results"]
    ]
    assert engine.asked == LateInteractionRanking(query="q", documents=["a", "b"], stride=4)


async def test_rerank_by_several_heads(client, engine):
    """The response names the heads; a request selects one head, or weighs several."""
    body = {"query": "q", "documents": ["a", "b"], "weights": {"embeddings": 1, "tokens": 3}}
    content = (await client.post("/rerank", json=body)).json()
    assert ["embeddings", "tokens"] == content["heads"]
    assert "head" not in content
    assert [(0, 1.75), (1, 1.75)] == [(one["index"], one["score"]) for one in content["results"]]
    response = await client.post("/rerank", json={**body, "head": "tokens"})
    assert (422, "invalid", "weights") == error_of(response)


async def test_documents_that_fail_are_not_ranked(client, engine):
    """They are in `errors`; if the query fails, the request fails."""
    engine.bad = {1: errors.InvalidInput("too long", param="documents[1]")}
    body = {"query": "q", "documents": ["a", "b", "c"], "on_error": "null"}
    content = (await client.post("/rerank", json=body)).json()
    assert [2, 0] == [one["index"] for one in content["results"]]
    assert [{"index": 1, "code": "invalid", "message": "too long"}] == content["errors"]

    engine.bad = {3: errors.InferenceFailed("no number")}
    for head in ("embeddings", "tokens"):
        response = await client.post("/rerank", json={**body, "head": head})
        assert error_of(response) == (500, "inference_failed", None)


async def test_similarity_answers_with_cosines(client, engine):
    """One number for each input."""
    body = {"source": "q", "inputs": ["a", "b"], "truncate": "window", "stride": 8}
    response = await client.post("/similarity", json=body)
    assert [1.0, 1.0] == pytest.approx(response.json()["results"])
    assert engine.asked == Similarity(source="q", inputs=["a", "b"], truncate="window", stride=8)


async def test_zero_shot_sends_its_labels(client, engine):
    """Every field reaches the engine."""
    body = {
        "inputs": ["a"],
        "labels": "good",
        "hypothesis_template": "It is {}!",
        "multi_label": True,
        "truncate": False,
        "head": "entailment",
    }
    response = await client.post("/zero-shot", json=body)
    assert [[{"label": "good", "score": 0.75}]] == response.json()["results"]
    assert engine.heads == ("entailment",)
    assert engine.asked == ZeroShot(
        inputs=["a"],
        labels=["good"],
        hypothesis_template="It is {}!",
        multi_label=True,
        truncate=False,
    )


async def test_analyze_answers_by_head(client, engine):
    """Each input has the result of each head, as the head's own route shows it."""
    body = {
        "inputs": ["a"],
        "heads": ["sentiment", "embeddings"],
        "offset_unit": "utf16",
        "truncate": True,
        "stride": 4,
    }
    response = await client.post("/analyze", json=body)
    assert response.json() == {
        "model": "tiny@1",
        "heads": ["sentiment"],
        "results": [{"sentiment": [{"label": "good", "score": 0.75}]}],
        "usage": USAGE,
    }
    assert engine.heads == ("sentiment", "embeddings")
    assert engine.asked == Analysis(inputs=["a"], offset_unit="utf16", truncate=True, stride=4)


async def test_fill_mask_answers_with_tokens(client, engine):
    """A list of tokens for a text with one mask token, and a list of such lists for one with several."""
    found = {"token": 7, "token_str": "six", "score": 0.5, "sequence": "at six"}
    one = await client.post("/fill-mask", json={"inputs": ["at _", "at _"], "targets": "six"})
    assert one.json() == {
        "model": "tiny@1",
        "head": "masks",
        "results": [[found]] * 2,
        "usage": USAGE,
    }
    assert engine.asked == MaskFilling(inputs=["at _", "at _"], targets=["six"])
    two = await client.post(
        "/fill-mask",
        json={"inputs": "_ at _", "top_k": 3, "head": "m", "truncate": False, "stride": 8},
    )
    assert [[[found], [found]]] == two.json()["results"]
    assert engine.heads == ("m",)
    assert engine.asked == MaskFilling(inputs=["_ at _"], top_k=3, truncate=False, stride=8)


async def test_targets_are_limited_as_inputs_are(client_with):
    """Their number and their lengths have the limits of inputs."""
    async with client_with(max_inputs_per_request=2, max_characters_per_input=10) as client:
        for targets, name in ((["a"] * 3, "targets"), (["a", "a" * 11], "targets[1]")):
            response = await client.post("/fill-mask", json={"inputs": "_", "targets": targets})
            assert error_of(response) == (413, "too_large", name)


@each_task
async def test_an_answer_says_how_it_was_made(client, path):
    """Headers tell the stages, the batch, and the bundle with all it ran on."""
    headers = (await client.post(path, json=BODIES[path])).headers
    parse, rest = headers["Server-Timing"].split(", ", 1)
    stages, total = rest.rsplit(";dur=", 1)
    assert stages == (
        "encode;dur=1.000, queue;dur=2.000, inference;dur=3.000, return;dur=0.500, decode;dur=4.000, total"
    )
    assert 0 < float(parse.removeprefix("parse;dur=")) <= float(total)
    assert headers["X-Quartet-Batch"] == "size=8;tokens=312"
    assert headers["X-Quartet-Model"] == FakeEngine.fingerprint


@each_task
@pytest.mark.parametrize(
    ("kind", "status", "code", "retry_after"),
    [
        (errors.UnknownHead, 404, "unknown_head", None),
        (errors.TooLarge, 413, "too_large", None),
        (errors.InvalidInput, 422, "invalid", None),
        (errors.Overloaded, 429, "overloaded", "1"),
        (errors.InferenceFailed, 500, "inference_failed", None),
        (errors.NotReady, 503, "not_ready", "1"),
        (errors.Draining, 503, "draining", "1"),
        (errors.ReplicaLost, 503, "replica_lost", "1"),
        (errors.DeadlineExceeded, 504, "deadline_exceeded", None),
    ],
)
async def test_the_engines_errors_are_answered(
    client, engine, path, kind, status, code, retry_after
):
    """Each has its status, its code, its message and its headers."""
    engine.error = kind("told so", param="inputs[3]")
    response = await client.post(path, json=BODIES[path])
    assert error_of(response) == (status, code, "inputs[3]")
    assert response.json()["error"]["message"] == "told so"
    assert response.headers.get("Retry-After") == retry_after


@each_task
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            {"content": b'{"inputs": NaN}', "headers": {"Content-Type": "application/json"}},
            (400, "bad_request", None),
        ),
        ({"data": {"inputs": "a"}}, (415, "unsupported_media_type", "Content-Type")),
        ({"json": {"temperature": 0}}, (422, "invalid", "temperature")),
        ({"json": {"model": "huge"}}, (404, "unknown_model", "model")),
        (
            {"json": {}, "headers": {"X-Request-Timeout-Ms": "soon"}},
            (422, "invalid", "X-Request-Timeout-Ms"),
        ),
    ],
    ids=["no JSON", "a form", "unknown field", "unknown model", "bad timeout"],
)
async def test_bad_requests_are_answered(client, path, asked, expected):
    """What is wrong with a body or a header has a status, and its name."""
    if "json" in asked:
        asked = {**asked, "json": {**BODIES[path], **asked["json"]}}
    assert expected == error_of(await client.post(path, **asked))


@each_task
async def test_limits_are_the_settings(client_with, path):
    """The size of a body and the number of inputs are the operator's to set."""
    name = "documents" if path == "/rerank" else "inputs"
    many = {name: [{}] * 3}
    async with client_with(max_inputs_per_request=2) as client:
        assert error_of(await client.post(path, json=many)) == (413, "too_large", name)
    async with client_with(max_body_bytes=8) as client:
        assert error_of(await client.post(path, json=many)) == (413, "too_large", None)


@each_task
async def test_long_texts_are_too_large(path, client_with, engine):
    """They are refused before they reach the engine, though they would be cut."""
    async with client_with(max_characters_per_input=10) as client:
        first = {"/qa": "question", "/rerank": "query", "/similarity": "source"}
        name = first.get(path, "inputs[0]")
        long = {**BODIES[path], name.removesuffix("[0]"): "a" * 11}
        assert error_of(await client.post(path, json=long)) == (413, "too_large", name)
    assert engine.asked is None


async def test_a_slow_body_is_answered(client_with):
    """A body that does not come is 408, and its connection is not used again."""
    never = asyncio.Event()

    async def body():
        yield b"{"
        await never.wait()

    async with client_with(body_timeout_s=0.01) as client:
        response = await client.post(
            "/classify", content=body(), headers={"Content-Type": "application/json"}
        )
    assert error_of(response) == (408, "slow_body", None)
    assert response.headers["Connection"] == "close"


async def test_the_deadline_is_kept(client, engine):
    """An engine that takes too long is cancelled, and the client told in time."""
    engine.hold = asyncio.Event()
    response = await client.post(
        "/classify", json=BODIES["/classify"], headers={"X-Request-Timeout-Ms": "10"}
    )
    assert error_of(response) == (504, "deadline_exceeded", None)
    assert engine.cancelled.is_set()


async def test_the_engine_knows_the_deadline(client, engine):
    """The ticket's deadline lies ahead by the client's patience."""
    before = time.monotonic()
    await client.post(
        "/classify", json=BODIES["/classify"], headers={"X-Request-Timeout-Ms": "5000"}
    )
    assert before + 5 <= engine.ticket.deadline <= time.monotonic() + 5


async def test_models_are_described(client):
    """Each engine speaks for itself."""
    response = await client.get("/models")
    assert response.json() == {
        "models": [{"id": "tiny@1", "precision": "int8"}],
        "devices": [{"name": "cpu", "ready": True, "queue_tokens": 0}],
    }


async def test_metrics_are_text(client):
    """Prometheus is answered in its own format."""
    response = await client.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    assert "\nquartet_queue_tokens " in response.text


@pytest.mark.parametrize("path", sorted(BODIES.keys() - {"/rerank"}))
async def test_bad_inputs_are_null_with_on_error_null(client, engine, path):
    """`errors` has their indices, codes and reasons; without bad inputs it is empty."""
    body = {**several(path), "on_error": "null"}
    name = "embeddings" if path.startswith("/embed") else "results"
    fine = (await client.post(path, json=body)).json()
    assert [] == fine["errors"]
    engine.bad = {2: errors.InvalidInput("too long"), 0: errors.InferenceFailed("no number")}
    response = await client.post(path, json=body)
    assert engine.ticket is not None
    assert engine.ticket.isolate_errors
    assert 200 == response.status_code
    assert [None, fine[name][1], None] == response.json()[name]
    assert [
        {"index": 0, "code": "inference_failed", "message": "no number"},
        {"index": 2, "code": "invalid", "message": "too long"},
    ] == response.json()["errors"]


@each_task
async def test_bad_inputs_fail_the_request_by_default(client, engine, path):
    """The engine gets this option, and the response then has no `errors`."""
    answer = await client.post(path, json=BODIES[path] | {"on_error": "fail"})
    assert "errors" not in answer.json()
    assert engine.ticket is not None
    assert not engine.ticket.isolate_errors
    bad = await client.post(path, json=BODIES[path] | {"on_error": "ignore"})
    assert (422, "invalid", "on_error") == error_of(bad)


async def test_an_engine_is_needed_until_its_request_is_over(client, engine):
    """However it ends: so an engine that is to go can wait for the last one."""
    engine.hold = asyncio.Event()
    asked = asyncio.create_task(client.post("/embed", json={"inputs": "a"}))
    await engine.reached.wait()
    assert 1 == engine.users
    engine.hold.set()
    assert 200 == (await asked).status_code
    assert 0 == engine.users
    lines = {"Accept": "application/x-ndjson"}
    assert 200 == (await client.post("/embed", json={"inputs": "a"}, headers=lines)).status_code
    engine.error = errors.InferenceFailed("no number")
    assert 500 == (await client.post("/embed", json={"inputs": "a"})).status_code
    assert 0 == engine.users
