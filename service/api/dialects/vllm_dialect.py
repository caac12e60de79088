"""The API of vLLM's pooling models, under `/vllm`: scores, labels, vectors and ranked documents.

Long texts are refused unless `truncate_prompt_tokens` is -1. Token ids belong to the tokenizer of the model.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from service import __version__
from service.api import openapi
from service.api.dialects import openai_dialect
from service.api.dialects.common import (
    REFUSED,
    TEXTS_ONLY,
    DocumentsRequest,
    EncodingFormat,
    InputRequest,
    Lenient,
    OpenAIErrorResponse,
    OpenAIUsage,
    Unused,
    allowed,
    embedding_data,
    encoded,
    filled,
    input_texts,
    own_tokens,
    rank_request,
    refused,
    status_of,
    text_of,
    usage,
)
from service.api.engine_call import Call, json_response, receive_call, service_of
from service.api.native_routes import make_router, rank_documents
from service.api.schemas import numbered
from service.core.decode import LabelScore, Vector
from service.core.manifest import Task
from service.engines.engine import Engine, Reply
from service.errors import ErrorForm, InvalidInput, QuartetError
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.fields import AtLeastOne, AtLeastZero, ServedName, Texts
from service.tasks.late_interaction import TokenEmbedding
from service.tasks.reranking import (
    Reranking,
    make_ranking,
    select_cross_encoder,
    select_ranking_head,
)

PREFIX = "vllm"
TAG = "vLLM"
ERROR_TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
}
# The pairs of fields that the texts of /score may have.
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
NO_MESSAGES = "a model of this service has no chat template: send input"

router = make_router(f"/{PREFIX}", "vllm_")


ERROR_MODEL = OpenAIErrorResponse


def error_form(error: QuartetError) -> ErrorForm:
    status = status_of(error)
    kind = ERROR_TYPES.get(status) or (
        "InternalServerError" if status >= 500 else "BadRequestError"
    )
    body = {"message": error.message, "type": kind, "param": error.param, "code": status}
    return ErrorForm(status, {"error": body})


# -- requests -------------------------------------------------------------------------------------


class VllmRequest(Lenient):
    """The common fields."""

    truncate_prompt_tokens: Annotated[
        int | None, allowed(None, -1, reason="long texts are cut to the limit of the model")
    ] = Field(None, description="-1 cuts long texts; else they are refused")
    truncation_side: Annotated[
        str | None, allowed(None, "right", reason="texts are cut at their end")
    ] = Field(None, description="only right")
    use_activation: bool | None = Field(None, description="false returns logits")
    activation: bool | None = Field(None, description="an older name of use_activation")
    softmax: bool | None = Field(None, description="an older name of use_activation")
    request_id: ServedName | None = Field(None, description="a part of the id of the response")
    priority: Annotated[
        int | None, allowed(None, 0, reason="the header X-Priority lowers the priority")
    ] = Field(None, description="only 0")
    user: Unused = None
    mm_processor_kwargs: Annotated[None, refused(TEXTS_ONLY)] = Field(None, description=REFUSED)

    @property
    def cuts(self) -> bool:
        return self.truncate_prompt_tokens is not None

    @property
    def raw_scores(self) -> bool:
        return False in (self.use_activation, self.activation, self.softmax)


class VllmInputRequest(InputRequest, VllmRequest):
    add_special_tokens: Annotated[
        bool | None, allowed(None, True, reason="the model reads its special tokens")
    ] = Field(None, description="only true")
    messages: Annotated[None, refused(NO_MESSAGES)] = Field(None, description=REFUSED)


class VllmClassifyRequest(VllmInputRequest):
    task = "classification"


class VllmPoolingRequest(VllmInputRequest):
    task = "embedding"

    pooling_task: Annotated[
        str | None,
        allowed(
            *(None, "embed", "token_embed", "classify"),
            reason="the labels of tokens are at /ner, as entities",
        ),
    ] = Field(
        None,
        alias="task",
        description="embed, token_embed or classify; when absent, the first of these that the model has a head for",
    )
    encoding_format: EncodingFormat = None
    embed_dtype: Annotated[
        str | None, allowed(None, "float32", reason="the type of all numbers")
    ] = Field(None, description="only float32")
    endianness: Annotated[
        str | None, allowed(None, "native", "little", reason="numbers are little-endian")
    ] = Field(None, description="native or little")
    dimensions: AtLeastOne | None = Field(None, description="keep only the first dimensions")
    normalize: bool | None = Field(
        None, description="scale vectors to length 1; as the head says when absent"
    )

    data: Annotated[None, refused("no model of this service has an I/O processor: send input")] = (
        Field(None, description=REFUSED)
    )

    @property
    def normalizes(self) -> bool | None:
        return False if self.normalize is None and self.raw_scores else self.normalize


class VllmPairRequest(VllmRequest):
    """The fields of requests that compare texts."""

    max_tokens_per_query: Annotated[
        int | None, allowed(None, 0, reason="texts are cut to the limit of the model")
    ] = Field(None, description="only 0")
    max_tokens_per_doc: Annotated[
        int | None, allowed(None, 0, reason="texts are cut to the limit of the model")
    ] = Field(None, description="only 0")


class VllmScoreRequest(VllmPairRequest):
    """One text with several, or pairs: text_1 and text_2, queries and documents or items, or data_1 and data_2."""

    task = "rerank"
    text_fields = tuple({name for pair in SIDES for name in pair})

    text_1: Texts | None = Field(None, description="one text, or as many as in the other field")
    text_2: Texts | None = Field(None, description="the texts that it is compared with")
    queries: Texts | None = Field(None, description="another name of text_1")
    documents: Texts | None = Field(None, description="another name of text_2")
    items: Texts | None = Field(None, description="another name of text_2")
    data_1: Texts | None = Field(None, description="another name of text_1")
    data_2: Texts | None = Field(None, description="another name of text_2")

    @model_validator(mode="after")
    def _two_sides(self) -> Self:
        present = {name for pair in SIDES for name in pair if getattr(self, name) is not None}
        if not any(present == {*pair} for pair in SIDES):
            reason = "required with text_2, or queries with documents or items, or data_1 with data_2, and no others"
            raise InvalidInput(f"text_1: {reason}", param="text_1")
        counts = len(self.first), len(self.second)
        if counts[0] not in (1, counts[1]):
            names = " and ".join(self.names)
            raise InvalidInput(
                f"{names}: have {counts[0]} and {counts[1]} texts; they must be 1, or as many",
                param=self.names[0],
            )
        return self

    @property
    def names(self) -> tuple[str, str]:
        (found,) = (pair for pair in SIDES if all(getattr(self, name) for name in pair))
        return found

    @property
    def first(self) -> list[str]:
        texts: list[str] = getattr(self, self.names[0])
        return texts

    @property
    def second(self) -> list[str]:
        texts: list[str] = getattr(self, self.names[1])
        return texts

    @property
    def size(self) -> int:
        return len(self.second)

    @property
    def place(self) -> str:
        return self.names[1] + "[{}]"

    def texts(self) -> Iterator[tuple[str, str]]:
        yield from numbered(self.names[0], self.first)
        yield from numbered(self.names[1], self.second)


class VllmRerankRequest(DocumentsRequest, VllmPairRequest):
    task = "rerank"

    top_n: AtLeastZero | None = Field(None, description="documents to return; 0 for all")


# -- responses ------------------------------------------------------------------------------------


class VllmResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int = Field(description="seconds since 1970")
    model: str
    usage: OpenAIUsage


class VllmLabels(BaseModel):
    index: int
    label: str = Field(description="with the largest score")
    probs: list[float] = Field(description="in the order of the labels of the head")
    num_classes: int


class VllmClassifyResponse(VllmResponse):
    data: list[VllmLabels]


class VllmScore(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class VllmScoreResponse(VllmResponse):
    data: list[VllmScore]


class VllmPooled(BaseModel):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class VllmPoolingResponse(VllmResponse):
    data: list[VllmPooled]


class VllmDocument(BaseModel):
    text: str


class VllmRanked(BaseModel):
    index: int
    document: VllmDocument
    relevance_score: float


class VllmRerankResponse(BaseModel):
    id: str
    model: str
    usage: OpenAIUsage
    results: list[VllmRanked]


# -- routes ---------------------------------------------------------------------------------------


@router.post("/classify", **openapi.dialect(VllmClassifyRequest, VllmClassifyResponse, TAG))
async def classify(request: HttpRequest) -> Response:
    """The best label of each text, and the scores of all labels."""
    call = await receive_call(request, VllmClassifyRequest)
    reply = await classify_texts(request, call)
    labels = call.engine.manifest.heads[reply.heads[0]].labels
    data = [
        {
            "index": index,
            "label": found[0].label,
            "probs": in_label_order(found, labels),
            "num_classes": len(labels),
        }
        for index, found in enumerate(filled(reply.results))
    ]
    return respond(call, reply, "classify", data)


async def classify_texts(request: HttpRequest, call: Call[Any]) -> Reply[list[LabelScore]]:
    task = Classification(
        inputs=await input_texts(request, call, partial(own_tokens, call.engine)),
        function_to_apply="none" if call.body.raw_scores else None,
        truncate=call.body.cuts,
    )
    return await call.compute(task)


def in_label_order(found: Sequence[LabelScore], labels: Sequence[str]) -> list[float]:
    scores = {one.label: one.score for one in found}
    return [scores[label] for label in labels]


@router.post("/score", **openapi.dialect(VllmScoreRequest, VllmScoreResponse, TAG))
async def score(request: HttpRequest) -> Response:
    """The score of each pair of texts: by a cross-encoder, by vectors of tokens or by vectors of texts."""
    call = await receive_call(request, VllmScoreRequest)
    body, engine = call.body, call.engine
    head = select_ranking_head(engine)
    reply: Reply[Any]
    if head is None and len(body.first) > 1:
        reply, scores = await score_pairs(call)
    elif len(body.first) > 1:
        name = body.names[0]
        raise InvalidInput(
            f"{name}: has {len(body.first)} texts; {engine.id} compares one text with others, since it has no"
            " cross-encoder",
            param=name,
        )
    else:
        ranking = make_ranking(
            engine,
            head,
            Reranking(
                query=body.first[0],
                documents=body.second,
                raw_scores=body.raw_scores,
                truncate=body.cuts,
            ),
        )
        reply, ranked = await rank_documents(call, ranking, None)
        scores = [one.score for one in sorted(ranked)]
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    return respond(call, reply, "score", data)


async def score_pairs(call: Call[VllmScoreRequest]) -> tuple[Reply[list[LabelScore]], list[float]]:
    """Score several pairs by the model's cross-encoder. Raises UnknownHead for a model without one."""
    body = call.body
    name = select_cross_encoder(call.engine, ())
    task = Classification(
        inputs=body.first,
        text_pair=body.second,
        function_to_apply="none" if body.raw_scores else None,
        truncate=body.cuts,
    )
    reply = await call.compute(task, (name,))
    return reply, [found[0].score for found in filled(reply.results)]


