"""The API of OpenAI for embeddings, under `/v1`, with the fields that Jina's API adds to it.

Texts and token ids are accepted: ids of OpenAI's tokenizer where its table is configured, else of the model's own.
Texts that are too long are cut; `usage.truncated`, which OpenAI's answers do not have, then has their indices.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Annotated, Any, Literal

import structlog
from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from service.api import openapi
from service.api.dialects.common import (
    EncodingFormat,
    InputRequest,
    Lenient,
    OpenAIEmbedding,
    OpenAIErrorResponse,
    OpenAIUsage,
    Tokens,
    Unused,
    allowed,
    embedding_data,
    filled,
    input_texts,
    own_tokens,
    status_of,
    usage,
)
from service.api.engine_call import engine_of, engines_of, json_response, receive_call, service_of
from service.api.native_routes import make_router, numbers
from service.core.manifest import InputType, OutputDtype
from service.core.token_table import read_token_table
from service.engines.engine import Engine, Reply
from service.errors import ErrorForm, QuartetError, UnknownModel
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.fields import AtLeastOne, ListOfTexts

PREFIX = "v1"
TAG = "OpenAI"
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# What a request says about its texts in Jina's API.
INPUT_TYPES: Mapping[str, InputType] = {"retrieval.query": "query", "retrieval.passage": "document"}
OUTPUT_DTYPES: Mapping[str, OutputDtype] = {"binary": "binary", "ubinary": "ubinary"}
log = structlog.get_logger()
SEND_TEXTS = (
    "Clients that send the tokens of OpenAI's models, as langchain-openai does by default, can send texts"
    " (langchain-openai with check_embedding_ctx_length=False); or set QUARTET_TIKTOKEN_FILE to the path of"
    " cl100k_base.tiktoken, see docs/how-to/migrate_openai.md"
)

router = make_router(f"/{PREFIX}", "openai_")


ERROR_MODEL = OpenAIErrorResponse


def error_form(error: QuartetError) -> ErrorForm:
    """Return an error as OpenAI shows it, so that its clients raise the same exceptions."""
    status = status_of(error)
    kind = ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    code = "model_not_found" if isinstance(error, UnknownModel) else error.code
    body = {"message": error.message, "type": kind, "param": error.param, "code": code}
    return ErrorForm(status, {"error": body})


class OpenAIEmbeddingRequest(InputRequest):
    task = "embedding"

    encoding_format: EncodingFormat = None
    dimensions: AtLeastOne | None = Field(None, description="keep only the first dimensions")
    user: Unused = None
    # Jina's API has these, too.
    jina_task: Annotated[
        str | None,
        allowed(
            *(None, "retrieval.query", "retrieval.passage"),
            *("text-matching", "classification", "separation"),
            reason="these are the tasks of Jina's models",
        ),
    ] = Field(
        None,
        alias="task",
        description="Jina's: the model MODEL-TASK answers if it is served, with the prompt of this name if it has one."
        " retrieval.query and retrieval.passage are the input types query and document",
    )
    normalized: bool | None = Field(
        None, description="Jina's: scale vectors to length 1; as the head says when absent"
    )
    truncate: bool | None = Field(
        None, description="Jina's: false refuses long texts; else they are cut"
    )
    embedding_type: Annotated[
        str | None,
        allowed(
            *(None, "float", "base64", "binary", "ubinary"),
            reason="one of Jina's types, of all vectors",
        ),
    ] = Field(None, description="Jina's, in place of `encoding_format`")
    late_chunking: Annotated[
        bool | None,
        allowed(None, False, reason="each input has a vector of its own, without the others"),
    ] = Field(None, description="Jina's: only false")

    @property
    def format(self) -> str:
        return self.embedding_type or self.encoding_format or "float"

    @property
    def task_model(self) -> str | None:
        return f"{self.model}-{self.jina_task}" if self.model and self.jina_task else None


class OpenAIEmbeddingResponse(BaseModel):
    object: Literal["list"]
    data: list[OpenAIEmbedding]
    model: str
    usage: OpenAIUsage


class OpenAIModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    name: str = Field(description="KServe's: as `id`")
    ready: bool = Field(description="KServe's: true")


class OpenAIModelList(BaseModel):
    object: Literal["list"]
    data: list[OpenAIModel]


@router.post("/embeddings", **openapi.dialect(OpenAIEmbeddingRequest, OpenAIEmbeddingResponse, TAG))
async def embeddings(request: HttpRequest) -> Response:
    """One vector for each input."""
    call = await receive_call(request, OpenAIEmbeddingRequest)
    body = call.body
    has_prompt = any(body.jina_task in head.prompts for head in call.engine.manifest.heads.values())
    task = Embedding(
        inputs=await input_texts(request, call, partial(tokens_of, request, call.engine)),
        normalize=body.normalized,
        dimensions=body.dimensions,
        truncate=body.truncate is not False,
        prompt_name=body.jina_task if has_prompt else None,
        input_type=INPUT_TYPES.get(body.jina_task or ""),
        output_dtype=OUTPUT_DTYPES.get(body.format, "float"),
    )
    reply = await call.compute(task)
    data = embedding_data(reply.results, body.format)
    content = {"object": "list", "data": data, "model": call.engine.id, "usage": usage(reply)}
    return json_response(content, call.headers(reply))


def tokens_of(request: HttpRequest, engine: Engine) -> Tokens:
    """Return the tokens of OpenAI's tokenizer where their file is configured, else of the model's own."""
    path = service_of(request).settings.tiktoken_file
    if path is None:
        warn_of_ids(engine.id)
        return own_tokens(engine, SEND_TEXTS)
    return Tokens(cached_token_table(path).decode, f"{path.name} (QUARTET_TIKTOKEN_FILE)")


cached_token_table = cache(read_token_table)


@cache  # one line for each model
def warn_of_ids(model: str) -> None:
    log.warning("token ids are read as those of the model", model=model, advice=SEND_TEXTS)


@router.get("/models", **openapi.dialect_page(OpenAIModelList, TAG))
async def models(request: HttpRequest) -> Response:
    """The models that are served, with their aliases."""
    engines = engines_of(request).all()
    names = dict.fromkeys(name for engine in engines for name in (engine.id, *engine.model.aliases))
    return json_response({"object": "list", "data": [*map(describe, names)]})


@router.get(
    "/models/{model:path}",
    **openapi.dialect_page(OpenAIModel, TAG, errors=(UnknownModel,), of="model"),
)
async def model(request: HttpRequest) -> Response:
    """One model."""
    return json_response(describe(engine_of(request, request.path_params["model"]).id))


# -- KServe's first protocol, which has its paths here, too ------------------------------------------


class PredictRequest(Lenient):
    task = "predict"
    listed = "instances"
    text_fields = ("instances",)

    instances: ListOfTexts


@router.post("/models/{model:path}:predict", include_in_schema=False)
async def predict(request: HttpRequest) -> Response:
    """The vector of each text, or the index of its best label for a model without an embedding head."""
    name = {"model": request.path_params["model"]}
    call = await receive_call(request, PredictRequest, fields=name)
    texts, heads = call.body.instances, call.engine.manifest.heads
    reply: Reply[Any]
    if any(head.task == "embedding" for head in heads.values()):
        reply = await call.compute(Embedding(inputs=texts))
        predictions: list[object] = [*map(numbers, filled(reply.results))]
    else:
        reply = await call.compute(Classification(inputs=texts, top_k=1))
        labels = heads[reply.heads[0]].labels
        predictions = [labels.index(best.label) for (best,) in filled(reply.results)]
    return json_response({"predictions": predictions}, call.headers(reply))


def describe(model: str) -> dict[str, object]:
    fields = {"id": model, "object": "model", "created": 0, "owned_by": "quartet"}
    return {**fields, "name": model, "ready": True}  # of KServe's
