"""The API of infinity, under `/infinity`.

Texts that are too long are cut; `usage.truncated`, which infinity's answers do not have, then has their indices. Long
documents of /rerank are read in windows, of which the best one counts.
"""

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from service.api import openapi
from service.api.dialects.common import (
    TEXTS_ONLY,
    DocumentsRequest,
    EncodingFormat,
    ErrorBody,
    Lenient,
    OpenAIEmbedding,
    OpenAIError,
    OpenAIUsage,
    Unused,
    abilities,
    allowed,
    embedding_data,
    filled,
    rank_request,
    text_of,
    usage,
)
from service.api.engine_call import Call, engines_of, json_response, receive_call, service_of
from service.api.native_routes import label, make_router
from service.api.responses import Label
from service.engines.engine import Engine, Reply
from service.errors import (
    ErrorForm,
    InvalidInput,
    NotFound,
    QuartetError,
    TooLarge,
    Unauthorized,
    UnknownHead,
    UnknownModel,
)
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.fields import AtLeastZero, ServedName, Texts

PREFIX = "infinity"
TAG = "infinity"
ANY_MODEL = "default/not-specified"  # what clients send for the default
Modality = Annotated[str | None, allowed(None, "text", reason=TEXTS_ONLY)]

router = make_router(f"/{PREFIX}", "infinity_")


class InfinityFault(ErrorBody):
    loc: list[str]
    msg: str
    type: str


class InfinityErrorResponse(ErrorBody):
    """`detail` for bodies, paths and keys, or `error` for the rest."""

    detail: list[InfinityFault] | str = Field("", description="the faults of a body, or a message")
    error: OpenAIError | None = None


ERROR_MODEL = InfinityErrorResponse


def error_form(error: QuartetError) -> ErrorForm:
    """Return an error in the form that infinity has for bodies, for paths and keys, or for the rest."""
    match error:
        case InvalidInput() | TooLarge():
            location = ["body", *([error.param] if error.param else [])]
            fault = {"loc": location, "msg": error.message, "type": "value_error"}
            return ErrorForm(422, {"detail": [fault]})
        case UnknownModel() | UnknownHead():
            status = 400
        case NotFound() | Unauthorized():
            return ErrorForm(error.status, {"detail": error.message})
        case _:
            status = error.status
    body = {"message": error.message, "type": error.code, "param": error.param, "code": status}
    return ErrorForm(status, {"error": body})


# -- requests -------------------------------------------------------------------------------------


def check_model(value: object) -> object:
    return None if value == ANY_MODEL else value


Model = Annotated[
    ServedName | None,
    BeforeValidator(check_model),
    Field(description=f"`name` or `name@version`; the first when absent or {ANY_MODEL}"),
]


class InfinityRequest(Lenient):
    model: Model = None


class InfinityInputRequest(InfinityRequest):
    listed = "input"
    text_fields = ("input",)

    input: Texts = Field(description="one text, or several")


class InfinityEmbeddingRequest(InfinityInputRequest):
    task = "embedding"

    encoding_format: EncodingFormat = None
    dimensions: AtLeastZero | None = Field(
        None, description="keep only the first dimensions; 0 for all"
    )
    modality: Modality = Field(None, description="only text")
    user: Unused = None


class InfinityClassifyRequest(InfinityInputRequest):
    task = "classification"

    raw_scores: bool | None = Field(None, description="logits in place of scores")


class InfinityRerankRequest(DocumentsRequest, Lenient):
    model: Model = None
    return_documents: bool | None = Field(None, description="whether each result has its document")
    raw_scores: bool | None = Field(None, description="logits in place of scores")


# -- responses ------------------------------------------------------------------------------------


class InfinityResponse(BaseModel):
    model: str
    usage: OpenAIUsage
    id: str
    created: int = Field(description="seconds since 1970")


