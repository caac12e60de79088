"""The API of OpenAI for embeddings, under `/v1`.

Texts and the token ids of the model's own tokenizer are accepted. Texts that are too long are cut; `usage.truncated`,
which OpenAI's answers do not have, then has their indices.
"""

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from service.api import openapi
from service.api.engine_call import json_response, receive_call, service_of
from service.api.native_routes import Route
from service.api.schemas import AtLeastOne, Request, numbered
from service.engines.engine import Engine, Reply
from service.errors import ErrorForm, InvalidInput, QuartetError, TooLarge, UnknownModel
from service.tasks.embedding import Embedding

PREFIX = "v1"
TAG = "OpenAI"
# OpenAI's own status for these is 400.
BAD_REQUEST = (InvalidInput, TooLarge)
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

router = APIRouter(
    prefix=f"/{PREFIX}",
    route_class=Route,
    generate_unique_id_function=lambda route: f"openai_{route.name}",
)


def error_form(error: QuartetError) -> ErrorForm:
    """Return an error as OpenAI shows it, so that its clients raise the same exceptions."""
    status = 400 if isinstance(error, BAD_REQUEST) else error.status
    kind = ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    code = "model_not_found" if isinstance(error, UnknownModel) else error.code
    body = {"message": error.message, "type": kind, "param": error.param, "code": code}
    return ErrorForm(status, {"error": body})


Ids = list[int]


def check_input(value: object) -> object:
    """Return a list of texts, or a list of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return value
        nested = value if isinstance(value[0], list) else [value]
        if all(isinstance(one, list) and one for one in nested) and all(
            type(token) is int and token >= 0 for one in nested for token in one
        ):
            return nested
    raise PydanticCustomError("input", "must be a text, token ids, or a list of one of these")


Input = Annotated[
    list[str] | list[Ids],
    BeforeValidator(check_input, json_schema_input_type=str | list[str] | Ids | list[Ids]),
]


class OpenAIEmbeddingRequest(Request):
    task = "embedding"

    input: Input = Field(description="texts, or token ids of the model's tokenizer")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="numbers, or base64 of little-endian float32"
    )
    dimensions: AtLeastOne | None = Field(None, description="keep only the first dimensions")
    user: str | None = Field(None, description="not used")

    @property
    def size(self) -> int:
        return len(self.input)

    @property
    def place(self) -> str:
        return "input[{}]"

    def texts(self) -> Iterator[tuple[str, str]]:
        return numbered("input", [one for one in self.input if isinstance(one, str)])


class OpenAIEmbedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class OpenAIUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    truncated: list[int] = Field(
        [], description="indices of the inputs that were cut; only there if any was"
    )


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


class OpenAIModelList(BaseModel):
    object: Literal["list"]
    data: list[OpenAIModel]


@router.post("/embeddings", **openapi.dialect(OpenAIEmbeddingRequest, OpenAIEmbeddingResponse, TAG))
async def embeddings(request: HttpRequest) -> Response:
    """One vector for each input."""
    call = await receive_call(request, OpenAIEmbeddingRequest)
    body = call.body
    task = Embedding(texts=to_texts(call.engine, body.input), dimensions=body.dimensions)
    reply = await call.compute(task)
    show = to_base64 if body.encoding_format == "base64" else np.ascontiguousarray
    data = [
        {"object": "embedding", "index": index, "embedding": show(vector)}
        for index, vector in enumerate(reply.results)
    ]
    content = {"object": "list", "data": data, "model": call.engine.id, "usage": usage(reply)}
    return json_response(content, call.headers(reply))


def to_texts(engine: Engine, inputs: Sequence[str | Ids]) -> list[str]:
    """Return the texts of token ids. Raises InvalidInput for an id that the model's vocabulary does not have."""
    size = engine.encoder.tokenizer.get_vocab_size()
    texts = []
    for index, one in enumerate(inputs):
        if isinstance(one, str):
            texts.append(one)
            continue
        if max(one) >= size:
            raise InvalidInput(
                f"input[{index}]: {max(one)} is no token of {engine.id}, whose vocabulary has {size}. Clients that"
                " send the tokens of OpenAI's models can send texts: langchain-openai with"
                " check_embedding_ctx_length=False",
                param=f"input[{index}]",
            )
        texts.append(engine.encoder.tokenizer.decode(one, skip_special_tokens=True))
    return texts


def usage(reply: Reply[Any]) -> dict[str, object]:
    tokens, truncated = reply.usage.tokens, reply.usage.truncated
    cut = {"truncated": truncated} if truncated else {}
    return {"prompt_tokens": tokens, "total_tokens": tokens, **cut}


def to_base64(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")


@router.get("/models", **openapi.dialect_page(OpenAIModelList, TAG))
async def models(request: HttpRequest) -> Response:
    """The models that are served."""
    data = [describe(engine) for engine in service_of(request).open_engines().all()]
    return json_response({"object": "list", "data": data})


@router.get(
    "/models/{model}", **openapi.dialect_page(OpenAIModel, TAG, errors=(UnknownModel,), of="model")
)
async def model(request: HttpRequest) -> Response:
    """One model."""
    engine = service_of(request).open_engines().get(request.path_params["model"])
    return json_response(describe(engine))


def describe(engine: Engine) -> dict[str, object]:
    return {"id": engine.id, "object": "model", "created": 0, "owned_by": "quartet"}
