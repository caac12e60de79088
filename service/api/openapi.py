"""The OpenAPI document: bodies, responses, error codes and examples of every route.

The routes read their own bodies, so the framework cannot derive the schemas. This module declares them.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from service import errors
from service.api.component_schemas import REFERENCE, for_generators, reference
from service.api.decompression import ACCEPTED
from service.api.ndjson import MEDIA_TYPE
from service.api.responses import ErrorResponse
from service.api.schemas import (
    AdminRequest,
    AnalyzeRequest,
    AttentionRequest,
    ClassifyRequest,
    DetokenizeRequest,
    EmbedRequest,
    EmbedSparseRequest,
    EmbedTokensRequest,
    FillMaskRequest,
    LoadRequest,
    NerRequest,
    PromoteRequest,
    QaRequest,
    Request,
    RerankRequest,
    SimilarityRequest,
    TokenizeRequest,
    ZeroShotRequest,
)
from service.errors import QuartetError
from service.keys import PRIORITIES

Object = dict[str, Any]

# The requests of the native routes, by path.
REQUESTS: Mapping[str, type[Request]] = {
    "/classify": ClassifyRequest,
    "/ner": NerRequest,
    "/qa": QaRequest,
    "/embed": EmbedRequest,
    "/embed-tokens": EmbedTokensRequest,
    "/embed-sparse": EmbedSparseRequest,
    "/rerank": RerankRequest,
    "/similarity": SimilarityRequest,
    "/zero-shot": ZeroShotRequest,
    "/analyze": AnalyzeRequest,
    "/fill-mask": FillMaskRequest,
    "/attention": AttentionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
# The requests of other servers' APIs, which `dialect` adds.
DIALECT_REQUESTS: list[type[Request]] = []
ORDERS: tuple[type[AdminRequest], ...] = (LoadRequest, PromoteRequest)

EVERY_ROUTE: tuple[type[QuartetError], ...] = (
    errors.BadRequest,
    errors.MethodNotAllowed,
    errors.SlowHeaders,
    errors.HeadersTooLarge,
    errors.InternalError,
    errors.TooManyConnections,
)
KEYED: tuple[type[QuartetError], ...] = (errors.Unauthorized, errors.Forbidden, errors.RateLimited)
CLOSED = (*KEYED, errors.InvalidInput)  # InvalidInput: for an unknown priority
NOT_READY: tuple[type[QuartetError], ...] = (errors.NotReady, errors.Draining)
TASK: tuple[type[QuartetError], ...] = (
    errors.UnknownModel,
    errors.UnknownHead,
    errors.RequestTimeout,
    errors.TooLarge,
    errors.UnsupportedMediaType,
    errors.UnsupportedEncoding,
    errors.InvalidInput,
    errors.Overloaded,
    errors.InferenceFailed,
    errors.ReplicaLost,
    errors.DeadlineExceeded,
)
ADMIN: tuple[type[QuartetError], ...] = (
    errors.UnknownModel,
    errors.Conflict,
    errors.NewEmbeddingSpace,
    errors.ChangedAnswers,
    errors.RequestTimeout,
    errors.TooLarge,
    errors.UnsupportedMediaType,
    errors.UnsupportedEncoding,
    errors.InvalidInput,
    errors.BadBundle,
    errors.Overloaded,
    errors.ReplicaLost,
)


def read_examples(name: str) -> Mapping[str, Object]:
    """Return the content of a file next to this one: objects by route and name."""
    found: Mapping[str, Object] = json.loads(
        Path(__file__).with_name(name).read_text(encoding="utf-8")
    )
    return found


EXAMPLES: Mapping[type[Request], Object] = {
    REQUESTS[path]: bodies for path, bodies in read_examples("example_requests.json").items()
}
# Responses of the default bundle to EXAMPLES and to pages, by route: `python -m tests.examples` writes them.
ANSWERS = read_examples("example_answers.json")

TEXT: Object = {"type": "string"}
REQUEST_HEADERS: list[Object] = [
    {"name": name, "in": "header", "description": text, "schema": schema}
    for name, text, schema in (
        (
            "X-Request-Id",
            "Names the request in the response and in the log; made up unless it is of"
            " 1 to 128 printable ASCII characters.",
            TEXT,
        ),
        ("traceparent", "W3C Trace Context: the log then names the trace.", TEXT),
        (
            "X-Quartet-Receipt",
            "Any value: the response says in this header how the answer was made.",
            TEXT,
        ),
        (
            "X-Priority",
            "May only lower the priority that the key gives.",
            reference("Priority"),
        ),
        (
            "X-Request-Timeout-Ms",
            "Answer within this time or with 504; at most the server's own deadline.",
            {"type": "integer", "minimum": 1},
        ),
    )
]

PATH_PARAMETERS: dict[str, str] = {
    "model": "A bundle, as `name@version`.",
    "name": "The name that several versions have.",
}

SECURITY: list[Object] = [{"key": []}]  # `document` removes it if no key is configured

COMPRESSED = (
    f"May be compressed, in one of the ways `Content-Encoding` is then to name: {ACCEPTED}."
)

LINES = (
    "When Accept asks for it: a line for each input, as soon as its result is there, with its `index`"
    " and its `result` or `embedding`; then one with `model`, `head` and `usage` (and `errors`), or an `error`."
)

RESPONSE_HEADERS: dict[str, str] = {
    "X-Request-Id": "The request's name, as given or made up.",
    "Server-Timing": "Milliseconds of parse, encode, queue, inference, return and decode, and in total.",
    "X-Quartet-Batch": "The batch that the answer rode in: `size=8;tokens=312`.",
    "X-Quartet-Cache": "`hit` if all results are remembered ones, see `cache_mb`.",
    "X-Quartet-Head": "The heads that the results are from.",
    "X-Quartet-Model": "The bundle's hash, precision, provider and runtime.",
    "X-Quartet-Receipt": "How the answer was made, for `quartet replay`; only there if the request has this header.",
}


def tokens(request: type[Request], response: type[BaseModel]) -> Object:
    """Return the declaration of a route that needs the tokenizer of a model, but not its graph."""
    declared = task(request, response, in_lines=False)
    declared["responses"][200] = {}
    return declared


def task(request: type[Request], response: type[BaseModel], *, in_lines: bool = True) -> Object:
    """Return the OpenAPI declaration of a task's route. in_lines: it can also answer in NDJSON"""
    body = {
        "schema": reference(request.__name__),
        "examples": {
            name: {"summary": name, "value": value}
            for name, value in EXAMPLES.get(request, {}).items()
        },
    }
    lines = {MEDIA_TYPE: {"schema": {"type": "string", "description": LINES}}}
    return {
        "response_model": response,
        "responses": {
            200: {
                "headers": {name: header(text) for name, text in RESPONSE_HEADERS.items()},
                **({"content": lines} if in_lines else {}),
            },
            **error_responses(*TASK, *KEYED, *NOT_READY, *EVERY_ROUTE),
        },
        "openapi_extra": {
            "security": SECURITY,
            "requestBody": {
                "description": COMPRESSED,
                "required": True,
                "content": {"application/json": body},
            },
            "parameters": REQUEST_HEADERS,
        },
        "tags": ["tasks"],
    }


