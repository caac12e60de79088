import asyncio
import base64
import re
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from service.api.app import create_app
from service.api.dialects.registry import DIALECTS
from service.api.openapi import ANSWERS, EXAMPLES, REQUESTS
from service.api.schemas import QaRequest, parse
from service.errors import InvalidInput
from service.keys import digest, make_key
from service.observability.metrics import CONTENT_TYPE, Metrics
from service.settings import Settings
from tests.examples import collect
from tests.service.fakes import FakeEngines

TASK_STATUSES = [200, 400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 500, 503, 504]


@pytest.fixture
def keyed(engines: FakeEngines) -> dict[str, Any]:
    """The document of a service with keys."""
    keys = {"one": {"sha256": digest(make_key()).hex()}}
    return create_app(Settings(keys=keys), engines.open, Metrics()).openapi()


async def test_the_document_is_served(client, document):
    """The address that the docs page reads gives the document."""
    assert (await client.get("/openapi.json")).json() == document


async def test_the_document_is_made_once_and_in_a_thread(app, client, monkeypatch):
    """Any client may request it, at any rate, and does not hold up the event loop."""
    made_in = []

    def make():
        made_in.append(threading.current_thread())
        return {"openapi": "3.1.0"}

    monkeypatch.setattr(app, "openapi", make)
    replies = await asyncio.gather(*(client.get("/openapi.json") for _ in range(20)))
    assert {'{"openapi":"3.1.0"}'} == {reply.text for reply in replies}
    assert 1 == len(made_in)
    assert threading.current_thread() not in made_in


@pytest.mark.parametrize("path", REQUESTS)
def test_each_task_declares_its_body(document, path):
    """The body's schema is there, though the framework never reads it."""
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": f"#/components/schemas/{REQUESTS[path].__name__}"}
    assert body["examples"]


@pytest.mark.parametrize("path", REQUESTS)
def test_each_task_declares_its_answers(document, path):
    """Every status that it can answer, errors in the one shape."""
    responses = document["paths"][path]["post"]["responses"]
    shape = {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}
    assert sorted(map(int, responses)) == TASK_STATUSES
    assert all(responses[str(s)]["content"]["application/json"] == shape for s in TASK_STATUSES[1:])


@pytest.mark.parametrize("dialect", DIALECTS, ids=[dialect.tag for dialect in DIALECTS])
def test_each_dialect_declares_its_errors(document, dialect):
    """Every status that a route can answer has the body of the dialect's errors."""
    shape = {"schema": {"$ref": f"#/components/schemas/{dialect.error_model.__name__}"}}
    methods = [one for path in document["paths"].values() for one in path.values()]
    own = [one["responses"] for one in methods if one["tags"] == [dialect.tag]]
    assert own
    for responses in own:
        assert all(
            responses[status]["content"]["application/json"] == shape
            for status in responses
            if status != "200"
        )


def test_a_key_is_declared_where_one_is_needed(keyed):
    """A bearer's key; health checks never need one."""
    operations = {path: next(iter(methods.values())) for path, methods in keyed["paths"].items()}
    assert keyed["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operation in operations.items():
        is_open = path.startswith(("/health/", "/v2/health/"))
        assert operation["security"] == ([] if is_open else [{"key": []}])
        assert ({"401", "403", "429"} <= set(operation["responses"])) == (not is_open)


def test_no_key_is_declared_without_keys(document):
    """Swagger UI shows a padlock at each operation that declares one."""
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert not [one for one in operations if "security" in one]
    assert "securitySchemes" not in document["components"]


def test_each_operation_says_what_it_returns(document):
    """Its summary is a text of several words, not the name of a function."""
    paths = document["paths"]
    summaries = [one["summary"] for path in paths.values() for one in path.values()]
    assert "Labels and their scores for each text, or each pair of texts" == summaries[0]
    assert not [text for text in summaries if " " not in text or text.endswith(".")]


def test_the_states_of_a_model_are_declared(document):
    """Each is one word, the same in both lists of models."""
    schemas = document["components"]["schemas"]
    served = ["current", "previous", "pinned"]
    states = [*served, "cold", "set_aside", "loading", "draining"]
    assert states == schemas["State"]["enum"]
    for model in ("DescribedModel", "Model"):
        assert "#/components/schemas/State" in str(schemas[model]["properties"]["state"])


def test_an_order_may_be_refused_for_its_body(document):
    """The document declares 415 for its encoding, and 429 for too many bodies."""
    responses = document["paths"]["/admin/models"]["post"]["responses"]
    assert "`unsupported_encoding`" in responses["415"]["description"]
    assert "`overloaded`" in responses["429"]["description"]


def test_a_priority_may_be_refused_wherever_it_is_read(keyed):
    """That is on every path that is not open to all."""
    for path, methods in keyed["paths"].items():
        for operation in methods.values():
            assert ("422" in operation["responses"]) == bool(operation["security"]), path


def test_what_is_never_accepted_is_declared(document):
    """No request has an empty list of texts, a blank question, or a name that is longer than any."""
    schemas = document["components"]["schemas"]
    inputs = schemas["EmbedRequest"]["properties"]["inputs"]["anyOf"]
    assert [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}] == [
        dict(sorted(kind.items(), reverse=True)) for kind in inputs
    ]
    assert r"\S" == schemas["QaInput"]["properties"]["question"]["pattern"]
    assert r"\S" == schemas["QaQuestionRequest"]["properties"]["question"]["pattern"]
    assert 386 == schemas["NerRequest"]["properties"]["model"]["maxLength"]


