import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.api.openapi import EXAMPLES, REQUESTS
from service.api.schemas import Request, parse

TASKS = {
    "/classify": "ClassifyRequest",
    "/ner": "NerRequest",
    "/qa": "QaRequest",
    "/embed": "EmbedRequest",
}
TASK_STATUSES = [200, 400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 500, 503, 504]


@pytest.fixture
def document(app: FastAPI) -> dict[str, Any]:
    return app.openapi()


async def test_the_document_is_served(client: httpx.AsyncClient, document: dict[str, Any]) -> None:
    """The address that the docs page reads gives the document."""
    assert (await client.get("/openapi.json")).json() == document


@pytest.mark.parametrize("path", TASKS)
def test_each_task_declares_its_body(document: dict[str, Any], path: str) -> None:
    """The body's schema is there, though the framework never reads it."""
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": f"#/components/schemas/{TASKS[path]}"}
    assert body["examples"]


@pytest.mark.parametrize("path", TASKS)
def test_each_task_declares_its_answers(document: dict[str, Any], path: str) -> None:
    """Every status that it can answer, errors in the one shape."""
    responses = document["paths"][path]["post"]["responses"]
    shape = {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}
    assert sorted(map(int, responses)) == TASK_STATUSES
    assert all(responses[str(s)]["content"]["application/json"] == shape for s in TASK_STATUSES[1:])


def test_a_key_is_declared_where_one_may_be_needed(document: dict[str, Any]) -> None:
    """A bearer's key, or nothing; health checks never need one."""
    operations = {path: next(iter(methods.values())) for path, methods in document["paths"].items()}
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operation in operations.items():
        is_open = path.startswith("/health/")
        assert operation["security"] == ([] if is_open else [{"key": []}, {}])
        assert ({"401", "403", "429"} <= set(operation["responses"])) == (not is_open)


def test_an_order_may_be_refused_for_its_body(document: dict[str, Any]) -> None:
    """As a task's may: for how it is compressed, and for want of room."""
    responses = document["paths"]["/admin/models"]["post"]["responses"]
    assert "`unsupported_encoding`" in responses["415"]["description"]
    assert "`overloaded`" in responses["429"]["description"]


def test_a_priority_may_be_refused_wherever_it_is_read(document: dict[str, Any]) -> None:
    """That is on every path that is not open to all."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("422" in operation["responses"]) == bool(operation["security"]), path


def test_what_is_never_accepted_is_declared(document: dict[str, Any]) -> None:
    """No request has an empty list of texts, a blank question, or a name that is longer than any."""
    schemas = document["components"]["schemas"]
    inputs = schemas["EmbedRequest"]["properties"]["inputs"]["anyOf"]
    assert [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}] == [
        dict(sorted(kind.items(), reverse=True)) for kind in inputs
    ]
    assert r"\S" == schemas["Question"]["properties"]["question"]["pattern"]
    assert 257 == schemas["NerRequest"]["properties"]["model"]["anyOf"][0]["maxLength"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    """No `$ref` dangles."""
    references = set(re.findall(r"'\$ref': '#/components/schemas/(\w+)'", str(document)))
    assert references <= set(document["components"]["schemas"])
    assert "Question" in references


def test_what_a_path_names_is_declared(document: dict[str, Any]) -> None:
    """Each `{name}` of a path is a parameter of its operations."""
    asked = [
        (path, operation.get("parameters", []))
        for path, operations in document["paths"].items()
        for operation in operations.values()
    ]
    for path, parameters in asked:
        in_path = [each["name"] for each in parameters if each["in"] == "path"]
        assert in_path == re.findall(r"{(\w+)}", path)
    assert 3 == sum("{" in path for path, _ in asked)


def test_routes_are_named_after_their_functions(document: dict[str, Any]) -> None:
    """Operation ids make good names for generated clients."""
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    served = ["classify", "ner", "qa", "embed", "models", "live", "ready", "metrics"]
    changed = ["list_models", "load_model", "unload_model", "promote_model", "roll_back_model"]
    assert names == [*served, *changed]


@pytest.mark.parametrize(
    ("schema", "body"),
    [(schema, body) for schema in REQUESTS for body in EXAMPLES[schema].values()],
)
def test_examples_are_valid(schema: type[Request], body: object) -> None:
    """Who copies an example is answered."""
    assert parse(schema, body, 8).size > 0
