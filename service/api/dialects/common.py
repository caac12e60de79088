"""What several dialects have in common: fields, texts or token ids, rankings, vectors, usage and error statuses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest

from service.api.engine_call import Call, service_of
from service.api.native_routes import base64_of, numbers, rank_documents
from service.api.schemas import Request, numbered
from service.core.decode import Vector
from service.core.encode import Truncate
from service.core.manifest import Task
from service.engines.engine import Engine, Reply
from service.errors import InvalidInput, QuartetError, TooLarge
from service.tasks.fields import AtLeastOne
from service.tasks.reranking import Reranking, is_cross_encoder, make_ranking, select_ranking_head

T = TypeVar("T")

REFUSED = "refused unless null"  # the description of a field with the validator `refused`
TEXTS_ONLY = "this service reads texts only"
# Errors whose status is 400 in the APIs of OpenAI, Cohere and vLLM.
BAD_REQUEST = (InvalidInput, TooLarge)


def status_of(error: QuartetError) -> int:
    """Return the status of an error in an API that answers 400 to all invalid requests."""
    return 400 if isinstance(error, BAD_REQUEST) else error.status


# -- fields ---------------------------------------------------------------------------------------


def allowed(*values: object, reason: str) -> BeforeValidator:
    """Return the validator of a field that accepts only some values of the original API.

    reason: why other values are refused; it follows the values in the error message
    """
    shown = " or ".join(orjson.dumps(value).decode() for value in values if value is not None)
    message = f"must be {shown}: {reason}" if shown else f"not supported: {reason}"

    def check(value: object) -> object:
        if any(type(value) is type(one) and value == one for one in values):
            return value
        raise PydanticCustomError("unsupported", "{message}", {"message": message})

    return BeforeValidator(check)


def refused(reason: str) -> BeforeValidator:
    """Return the validator of a field of the original API that is refused unless it is null."""
    return allowed(None, reason=reason)


EncodingFormat = Annotated[
    Literal["float", "base64"] | None,
    Field(description="float for numbers, the default, or base64 of little-endian float32"),
]
Unused = Annotated[str | None, Field(description="accepted and not used")]
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


class Lenient(Request):
    """A request whose unknown fields are ignored, as its own server does. It must be the last base of a class."""

    model_config = ConfigDict(extra="ignore")


class InputRequest(Request):
    """A request whose `input` is texts or token ids."""

    listed = "input"
    text_fields = ("input",)

    input: Input = Field(description="texts, or token ids")

    def texts(self) -> Iterator[tuple[str, str]]:
        return numbered("input", [one for one in self.input if isinstance(one, str)])


InputR = TypeVar("InputR", bound=InputRequest)


class Tokens(NamedTuple):
    """A tokenizer's tokens.

    decode: returns the text of token ids; raises KeyError for an id that is no token
    name: of the tokenizer, in error messages
    advice: what to do about ids that are no tokens
    """

    decode: Callable[[Sequence[int]], str]
    name: str
    advice: str = ""


def own_tokens(engine: Engine, advice: str = "") -> Tokens:
    """Return the tokens of the model's own tokenizer."""
    tokenizer = engine.encoder.tokenizer
    size = tokenizer.get_vocab_size()

    def decode(ids: Sequence[int]) -> str:
        if (largest := max(ids)) >= size:
            raise KeyError(largest)
        return tokenizer.decode_batch([ids], skip_special_tokens=True)[0]

    return Tokens(decode, f"{engine.id}, whose vocabulary has {size}", advice)


async def input_texts(
    request: HttpRequest, call: Call[InputR], tokens: Callable[[], Tokens]
) -> list[str]:
    """Return the texts of a request, from the ids of these tokens where it has ids.

    Raises InvalidInput for an id that is no token, and TooLarge for texts that are larger than a body may be.
    """
    inputs = call.body.input
    most = service_of(request).settings.max_body_bytes
    count = sum(0 if isinstance(one, str) else len(one) for one in inputs)
    if not count:
        return [one for one in inputs if isinstance(one, str)]
    work = partial(decode_inputs, inputs, tokens(), most)
    return await call.within_deadline(call.engine.run(work, count, call.ticket))


def decode_inputs(inputs: Sequence[str | Ids], tokens: Tokens, most: int) -> list[str]:
    texts: list[str] = []
    left = most
    for index, one in enumerate(inputs):
        try:
            texts.append(one if isinstance(one, str) else tokens.decode(one))
        except KeyError as error:
            reason = f"input[{index}]: {error.args[0]} is no token of {tokens.name}"
            advice = f". {tokens.advice}" if tokens.advice else ""
            raise InvalidInput(reason + advice, param=f"input[{index}]") from None
        left -= len(texts[-1])
        if left < 0:
            raise TooLarge(f"input: the texts of these tokens have more than {most} characters")
    return texts


