"""The API of Jina for reranking, `/v1/rerank`. Its embeddings are a part of OpenAI's `/v1/embeddings`."""

from typing import Literal

from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from service.api import openapi
from service.api.dialects.common import (
    DocumentsRequest,
    ErrorBody,
    OpenAIUsage,
    rank_request,
    text_of,
    usage,
)
from service.api.engine_call import json_response, receive_call
from service.api.native_routes import make_router
from service.errors import ErrorForm, QuartetError

PREFIX = "v1/rerank"
TAG = "Jina"

router = make_router(f"/{PREFIX}", "jina_")


class JinaErrorResponse(ErrorBody):
    detail: str


ERROR_MODEL = JinaErrorResponse


def error_form(error: QuartetError) -> ErrorForm:
    return ErrorForm(error.status, {"detail": error.message})


class JinaRerankRequest(DocumentsRequest):
    return_documents: bool | None = Field(None, description="whether each result has its document")


class JinaDocument(BaseModel):
    text: str


class JinaRanked(BaseModel):
    index: int
    relevance_score: float
    document: JinaDocument | None = Field(None, description="where `return_documents` is true")


class JinaRerankResponse(BaseModel):
    model: str
    object: Literal["list"]
    usage: OpenAIUsage
    results: list[JinaRanked]


@router.post("", **openapi.dialect(JinaRerankRequest, JinaRerankResponse, TAG))
async def rerank(request: HttpRequest) -> Response:
    """The documents by falling relevance to a query."""
    call = await receive_call(request, JinaRerankRequest)
    body = call.body
    show = (lambda one: {"document": {"text": text_of(one)}}) if body.return_documents else None
    reply, results = await rank_request(call, show=show)
    content = {"model": call.engine.id, "object": "list", "usage": usage(reply), "results": results}
    return json_response(content, call.headers(reply))