def dialect(request: type[Request], response: Any, tag: str, *, of: str | None = None) -> Object:
    """Return the declaration of a task's route in the API of another server; of: see `admin`"""
    DIALECT_REQUESTS.append(request)
    declared = task(request, response, in_lines=False)
    if of is not None:
        declared["openapi_extra"]["parameters"] = [*REQUEST_HEADERS, path_parameter(of)]
    return {**declared, "tags": [tag]}


def dialect_page(
    response: type[BaseModel],
    tag: str,
    *,
    errors: Iterable[type[QuartetError]] = (),
    of: str | None = None,
    open_to_all: bool = False,
) -> Object:
    """Return the declaration of a GET route in the API of another server; of: see `admin`, open_to_all: see `page`"""
    declared = page(response, errors=errors, open_to_all=open_to_all)
    if of is not None:
        declared["openapi_extra"]["parameters"] = [path_parameter(of)]
    return {**declared, "tags": [tag]}


def page(
    response: type[BaseModel],
    *,
    open_to_all: bool = False,
    errors: Iterable[type[QuartetError]] = (),
) -> Object:
    """Return the declaration of a GET route that needs the engines.

    open_to_all: the route never requires a key
    errors: of this route alone
    """
    closed = () if open_to_all else CLOSED
    return {
        "response_model": response,
        "responses": error_responses(*errors, *closed, *NOT_READY, *EVERY_ROUTE),
        "openapi_extra": {"security": [] if open_to_all else SECURITY},
        "tags": ["service"],
    }


