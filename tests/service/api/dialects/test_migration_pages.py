"""The migration pages, held against the OpenAPI document and the application."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DOCS = Path(__file__).parents[4] / "docs" / "how-to"
# The page of each tag of the OpenAPI document.
PAGES = {
    "OpenAI": "migrate_openai.md",
    "Jina": "migrate_openai.md",
    "text-embeddings-inference": "migrate_tei.md",
    "Cohere": "migrate_cohere.md",
    "infinity": "migrate_infinity.md",
    "vLLM": "migrate_vllm.md",
}
HEADING = re.compile(r"^### (`.+`)$", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| ([\w ]+) \|", re.MULTILINE)
STATUSES = {"works", "otherwise", "not used", "refused", "ours"}
BODIES: dict[str, dict[str, object]] = {
    "/cohere/v1/detokenize": {"tokens": [1]},
    "/cohere/v1/tokenize": {"text": "a"},
    "/tei/decode": {"ids": [1]},
    "/tei/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "/vllm/score": {"text_1": "a", "text_2": "b"},
}
# What a valid request to other paths has, by the names of its fields.
FIELDS = {"query": "a", "documents": ["b"], "texts": ["a"], "input": "a", "inputs": "a"}


class Endpoint(NamedTuple):
    method: str
    path: str
    parameters: dict[str, str]  # with the status of each


def endpoints(page: str) -> Iterator[Endpoint]:
    """Yield the endpoints that a page describes."""
    parts = HEADING.split((DOCS / page).read_text(encoding="utf-8"))
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        for method, path in re.findall(r"`(\w+) ([^`]+)`", heading):
            yield Endpoint(method, path, dict(ROW.findall(text.partition("\n## ")[0])))


DESCRIBED = [endpoint for page in sorted({*PAGES.values()}) for endpoint in endpoints(page)]
REFUSED = [
    (endpoint, name)
    for endpoint in DESCRIBED
    for name, status in endpoint.parameters.items()
    if status == "refused"
]


def properties(document: dict[str, Any], path: str) -> dict[str, Any]:
    operation = document["paths"][path]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    found: dict[str, Any] = document["components"]["schemas"][reference.rpartition("/")[2]]
    return found["properties"]


@pytest.mark.parametrize("tag", PAGES)
def test_pages_have_every_endpoint(document, tag):
    """The page of an API has each of its operations."""
    paths = document["paths"]
    operations = {
        f"{method.upper()} {path}"
        for path, methods in paths.items()
        for method, operation in methods.items()
        if operation["tags"] == [tag]
    }
    assert operations
    described = {f"{one.method} {one.path}" for one in endpoints(PAGES[tag])}
    assert operations <= described


@pytest.mark.parametrize("endpoint", DESCRIBED, ids=lambda one: f"{one.method} {one.path}")
def test_pages_have_every_parameter(document, endpoint):
    """A table has exactly the fields of the request, and others that are refused; each has a status."""
    if endpoint.method == "GET" or not endpoint.parameters:
        assert endpoint.path in ({*document["paths"], "/tei"})
        return
    fields = properties(document, endpoint.path)
    rows = endpoint.parameters
    assert STATUSES >= {*rows.values()}
    assert {*fields} <= {*rows}
    assert {"refused"} >= {rows[name] for name in rows.keys() - fields.keys()}
    refused = {name for name, schema in fields.items() if schema.get("type") == "null"}
    assert refused <= {name for name, status in rows.items() if status == "refused"}


@pytest.mark.parametrize(
    ("endpoint", "name"), REFUSED, ids=[f"{one.path} {name}" for one, name in REFUSED]
)
async def test_refused_parameters_are_named(client, document, endpoint, name):
    """A request that sets a refused parameter is answered with its name."""
    fields = properties(document, endpoint.path)
    valid = {key: value for key, value in FIELDS.items() if key in fields}
    if {"texts", "inputs"} <= valid.keys():
        del valid["inputs"]
    body = BODIES.get(endpoint.path, valid)
    accepted = await client.post(endpoint.path, json=body)
    assert accepted.status_code not in (400, 422), accepted.text
    response = await client.post(endpoint.path, json={**body, name: [1]})
    assert response.status_code in (400, 422)
    assert re.search(rf"\b{name}\b", response.text)