QUESTION, CONTEXT = "Who?", "Ada."
SEVERAL = [{"question": QUESTION, "context": CONTEXT}]


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ({}, False),
        ({"question": QUESTION}, False),
        ({"question": QUESTION, "context": CONTEXT}, True),
        ({"question": QUESTION, "context": CONTEXT, "inputs": None}, True),
        ({"question": QUESTION, "context": CONTEXT, "inputs": SEVERAL}, False),
        ({"question": QUESTION, "context": None}, False),
        ({"inputs": SEVERAL}, True),
        ({"inputs": SEVERAL, "question": None, "context": None}, True),
        ({"inputs": SEVERAL, "question": QUESTION}, False),
        ({"inputs": []}, False),
        ({"inputs": SEVERAL, "top_k": 2.0, "truncate": True, "model": None}, True),
        ({"inputs": SEVERAL, "truncate": "window", "on_error": "null"}, True),
        ({"inputs": SEVERAL, "truncate": "none"}, False),
        ({"inputs": SEVERAL, "truncate": 1}, False),
        ({"inputs": SEVERAL, "stride": 1.5}, False),
    ],
)
def test_a_body_is_valid_by_its_schema_where_it_is_accepted(document, body, valid):
    """The schema of /qa and the service agree on bodies with one question, several, both and none."""
    schema = {**document, "$ref": "#/components/schemas/QaRequest"}
    assert valid == Draft202012Validator(schema).is_valid(body)
    with nullcontext() if valid else pytest.raises(InvalidInput):
        parse(QaRequest, body, 8)


def test_metrics_are_declared_as_text(document):
    """/metrics answers in Prometheus's format alone, and errors in JSON."""
    responses = document["paths"]["/metrics"]["get"]["responses"]
    assert [CONTENT_TYPE] == [*responses["200"]["content"]]
    assert ["application/json"] == [*responses["401"]["content"]]


def test_components_have_names_for_generators(document):
    """Enumerations are components, and no property has a title that would name a type of its own."""
    schemas = document["components"]["schemas"]
    fields = [field for each in schemas.values() for field in each.get("properties", {}).values()]
    assert not [field for field in fields if "title" in field or "'enum'" in str(field)]
    enums = {name: schema["enum"] for name, schema in schemas.items() if "enum" in schema}
    assert ["window"] == enums["Truncate"]
    assert ["fail", "null"] == enums["OnError"]
    assert ["float", "base64"] == enums["EncodingFormat"]
    assert ["interactive", "bulk"] == enums["Priority"]
    for parameter in document["paths"]["/embed"]["post"]["parameters"]:
        assert "enum" not in parameter["schema"]


async def test_examples_are_answers_of_the_default_bundle(mini_bundle, document):
    """What the document shows is what the service answers; `python -m tests.examples` writes it again."""
    answers = await collect()
    assert rounded(ANSWERS) == rounded(answers)
    for path, examples in ANSWERS.items():
        ((_, operation),) = document["paths"][path].items()
        shown = operation["responses"]["200"]["content"]["application/json"]["examples"]
        assert examples == {name: example["value"] for name, example in shown.items()}


def test_examples_of_answers_are_valid(document):
    """They match the schemas of the responses."""
    for path, examples in ANSWERS.items():
        ((_, operation),) = document["paths"][path].items()
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        for example in examples.values():
            Draft202012Validator({**document, **schema}).validate(example)


def rounded(value: Any) -> Any:
    """The value for a comparison across processors, which round int8 differently, and across runtimes."""
    match value:
        case float():
            return pytest.approx(value, abs=0.02)
        case list():
            return [rounded(item) for item in value]
        case dict():
            return {name: rounded(item) for name, item in value.items() if name != "runtime"}
        case str() if len(value) > 64 and value.endswith("="):
            return rounded(np.frombuffer(base64.b64decode(value), "<f4").tolist())
    return value


def test_every_reference_leads_somewhere(document):
    """No `$ref` dangles."""
    references = set(re.findall(r"'\$ref': '#/components/schemas/(\w+)'", str(document)))
    assert references <= set(document["components"]["schemas"])
    assert "QaInput" in references


def test_what_a_path_names_is_declared(document):
    """Each `{name}` of a path is a parameter of its operations."""
    asked = [
        (path, operation.get("parameters", []))
        for path, operations in document["paths"].items()
        for operation in operations.values()
    ]
    for path, parameters in asked:
        in_path = [each["name"] for each in parameters if each["in"] == "path"]
        assert in_path == re.findall(r"{(\w+)}", path)
    assert any("{" in path for path, _ in asked)


def test_routes_are_named_after_their_functions(document):
    """Operation ids make good names for generated clients."""
    operations = [
        operation
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if path.split("/")[1] not in {dialect.prefix for dialect in DIALECTS}
    ]
    names = [operation["operationId"] for operation in operations]
    tasks = [path.removeprefix("/").replace("-", "_") for path in REQUESTS]
    pages = ["models", "live", "ready", "metrics"]
    changed = ["list_models", "load_model", "unload_model", "promote_model", "roll_back_model"]
    assert sorted(names) == sorted([*tasks, *pages, *changed])


@pytest.mark.parametrize(
    ("schema", "body"),
    [(schema, body) for schema in REQUESTS.values() for body in EXAMPLES[schema].values()],
)
def test_examples_are_valid(schema, body):
    """Every example is a valid request."""
    assert parse(schema, body, 8).size > 0