@router.post("/pooling", **openapi.dialect(VllmPoolingRequest, VllmPoolingResponse, TAG))
async def pooling(request: HttpRequest) -> Response:
    """The vector of each text, the vectors of its tokens, or the scores of its labels."""
    call = await receive_call(request, VllmPoolingRequest)
    body = call.body
    reply: Reply[Any]
    found: list[Vector]
    match body.pooling_task or default_pooling(call.engine):
        case "classify":
            reply = await classify_texts(request, call)
            labels = call.engine.manifest.heads[reply.heads[0]].labels
            scores = [in_label_order(one, labels) for one in filled(reply.results)]
            found = [np.asarray(one, np.float32) for one in scores]
        case "token_embed":
            texts = await input_texts(request, call, partial(own_tokens, call.engine))
            reply = await call.compute(TokenEmbedding(inputs=texts, truncate=body.cuts))
            found = filled(reply.results)
        case _:
            reply = await embed_texts(request, call)
            found = filled(reply.results)
    data = [
        {"index": index, "object": "pooling", "data": encoded(one, body.encoding_format)}
        for index, one in enumerate(found)
    ]
    return respond(call, reply, "pool", data)


async def embed_texts(request: HttpRequest, call: Call[VllmPoolingRequest]) -> Reply[Vector]:
    body = call.body
    task = Embedding(
        inputs=await input_texts(request, call, partial(own_tokens, call.engine)),
        normalize=body.normalizes,
        dimensions=body.dimensions,
        truncate=body.cuts,
    )
    return await call.compute(task)


