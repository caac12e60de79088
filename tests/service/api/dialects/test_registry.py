"""The paths of the native API and of other servers' APIs."""

import re

import numpy as np
import pytest

from service import errors
from service.api.dialects.registry import DIALECTS, KEPT, NATIVE, Paths
from service.api.native_routes import Route
from service.errors import (
    BadRequest,
    InvalidInput,
    MethodNotAllowed,
    UnknownModel,
    UnsupportedEncoding,
)
from service.keys import Key, digest
from tests.served import app_of, living
from tests.service.api.dialects.conftest import MOST_INPUTS

BODY = {"inputs": "a text"}


@pytest.mark.parametrize(
    ("root", "method", "path", "expected", "form"),
    [
        ("native", "POST", "/embed", "/embed", "native"),
        ("native", "POST", "/native/embed", "/embed", "native"),
        ("native", "GET", "/native", "/", "native"),
        ("native", "POST", "/tei/embed", "/tei/embed", "tei"),
        ("native", "POST", "/v1/embeddings", "/v1/embeddings", "v1"),
        ("native", "POST", "/hf/models/tiny/entities", "/hf/models/tiny/entities", "hf"),
        ("native", "POST", "/hf", "/hf", "hf"),
        ("native", "GET", "/v2", "/v2", "v2"),
        ("native", "POST", "/v1/rerank", "/v1/rerank", "v1/rerank"),
        ("native", "POST", "/cohere/v2/embed", "/cohere/v2/embed", "cohere"),
        ("native", "POST", "/vllm/v1/score", "/vllm/v1/score", "vllm"),
        ("native", "GET", "/health", "/health", "native"),
        ("native", "POST", "/", "/", "native"),
        ("tei", "POST", "/embed", "/tei/embed", "tei"),
        ("tei", "POST", "/native/embed", "/embed", "native"),
        ("tei", "POST", "/native/tei/embed", "/tei/embed", "native"),
        ("tei", "POST", "/", "/tei", "tei"),
        ("tei", "GET", "/", "/", "native"),
        ("tei", "POST", "/tei/embed", "/tei/embed", "tei"),
        ("tei", "POST", "/v1/embeddings", "/v1/embeddings", "v1"),
        ("tei", "GET", "/health", "/tei/health", "tei"),
        ("openai", "POST", "/embeddings", "/v1/embeddings", "v1"),
        ("hf", "POST", "/", "/hf", "hf"),
        ("hf", "POST", "/pipeline/ner", "/hf/pipeline/ner", "hf"),
        ("openai", "POST", "/rerank", "/v1/rerank", "v1/rerank"),
        ("infinity", "POST", "/classify", "/infinity/classify", "infinity"),
        ("infinity", "GET", "/health", "/infinity/health", "infinity"),
        *(("tei", "GET", f"/{kept}/a", f"/{kept}/a", "native") for kept in sorted(KEPT)),
        ("tei", "OPTIONS", "*", "*", "native"),
    ],
)
def test_paths(root, method, path, expected, form):
    """A dialect has its prefix; the root dialect has the bare paths, except those that are kept."""
    forms = {dialect.error_form: dialect.prefix for dialect in DIALECTS}
    found, error_form = Paths(root).resolve(method, path)
    assert (expected, form) == (found, forms.get(error_form, NATIVE))