def admin(
    response: type[BaseModel], request: type[AdminRequest] | None = None, *, of: str | None = None
) -> Object:
    """Return the declaration of an administration route; of: its path parameter, as in `PATH_PARAMETERS`."""
    extra: Object = {"security": SECURITY}
    if of is not None:
        extra["parameters"] = [path_parameter(of)]
    if request is not None:
        body = {"content": {"application/json": {"schema": reference(request.__name__)}}}
        extra["requestBody"] = {"required": request is LoadRequest, **body}
    return {
        "response_model": response,
        "responses": error_responses(*ADMIN, *KEYED, *NOT_READY, *EVERY_ROUTE),
        "openapi_extra": extra,
        "tags": ["administration"],
    }


def path_parameter(name: str) -> Object:
    schema: Object = {"type": "string", "minLength": 1}
    text = PATH_PARAMETERS[name]
    return {"name": name, "in": "path", "required": True, "description": text, "schema": schema}


def text(media_type: str) -> Object:
    """Return the declaration of a GET route that responds with plain text."""
    content = {media_type: {"schema": {"type": "string"}}}
    return {
        "response_model": None,
        "response_class": type("Text", (Response,), {"media_type": media_type}),
        "responses": {
            200: {"content": content},
            **error_responses(errors.ReplicaLost, *CLOSED, *EVERY_ROUTE),
        },
        "openapi_extra": {"security": SECURITY},
        "tags": ["service"],
    }


def header(text: str) -> Object:
    return {"description": text, "schema": {"type": "string"}}


def error_responses(*kinds: type[QuartetError]) -> dict[int | str, Object]:
    """Return the responses of these errors by status, each with its error codes. `document` adds their bodies."""
    codes: dict[int, list[str]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.status):
        codes.setdefault(kind.status, []).append(kind.code)
    return {
        status: {"description": "code " + " or ".join(f"`{code}`" for code in names)}
        for status, names in codes.items()
    }


def document(app: FastAPI, error_models: Mapping[str, type[BaseModel]], keyed: bool) -> Object:
    """Return the whole document, including the bodies that the routes read themselves.

    error_models: the body of an error in other servers' APIs, by the tag of their routes
    keyed: whether keys are configured
    """
    described = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    bodies: list[type[BaseModel]] = [
        *REQUESTS.values(),
        *DIALECT_REQUESTS,
        *ORDERS,
        ErrorResponse,
        *error_models.values(),
    ]
    _, definitions = models_json_schema(
        [(model, "validation") for model in bodies], ref_template=REFERENCE
    )
    for path, answers in ANSWERS.items():  # a declaration next to the routes would lose each null
        (operation,) = described["paths"][path].values()
        operation["responses"]["200"]["content"]["application/json"]["examples"] = {
            name: {"summary": name, "value": value} for name, value in answers.items()
        }
    for operation in (one for path in described["paths"].values() for one in path.values()):
        declare_errors(
            operation["responses"], error_models.get(operation["tags"][0], ErrorResponse)
        )
        operation["summary"] = operation.pop("description").rstrip(".")  # instead of a name
        if not keyed:
            del operation["security"]
    schemas = {**described["components"]["schemas"], **definitions["$defs"]}
    described["components"]["schemas"] = {
        **for_generators(schemas),
        "Priority": {"title": "Priority", "type": "string", "enum": [*PRIORITIES]},
    }
    if keyed:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return described


def declare_errors(responses: Object, model: type[BaseModel]) -> None:
    """Add the body of an error to the responses of an operation."""
    for status, response in responses.items():
        if int(status) >= errors.BadRequest.status:
            response["content"] = {"application/json": {"schema": reference(model.__name__)}}