@router.post("/v1/embeddings", include_in_schema=False)
async def embeddings(request: HttpRequest) -> Response:
    """The vector of each text, as OpenAI's API has it, with the parameters of vLLM."""
    call = await receive_call(request, VllmPoolingRequest)
    reply = await embed_texts(request, call)
    return respond(call, reply, "embd", embedding_data(reply.results, call.body.encoding_format))


def default_pooling(engine: Engine) -> str:
    """Return the first kind of pooling that the model has a head for."""
    tasks: set[Task] = {head.task for head in engine.manifest.heads.values()}
    kinds: Mapping[Task, str] = {
        "embedding": "embed",
        "late-interaction": "token_embed",
        "classification": "classify",
    }
    return next((kind for task, kind in kinds.items() if task in tasks), "embed")


@router.post("/rerank", **openapi.dialect(VllmRerankRequest, VllmRerankResponse, TAG))
async def rerank(request: HttpRequest) -> Response:
    """The documents by falling score: by a cross-encoder, by vectors of tokens or by vectors of texts."""
    call = await receive_call(request, VllmRerankRequest)
    body = call.body
    show = lambda one: {"document": {"text": text_of(one)}}  # noqa: E731
    reply, results = await rank_request(
        call, raw_scores=body.raw_scores, truncate=body.cuts, show=show
    )
    content = {
        "id": call.make_id("rerank", body.request_id),
        "model": call.engine.id,
        "usage": usage(reply),
        "results": results,
    }
    return json_response(content, call.headers(reply))


def respond(call: Call[Any], reply: Reply[Any], kind: str, data: object) -> Response:
    """Return a response with these data and the fields that every response has."""
    content = {
        "id": call.make_id(kind, call.body.request_id),
        "object": "list",
        "created": int(time.time()),
        "model": call.engine.id,
        "data": data,
        "usage": usage(reply),
    }
    return json_response(content, call.headers(reply))


@router.get("/version", include_in_schema=False)
async def version(request: HttpRequest) -> Response:
    """The version of this service."""
    return json_response({"version": __version__})


@router.get("/health", include_in_schema=False)
async def health(request: HttpRequest) -> Response:
    """New requests may be sent here; without a body."""
    service_of(request).check_ready()
    return Response()


# vLLM has these paths, too.
router.add_api_route("/v1/models", openai_dialect.models, include_in_schema=False)
router.add_api_route("/v1/score", score, methods=["POST"], include_in_schema=False)
for prefix in ("v1", "v2"):
    router.add_api_route(f"/{prefix}/rerank", rerank, methods=["POST"], include_in_schema=False)