# A request of each API for a model that the client invents.
INVENTED = {
    "/embed": {"inputs": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/cohere/v2/embed": {"texts": ["a"]},
    "/infinity/embeddings": {"input": "a"},
    "/vllm/pooling": {"input": "a"},
    "/hf/pipeline/feature-extraction": {"inputs": "a"},
    "/hf": {"inputs": "a", "normalize": True},
    "/hf/models/BAAI/bge/pipeline/feature-extraction": {"inputs": "a"},
    "/v2/models/BAAI/bge/infer": {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
    },
    "/v2/models/BAAI/bge/versions/2/infer": {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
    },
}
TEI = {"/tei": {"inputs": "a"}, "/tei/embed": {"inputs": "a"}, "/tei/predict": {"inputs": "a"}}


@pytest.mark.parametrize(
    ("settings", "by_tei", "by_others"),
    [
        ({}, 200, 404),
        ({"unknown_model": "default"}, 200, 200),
        ({"unknown_model": "refuse"}, 404, 404),
        ({"root_dialect": "tei"}, 200, 200),
        ({"aliases": {"BAAI/bge": "tasks", "BAAI/bge@2": "tasks"}}, 200, 200),
    ],
)
async def test_an_invented_model(tasks_bundle, monkeypatch, settings, by_tei, by_others):
    """Only TEI's API accepts any name, unless the settings say otherwise; a service in TEI's place does so, too."""
    monkeypatch.setattr("service.engines.local_device.WARM_UP_S", 0.001)
    async with living(app_of(tasks_bundle, **settings)) as client:
        for bodies, expected in ((TEI, by_tei), (INVENTED, by_others)):
            for path, body in bodies.items():
                named = body if "BAAI" in path else {**body, "model": "BAAI/bge"}
                response = await client.post(path, json=named)
                status = 404 if response.status_code == 400 else response.status_code
                assert expected == status, (path, response.text)
                assert status == 200 or "no model 'BAAI/bge" in response.text


IDS = [[5 + index % 60 for index in range(1000)]] * MOST_INPUTS
DOCUMENTS = [dict.fromkeys(("text", "title", "url", "id"), "a") for _ in range(MOST_INPUTS)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"ids": IDS}),
        ("/tei/decode", {"ids": IDS}),
        ("/v1/embeddings", {"input": IDS}),
        ("/vllm/pooling", {"input": IDS, "task": "embed", "truncate_prompt_tokens": -1}),
        (
            "/v2/models/tasks/infer",
            {
                "inputs": [
                    {"name": "input_ids", "datatype": "INT64", "shape": [2000], "data": IDS[0] * 2},
                    {"name": "lengths", "datatype": "INT64", "shape": [8], "data": [250] * 8},
                ],
                "outputs": [{"name": "embeddings"}],
            },
        ),
        ("/cohere/v1/rerank", {"query": "a", "documents": DOCUMENTS}),
        ("/vllm/rerank", {"query": "a", "documents": DOCUMENTS}),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_many_values(requests, path, body):
    """A request of the largest number of inputs may have long lists of token ids, and documents with further fields."""
    await requests.post(path, body)


RERANK = {
    "/v1/rerank": {"documents": ["b", "c"]},
    "/cohere/v1/rerank": {"documents": ["b", "c"]},
    "/cohere/v2/rerank": {"documents": ["b", "c"]},
    "/infinity/rerank": {"documents": ["b", "c"]},
    "/vllm/rerank": {"documents": ["b", "c"]},
    "/tei/rerank": {"texts": ["b", "c"]},
}


async def test_a_model_without_a_ranking_head_ranks_by_vectors(tiny_bundle, monkeypatch):
    """In every API, with the head in a header; the native route requires the head in the request."""
    monkeypatch.setattr("service.engines.local_device.WARM_UP_S", 0.001)
    async with living(app_of(tiny_bundle)) as client:
        body = {"query": "a", "documents": ["b", "c"]}
        assert 404 == (await client.post("/rerank", json=body)).status_code
        native = await client.post("/rerank", json={**body, "head": "embeddings"})
        expected = [(one["index"], pytest.approx(one["score"])) for one in native.json()["results"]]
        for path, documents in RERANK.items():
            response = await client.post(path, json={"query": "a", **documents})
            assert 200 == response.status_code, (path, response.text)
            assert "embeddings" == response.headers["X-Quartet-Head"]
            found = response.json()
            results = found if isinstance(found, list) else found["results"]
            score = "score" if path.startswith("/tei") else "relevance_score"
            assert expected == [(one["index"], one[score]) for one in results]


