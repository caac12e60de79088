"""The native endpoints: each reads a request, calls the engine and formats the result."""

from binascii import b2a_base64
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers import Tokenizer

from service.api import openapi
from service.api.engine_call import (
    Call,
    engines_of,
    finish_response,
    json_response,
    receive_call,
    service_of,
)
from service.api.event_stream import EventStream
from service.api.json_responses import JsonResponse
from service.api.response_compression import compress
from service.api.responses import (
    AnalyzeResponse,
    AttentionResponse,
    ClassifyResponse,
    EmbedResponse,
    EmbedSparseResponse,
    EmbedTokensResponse,
    FillMaskResponse,
    HealthResponse,
    ModelsResponse,
    NerResponse,
    QaResponse,
    RerankResponse,
    SimilarityResponse,
    ZeroShotResponse,
)
from service.api.schemas import (
    AnalyzeRequest,
    AttentionRequest,
    ClassifyRequest,
    EmbedRequest,
    EmbedSparseRequest,
    EmbedTokensRequest,
    FillMaskRequest,
    NerRequest,
    QaRequest,
    RerankRequest,
    SimilarityRequest,
    ZeroShotRequest,
)
from service.core.decode import (
    AnswerSpan,
    AttentionMap,
    EntitySpan,
    LabelScore,
    SparseVector,
    TokenScore,
    Vector,
)
from service.core.manifest import Task
from service.engines.engine import Reply
from service.middleware.request_context import context_of
from service.observability.metrics import CONTENT_TYPE
from service.tasks.question_answering import QaOptions, QuestionAnswering
from service.tasks.reranking import Ranked, Ranking, make_ranking, rank

T = TypeVar("T")


class Route(APIRoute):
    """A route that the framework documents, but whose endpoint receives the unprocessed request and nothing else."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.path = self.path_format  # a label of logs and metrics
        self.app = plain(endpoint)


def plain(endpoint: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    """Return what the framework's own wrapper does when nothing is injected, as an ASGI application."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response = await endpoint(request)
        if isinstance(response, JsonResponse):
            await finish_response(request, response)
        least = service_of(request).settings.gzip_min_bytes
        if least and len(response.body) >= least:
            await compress(response, context_of(scope).headers.get("accept-encoding", ""))
        await response(scope, receive, send)

    return app


def make_router(prefix: str = "", of: str = "") -> APIRouter:
    """Return the router of an API. of: the start of the identifiers of its operations"""
    name = lambda route: of + route.name  # noqa: E731
    return APIRouter(prefix=prefix, route_class=Route, generate_unique_id_function=name)


router = make_router()


@router.post("/classify", **openapi.task(ClassifyRequest, ClassifyResponse))
async def classify(request: Request) -> Response:
    """Labels and their scores for each text, or each pair of texts."""
    call = await receive_call(request, ClassifyRequest)
    return await call.answer(call.body, "result", each(label))


@router.post("/ner", **openapi.task(NerRequest, NerResponse))
async def ner(request: Request) -> Response:
    """The named entities of each text, with their places in it."""
    call = await receive_call(request, NerRequest)
    key = "entity" if call.body.aggregation_strategy == "none" else "entity_group"
    return await call.answer(call.body.labelled or call.body, "result", each(partial(entity, key)))


@router.post("/qa", **openapi.task(QaRequest, QaResponse))
async def qa(request: Request) -> Response:
    """The spans of a context that answer a question best."""
    call = await receive_call(request, QaRequest)
    body = call.body
    options = body.model_dump(include={*QaOptions.model_fields})
    task = QuestionAnswering(questions=body.questions, contexts=body.contexts, **options)
    return await call.answer(task, "result", each(answer))


@router.post("/embed", **openapi.task(EmbedRequest, EmbedResponse))
async def embed(request: Request) -> Response:
    """One vector for each text."""
    call = await receive_call(request, EmbedRequest)
    show = base64_of if call.body.encoding_format == "base64" else numbers
    return await call.answer(call.body, "embedding", show)


@router.post("/embed-tokens", **openapi.task(EmbedTokensRequest, EmbedTokensResponse))
async def embed_tokens(request: Request) -> Response:
    """One vector for each token of each text, for late interaction."""
    call = await receive_call(request, EmbedTokensRequest)
    show = rows_as_base64 if call.body.encoding_format == "base64" else numbers
    return await call.answer(call.body, "embedding", show)


@router.post("/rerank", **openapi.task(RerankRequest, RerankResponse, in_lines=False))
async def rerank(request: Request) -> Response:
    """The documents that are most relevant to a query, by a cross-encoder, or by vectors of texts or of tokens."""
    call = await receive_call(request, RerankRequest)
    body = call.body
    reply, ranked = await rank_documents(
        call, make_ranking(call.engine, body.head, body), body.top_n
    )
    results = [
        {"index": place, "score": score}
        | ({"text": body.documents[place]} if body.return_text else {})
        for place, score in ranked
    ]
    return call.respond(reply, {"results": results})


async def rank_documents(
    call: Call[Any], ranking: Ranking[T], top_n: int | None
) -> tuple[Reply[T], list[Ranked]]:
    """Compute a ranking. Return the reply and the `top_n` documents (None: all) by falling score."""
    reply = await call.compute(ranking)
    score = partial(ranking.scores, call.engine, reply)
    scores = await call.within_deadline(call.engine.run(score, reply.usage.tokens, call.ticket))
    return reply, rank(scores, top_n)


@router.post("/similarity", **openapi.task(SimilarityRequest, SimilarityResponse, in_lines=False))
async def similarity(request: Request) -> Response:
    """The cosine of each text's vector with that of the source."""
    call = await receive_call(request, SimilarityRequest)
    reply = await call.compute(call.body)
    return call.respond(reply, {"results": call.body.scores(call.engine, reply)})


