"""The paths of the native API and of other servers' APIs."""

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import httpx
import pytest

from service.api.dialects.registry import DIALECTS, KEPT, NATIVE, Dialect, Paths
from service.api.native_routes import Route
from service.errors import BadRequest, InvalidInput, UnknownModel
from service.keys import Key, digest
from service.settings import RootDialect

Connect = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]
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
def test_paths(root: RootDialect, method: str, path: str, expected: str, form: str) -> None:
    """A dialect has its prefix; the root dialect has the bare paths, except those that are kept."""
    forms = {dialect.error_form: dialect.prefix for dialect in DIALECTS}
    found, error_form = Paths(root).resolve(method, path)
    assert (expected, form) == (found, forms.get(error_form, NATIVE))


async def test_root_dialect(client_with: Connect) -> None:
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


async def test_native_paths_are_checked(client_with: Connect) -> None:
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
async def test_keys_of_clients(client_with: Connect, name: str) -> None:
    """A key is read from the header where a client sends it; two different keys are refused."""
    keys = {"search": Key(sha256=digest("quartet_search").hex())}
    value = "Bearer quartet_search" if name == "Authorization" else "quartet_search"
    async with client_with(keys=keys) as client:
        assert 200 == (await client.post("/embed", json=BODY, headers={name: value})).status_code
        other = {name: value, "Authorization": "Bearer other", "x-api-key": "quartet_search"}
        assert 401 == (await client.post("/embed", json=BODY, headers=other)).status_code


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
async def test_malformed_bodies(client: httpx.AsyncClient, dialect: Dialect, path: str) -> None:
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