OPTIONS = {"wait_for_model": True, "use_gpu": True, "use_cache": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # LiteLLM sends null for optional parameters.
        ("/v1/embeddings", {"input": "a", "encoding_format": None, "dimensions": None, "user": None}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "return_documents": None, "top_n": None}),
        ("/infinity/embeddings", {"input": "a", "encoding_format": None, "dimensions": None, "modality": None}),
        ("/infinity/classify", {"input": "a", "raw_scores": None}),
        ("/infinity/rerank", {"query": "a", "documents": ["b"], "return_documents": None, "raw_scores": None}),
        ("/vllm/pooling", {"input": "a", "encoding_format": None}),
        ("/vllm/v1/embeddings", {"input": "a", "encoding_format": None, "dimensions": None}),
        ("/tei/embed", {"inputs": "a", "normalize": None, "truncate": None, "prompt_name": None}),
        ("/tei/predict", {"inputs": "a", "raw_scores": None}),
        ("/tei/rerank", {"query": "a", "texts": ["b"], "raw_scores": None, "return_text": None}),
        ("/tei/tokenize", {"inputs": "a", "add_special_tokens": None}),
        ("/cohere/v2/embed", {"texts": ["a"], "truncate": None, "embedding_types": None}),
        ("/hf/pipeline/feature-extraction", {"inputs": "a", "parameters": None, "options": None}),
        # Weaviate's text2vec-huggingface.
        ("/hf/pipeline/feature-extraction", {"inputs": ["a"], "options": OPTIONS}),
        ("/tei", {"inputs": ["a"], "options": OPTIONS}),
        ("/tei/embed", {"inputs": ["a"], "options": OPTIONS}),
        # huggingface_hub's text_classification and sentence_similarity.
        ("/tei", {"inputs": "a", "parameters": {}}),
        ("/tei", {"inputs": "a", "parameters": {"top_k": 1, "function_to_apply": "softmax"}}),
        ("/tei", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {}}),
        # What infinity and vLLM ignore.
        ("/infinity/embeddings", {"input": ["a"], "input_type": "query"}),
        ("/vllm/pooling", {"input": ["a"], "cache_salt": "b"}),
        ("/vllm/rerank", {"query": "a", "documents": ["b"], "return_documents": True}),
    ],
)  # fmt: skip
@pytest.mark.asyncio(loop_scope="module")
async def test_bodies_of_usual_clients(requests, path, body):
    """Null is not given, and an API ignores what its own server ignores."""
    await requests.post(path, body)


@pytest.mark.asyncio(loop_scope="module")
async def test_paths_that_clients_call_first(requests):
    """Clients of vLLM and of KServe's first protocol list the models, and predict."""
    (model,) = (await requests.get("/vllm/v1/models"))["data"]
    assert ("tasks@1", True) == (model["id"], (await requests.get("/v1/models/tasks"))["ready"])
    assert {"version"} == {*(await requests.get("/vllm/version"))}
    expected = (await requests.post("/embed", {"inputs": ["a", "b"]}))["embeddings"]
    path = "/v1/models/tasks:predict"
    found = (await requests.post(path, {"instances": ["a", "b"], "signature_name": "x"}))[
        "predictions"
    ]
    np.testing.assert_allclose(expected, found, atol=1e-6)
    many = {"instances": ["a"] * (MOST_INPUTS + 1)}
    assert 400 == (await requests.refuse(path, many))[0]
    labels = await requests.post("/tei", {"inputs": "a", "parameters": {}})
    assert labels == await requests.post("/tei/predict", {"inputs": "a"})


