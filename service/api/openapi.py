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
KEYED: tuple[type[QuartetError], ...] = (
    errors.Unauthorized,
    errors.Forbidden,
    errors.RateLimited,
)
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

EXAMPLES: dict[type[Request], Object] = {
    ClassifyRequest: {
        "one text": {"inputs": "The lamp arrived broken, and the shop never answered."},
        "several texts, best label each": {
            "inputs": ["A quiet, generous film.", "Two dull hours that I want back."],
            "top_k": 1,
        },
        "pairs of texts": {
            "inputs": ["The room was clean and quiet.", "The shower was cold."],
            "text_pair": ["We slept wonderfully.", "The front desk never answered."],
        },
    },
    NerRequest: {
        "entities": {"inputs": "Ada Lovelace met Charles Babbage in London in 1833."},
        "every token": {
            "inputs": "The ferry from Piraeus reaches Naxos in an hour.",
            "aggregation_strategy": "none",
        },
    },
    QaRequest: {
        "one question": {
            "question": "When does the bakery open?",
            "context": "The bakery on Mill Street opens at six o'clock and sells out by ten.",
        },
        "several questions, or no answer": {
            "inputs": [
                {
                    "question": "Who keeps bees on the roof?",
                    "context": "Marta Silva keeps bees on the roof of the school.",
                },
                {
                    "question": "How tall is the tower?",
                    "context": "Marta Silva keeps bees on the roof of the school.",
                },
            ],
            "handle_impossible_answer": True,
        },
    },
    EmbedRequest: {
        "several texts": {
            "inputs": ["How do I reset my password?", "I cannot log in."],
            "dimensions": 8,
        },
        "shorter vectors as base64": {
            "inputs": "A river stone, smooth and grey.",
            "dimensions": 16,
            "encoding_format": "base64",
        },
        "a query as packed bits": {
            "inputs": "smooth stones",
            "input_type": "query",
            "dimensions": 64,
            "output_dtype": "ubinary",
        },
    },
    EmbedTokensRequest: {
        "a query": {"inputs": "How do I get a new password?", "input_type": "query"},
    },
    EmbedSparseRequest: {
        "the largest weights": {
            "inputs": "A river stone, smooth and grey.",
            "top_k": 8,
            "return_tokens": True,
        },
    },
    FillMaskRequest: {
        "one mask token": {"inputs": "The ferry to the [MASK] leaves at noon."},
        "some tokens only": {
            "inputs": "She opened the [MASK] and read the letter.",
            "targets": ["door", "envelope"],
        },
    },
    RerankRequest: {
        "by the vectors of an embedding head": {
            "query": "How do I get a new password?",
            "documents": [
                "The bakery opens at six.",
                "Reset a forgotten password under Settings.",
                "Parcels arrive within two days.",
            ],
            "head": "embeddings",
            "top_n": 2,
            "return_text": True,
        },
    },
    SimilarityRequest: {
        "one text with several": {
            "source": "How do I reset my password?",
            "inputs": ["I forgot my password.", "The bakery opens at six."],
        },
    },
    ZeroShotRequest: {
        "labels of the request": {
            "inputs": "The lamp arrived broken.",
            "labels": ["complaint", "question", "praise"],
        },
    },
    AnalyzeRequest: {
        "two heads, one pass": {
            "inputs": "Ada Lovelace was glad to meet Charles Babbage.",
            "heads": ["sentiment", "entities"],
        },
    },
    TokenizeRequest: {"one text": {"inputs": "A kiteflyer 🪁 smiles."}},
    DetokenizeRequest: {"one list of ids": {"ids": [101, 1996, 7115, 3727, 2012, 11501, 102]}},
}

# Responses of the default bundle to EXAMPLES and to pages, by route: `python -m tests.examples` writes them.
ANSWERS: Mapping[str, Mapping[str, object]] = json.loads(
    Path(__file__).with_name("example_answers.json").read_text(encoding="utf-8")
)

REQUEST_HEADERS: list[Object] = [
    {
        "name": "X-Request-Id",
        "in": "header",
        "description": "Names the request in the response and in the log; made up unless it is of"
        " 1 to 128 printable ASCII characters.",
        "schema": {"type": "string"},
    },
    {
        "name": "traceparent",
        "in": "header",
        "description": "W3C Trace Context: the log then names the trace.",
        "schema": {"type": "string"},
    },
    {
        "name": "X-Priority",
        "in": "header",
        "description": "May only lower the priority that the key gives.",
        "schema": reference("Priority"),
    },
    {
        "name": "X-Request-Timeout-Ms",
        "in": "header",
        "description": "Answer within this time or with 504; at most the server's own deadline.",
        "schema": {"type": "integer", "minimum": 1},
    },
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
    "X-Quartet-Head": "The heads that the results are from.",
    "X-Quartet-Model": "The bundle's hash, precision, provider and runtime.",
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
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
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