TEXT = {"type": "string"}
DOCUMENT = {
    "type": "object",
    "properties": {"text": TEXT},
    "required": ["text"],
    "additionalProperties": TEXT,
}
DOCUMENTS = {"type": "array", "items": {"anyOf": [TEXT, DOCUMENT]}, "minItems": 1}


def check_documents(value: object) -> object:
    if isinstance(value, list) and value and all(text_of(one) is not None for one in value):
        return value
    raise PydanticCustomError(
        "documents", "must be a list of texts, or of objects with a text and other texts"
    )


def text_of(document: object) -> str | None:
    """Return the text of a document; None if it is neither a text nor an object of texts."""
    if isinstance(document, str):
        return document
    if isinstance(document, dict) and all(isinstance(text, str) for text in document.values()):
        return document.get("text")
    return None


class DocumentsRequest(Request):
    """A request to rank documents by their relevance to a query."""

    task = "rerank"
    listed = "documents"
    text_fields = ("query", "documents")

    query: str = Field(description="the text that the documents are compared with")
    documents: Annotated[
        list[str | dict[str, str]], BeforeValidator(check_documents), WithJsonSchema(DOCUMENTS)
    ] = Field(description="texts, or objects with a `text`")
    top_n: AtLeastOne | None = Field(
        None, description="documents to return; all of them when absent"
    )

    def texts(self) -> Iterator[tuple[str, str]]:
        yield "query", self.query
        yield from numbered("documents", (text_of(one) or "" for one in self.documents))


# -- responses ------------------------------------------------------------------------------------


class OpenAIEmbedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class ErrorBody(BaseModel):
    """The body of an error, or a part of it; it has no other fields."""

    model_config = ConfigDict(extra="forbid")


class OpenAIError(ErrorBody):
    """An error of OpenAI's API, and of servers that have taken over its form."""

    message: str
    type: str
    param: str | None
    code: str | int


class OpenAIErrorResponse(ErrorBody):
    error: OpenAIError


class OpenAIUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    truncated: list[int] = Field(
        [], description="indices of the inputs that were cut; only there if any was"
    )


async def rank_request(
    call: Call[Any],
    *,
    raw_scores: bool | None = False,
    truncate: Truncate = "window",
    score: str = "relevance_score",
    show: Callable[[Any], Mapping[str, object]] | None = None,
) -> tuple[Reply[Any], list[dict[str, object]]]:
    """Rank the documents of a request by a cross-encoder, or by another head of a model without one.

    Return the reply, and an object for each document by falling relevance, with its `index` and its score.

    score: the name of the score
    show: returns further fields of a document's object
    """
    body = call.body
    asked = Reranking(
        query=body.query,
        documents=[text_of(document) or "" for document in body.documents],
        raw_scores=raw_scores or False,
        truncate=truncate,
    )
    ranking = make_ranking(call.engine, select_ranking_head(call.engine), asked)
    reply, ranked = await rank_documents(call, ranking, getattr(body, "top_n", None) or None)
    return reply, [
        {"index": place, score: relevance, **(show(body.documents[place]) if show else {})}
        for place, relevance in ranked
    ]


def abilities(engine: Engine) -> list[str]:
    """Return what the heads of a model can do, by the names that servers of embeddings have for it."""
    heads = engine.manifest.heads.values()
    tasks: set[Task] = {head.task for head in heads}
    able = {
        "embed": "embedding" in tasks,
        "rerank": any(is_cross_encoder(head) or head.gives_vectors for head in heads),
        "classify": "classification" in tasks,
    }
    return [name for name, has in able.items() if has]


def filled(results: Sequence[T | None]) -> list[T]:
    """Return the results of a request whose inputs have no errors of their own, so that none is absent."""
    return [result for result in results if result is not None]


def usage(reply: Reply[Any]) -> dict[str, object]:
    """Return OpenAI's usage, and the indices of truncated inputs if there are any."""
    tokens, truncated = reply.usage.tokens, reply.usage.truncated
    cut = {"truncated": truncated} if truncated else {}
    return {"prompt_tokens": tokens, "total_tokens": tokens, **cut}


def embedding_data(vectors: Sequence[Vector | None], encoding_format: str | None) -> list[object]:
    """Return OpenAI's objects of vectors."""
    return [
        {"object": "embedding", "index": index, "embedding": encoded(vector, encoding_format)}
        for index, vector in enumerate(filled(vectors))
    ]


def encoded(vector: Vector, encoding_format: str | None) -> Vector | str:
    """Return a vector or a matrix as numbers, or as base64 of its little-endian bytes."""
    return base64_of(vector) if encoding_format == "base64" else numbers(vector)