async def test_root_dialect(client_with):
    """The bare path and the prefixed one answer alike; the native one is under /native."""
    async with client_with(root_dialect="tei") as client:
        bare, prefixed, native = [
            await client.post(path, json=BODY) for path in ("/embed", "/tei/embed", "/native/embed")
        ]
        assert bare.json() == prefixed.json() == native.json()["embeddings"]
        refused = await client.post("/embed", json={})
        assert {"error", "error_type"} == set(refused.json())
        missing = await client.post("/classify", json=BODY)
        assert (404, "Validation") == (missing.status_code, missing.json()["error_type"])
        assert "/native" in missing.json()["error"]
        assert 200 == (await client.get("/health/ready")).status_code
        assert ["tiny@1"] == [one["id"] for one in (await client.get("/models")).json()["models"]]


async def test_native_paths_are_checked(client_with):
    """The prefix changes neither the key that a path needs nor what is open."""
    keys = {"search": Key(sha256=digest("quartet_search").hex())}
    async with client_with(keys=keys) as client:
        for path in ("/embed", "/native/embed", "/native/admin/models/load", "/native/metrics"):
            assert 401 == (await client.post(path, json=BODY)).status_code, path
        headers = {"Authorization": "Bearer quartet_search"}
        refused = await client.post("/native/admin/models/tiny/rollback", headers=headers)
        assert 403 == refused.status_code
        assert 200 == (await client.get("/native/health/ready")).status_code


@pytest.mark.parametrize("name", ["Authorization", "api-key", "X-API-Key"])
async def test_keys_of_clients(client_with, name):
    """A key is read from the header where a client sends it; two different keys are refused."""
    keys = {"search": Key(sha256=digest("quartet_search").hex())}
    value = "Bearer quartet_search" if name == "Authorization" else "quartet_search"
    async with client_with(keys=keys) as client:
        assert 200 == (await client.post("/embed", json=BODY, headers={name: value})).status_code
        other = {name: value, "Authorization": "Bearer other", "x-api-key": "quartet_search"}
        assert 401 == (await client.post("/embed", json=BODY, headers=other)).status_code


@pytest.mark.parametrize("dialect", DIALECTS, ids=[dialect.prefix for dialect in DIALECTS])
def test_error_forms(dialect):
    """Every error has the body that the OpenAPI document declares for the dialect."""
    own = {MethodNotAllowed: {"allow": "POST"}, UnsupportedEncoding: {"accepted": "gzip"}}
    for kind in errors.kinds():
        for param in (None, "inputs[3]"):
            error = kind("why", **own.get(kind, {"param": param}))
            dialect.error_model.model_validate(dialect.error_form(error).body, strict=True)


MALFORMED = (
    *(b"", b"{", b"null", b"[]", b'"a"', b"\xff", b"{}"),
    *(b'{"model": 1}', b'{"model": "none"}', b'{"unknown": 1}', b'{"a":' * 100),
    b'{"input": {}, "inputs": {}, "texts": {}, "documents": {}, "text": {}, "tokens": {}, "ids": {}}',
    b'{"query": null, "documents": [null], "input": [null], "inputs": [null], "texts": [null]}',
)
POSTS = [
    (dialect, re.sub(r"{\w+(:path)?}", "tiny", route.path.replace("{task}", "fill-mask")))
    for dialect in DIALECTS
    for route in dialect.router.routes
    if isinstance(route, Route)
    and "POST" in route.methods
    and "/repository/"
    not in route.path  # needs a key, or no body: tests/e2e/test_inference_dialect.py
]


@pytest.mark.parametrize(
    ("dialect", "path"), POSTS, ids=[f"{dialect.prefix} {path}" for dialect, path in POSTS]
)
async def test_malformed_bodies(client, dialect, path):
    """They are refused in the form of the dialect's errors."""
    forms = {
        frozenset(dialect.error_form(error("")).body)
        for error in (BadRequest, InvalidInput, UnknownModel)
    }
    for body in MALFORMED:
        response = await client.post(path, content=body)
        assert 400 <= response.status_code < 500, body
        assert frozenset(response.json()) in forms, body
    headers = {"Content-Type": "text/plain", "Content-Encoding": "none"}
    response = await client.post(path, content=b"{}", headers=headers)
    assert 415 == response.status_code
    assert frozenset(response.json()) in forms