@router.post("/zero-shot", **openapi.task(ZeroShotRequest, ZeroShotResponse))
async def zero_shot(request: Request) -> Response:
    """The given labels and their scores for each text, by a head that was trained on entailment or for any label."""
    call = await receive_call(request, ZeroShotRequest)
    return await call.answer(call.body, "result", each(label))


@router.post("/analyze", **openapi.task(AnalyzeRequest, AnalyzeResponse))
async def analyze(request: Request) -> Response:
    """The results of several heads for each text, from one pass of the encoder."""
    call = await receive_call(request, AnalyzeRequest)
    heads = call.engine.manifest.heads

    def show(found: Mapping[str, Any]) -> dict[str, object]:
        return {name: SHOWN_BY_TASK[heads[name].task](result) for name, result in found.items()}

    return await call.answer(call.body, "result", show)


@router.post("/fill-mask", **openapi.task(FillMaskRequest, FillMaskResponse))
async def fill_mask(request: Request) -> Response:
    """The tokens that fit best in place of each mask token of a text."""
    call = await receive_call(request, FillMaskRequest)
    return await call.answer(call.body, "result", filled_masks)


@router.post("/attention", **openapi.task(AttentionRequest, AttentionResponse))
async def attention(request: Request) -> Response:
    """How much each token of a text attends to each other token, in one layer of a model exported for it."""
    call = await receive_call(request, AttentionRequest)
    return await call.answer(call.body, "result", attention_map)


@router.post("/embed-sparse", **openapi.task(EmbedSparseRequest, EmbedSparseResponse))
async def embed_sparse(request: Request) -> Response:
    """The weights of a few tokens of the vocabulary for each text."""
    call = await receive_call(request, EmbedSparseRequest)
    tokenizer = call.engine.encoder.tokenizer if call.body.return_tokens else None
    return await call.answer(call.body, "embedding", partial(sparse_vector, tokenizer))


def each(show: Callable[[T], object]) -> Callable[[list[T]], object]:
    """Return a function that formats a list's items as JSON."""
    return lambda found: [*map(show, found)]


def label(found: LabelScore) -> dict[str, object]:
    return {"label": found.label, "score": found.score}


def entity(key: str, found: EntitySpan) -> dict[str, object]:
    return {
        key: found.entity,
        "score": found.score,
        "word": found.word,
        "start": found.start,
        "end": found.end,
    }


def answer(found: AnswerSpan) -> dict[str, object]:
    return {"answer": found.answer, "score": found.score, "start": found.start, "end": found.end}


def filled_masks(found: list[list[TokenScore]]) -> list[object]:
    """Format the tokens for the only mask token of a text, or for each of several."""
    masks = [[one._asdict() for one in tokens] for tokens in found]
    return [*masks[0]] if len(masks) == 1 else [*masks]


def attention_map(found: AttentionMap) -> dict[str, object]:
    return {"tokens": found.tokens, "weights": numbers(found.weights)}


def sparse_vector(tokenizer: Tokenizer | None, found: SparseVector) -> dict[str, object]:
    """Format a sparse vector. tokenizer: to name the token of each weight; None for no names"""
    shown: dict[str, object] = {"indices": found.indices, "values": found.values}
    if tokenizer is not None:
        shown["tokens"] = [tokenizer.id_to_token(token) for token in found.indices.tolist()]
    return shown


def numbers(vector: Vector) -> Vector:
    """Return the vector as a contiguous array, which the JSON writer requires."""
    return np.ascontiguousarray(vector)


def base64_of(vector: Vector) -> str:
    little_endian = vector.astype(vector.dtype.newbyteorder("<"), copy=False)
    return b2a_base64(little_endian.tobytes(), newline=False).decode("ascii")


def rows_as_base64(vectors: Vector) -> list[str]:
    return [base64_of(vector) for vector in vectors]


# How a result of each task of `Analysis` is shown.
SHOWN_BY_TASK: Mapping[Task, Callable[[Any], object]] = {
    "classification": each(label),
    "ner": each(partial(entity, "entity_group")),
    "embedding": numbers,
    "sparse-embedding": partial(sparse_vector, None),
    "late-interaction": numbers,
}


@router.get("/models", **openapi.page(ModelsResponse))
async def models(request: Request) -> Response:
    """The bundles that are served, the default first."""
    engines = engines_of(request)
    devices = [
        {"name": name, "ready": load.ready, "queue_tokens": load.queue_tokens}
        for name, load in engines.loads().items()
    ]
    return json_response(
        {"models": [engine.describe() for engine in engines.all()], "devices": devices}
    )


@router.get("/health/live", **openapi.page(HealthResponse, open_to_all=True))
async def live(request: Request) -> Response:
    """The process answers: restart it when this does not, or says 503."""
    service_of(request).check_alive()
    return json_response({"status": "live"})


@router.get("/health/ready", **openapi.page(HealthResponse, open_to_all=True))
async def ready(request: Request) -> Response:
    """New requests may be sent here; 503 until the bundles are open, and again from SIGTERM on."""
    service_of(request).check_ready()
    return json_response({"status": "ready"})


@router.get("/live/events", include_in_schema=False)
async def live_events(request: Request) -> Response:
    """What the device does, as server-sent events."""
    service = service_of(request)
    return EventStream(service.metrics.watch_live, lambda: service.draining)


@router.get("/metrics", **openapi.text(CONTENT_TYPE))
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus's text format."""
    return Response(await service_of(request).metrics.page(), media_type=CONTENT_TYPE)