class InfinityEmbeddingResponse(InfinityResponse):
    object: Literal["list"]
    data: list[OpenAIEmbedding]


class InfinityClassifyResponse(InfinityResponse):
    object: Literal["classify"]
    data: list[list[Label]]


class InfinityRanked(BaseModel):
    relevance_score: float
    index: int
    document: str | None = Field(None, description="where `return_documents` is true")


class InfinityRerankResponse(InfinityResponse):
    object: Literal["rerank"]
    results: list[InfinityRanked]


class InfinityModel(BaseModel):
    id: str
    stats: dict[str, Any] = Field(description="empty: the page /metrics has them")
    object: Literal["model"]
    owned_by: Literal["infinity"]
    created: int
    backend: str
    capabilities: list[str] = Field(description="embed, rerank and classify")


class InfinityModelList(BaseModel):
    object: Literal["list"]
    data: list[InfinityModel]


class InfinityHealth(BaseModel):
    unix: float = Field(description="seconds since 1970")


# -- routes ---------------------------------------------------------------------------------------


@router.post(
    "/embeddings", **openapi.dialect(InfinityEmbeddingRequest, InfinityEmbeddingResponse, TAG)
)
async def embeddings(request: HttpRequest) -> Response:
    """One vector for each text."""
    call = await receive_call(request, InfinityEmbeddingRequest)
    body = call.body
    reply = await call.compute(Embedding(inputs=body.input, dimensions=body.dimensions or None))
    data = embedding_data(reply.results, body.encoding_format)
    return respond(call, reply, {"object": "list", "data": data})


@router.post("/classify", **openapi.dialect(InfinityClassifyRequest, InfinityClassifyResponse, TAG))
async def classify(request: HttpRequest) -> Response:
    """The labels of each text by falling score."""
    call = await receive_call(request, InfinityClassifyRequest)
    body = call.body
    task = Classification(inputs=body.input, function_to_apply="none" if body.raw_scores else None)
    reply = await call.compute(task)

    def content() -> dict[str, object]:
        data = [[*map(label, found)] for found in filled(reply.results)]
        return framed(call, reply, {"object": "classify", "data": data})

    return json_response(content, call.headers(reply))


@router.post("/rerank", **openapi.dialect(InfinityRerankRequest, InfinityRerankResponse, TAG))
async def rerank(request: HttpRequest) -> Response:
    """The documents by falling relevance to a query."""
    call = await receive_call(request, InfinityRerankRequest)
    body = call.body
    show = (lambda one: {"document": text_of(one)}) if body.return_documents else None
    reply, results = await rank_request(call, raw_scores=body.raw_scores, show=show)
    return respond(call, reply, {"object": "rerank", "results": results})


def respond(call: Call[Any], reply: Reply[Any], results: dict[str, object]) -> Response:
    """Return a response with these fields and the fields that every response has."""
    return json_response(framed(call, reply, results), call.headers(reply))


def framed(call: Call[Any], reply: Reply[Any], results: dict[str, object]) -> dict[str, object]:
    return {
        **results,
        "model": call.engine.id,
        "usage": usage(reply),
        "id": call.make_id("infinity"),
        "created": int(time.time()),
    }


@router.get("/models", **openapi.dialect_page(InfinityModelList, TAG))
async def models(request: HttpRequest) -> Response:
    """The models that are served."""
    engines = engines_of(request).all()
    return json_response({"object": "list", "data": [describe(engine) for engine in engines]})


def describe(engine: Engine) -> dict[str, object]:
    return {
        "id": engine.id,
        "stats": {},
        "object": "model",
        "owned_by": "infinity",
        "created": 0,
        "backend": "onnxruntime",
        "capabilities": abilities(engine),
    }


@router.get("/health", **openapi.dialect_page(InfinityHealth, TAG))
async def health(request: HttpRequest) -> Response:
    """New requests may be sent here."""
    service_of(request).check_ready()
    return json_response({"unix": time.time()})
