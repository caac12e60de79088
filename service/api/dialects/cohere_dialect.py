"""The API of Cohere for embeddings, reranking and tokens, under `/cohere`, in its versions 1 and 2.

One request serves both versions; the answers differ. Long texts are cut unless `truncate` is NONE, and a warning in
`meta` names them. Long documents are read in windows, of which the best one counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from service.api import openapi
from service.api.dialects.common import (
    REFUSED,
    TEXTS_ONLY,
    DocumentsRequest,
    ErrorBody,
    abilities,
    allowed,
    encoded,
    filled,
    rank_request,
    refused,
    status_of,
)
from service.api.engine_call import Call, engine_of, engines_of, json_response, receive_call
from service.api.native_routes import make_router
from service.api.schemas import Request, numbered
from service.api.token_routes import answer_tokens, columns_of, join_tokens
from service.core.decode import Vector
from service.core.encode import Encoded
from service.core.manifest import InputType, OutputDtype
from service.engines.engine import Engine, Reply
from service.errors import ErrorForm, InvalidInput, QuartetError, UnknownModel
from service.tasks.embedding import Embedding, EmbeddingByType
from service.tasks.fields import AtLeastOne, AtLeastZero, ListOfTexts, Strict

PREFIX = "cohere"
TAG = "Cohere"
VERSION_1: dict[str, object] = {"api_version": {"version": "1"}}
VERSION_2: dict[str, object] = {"api_version": {"version": "2"}}
DOCUMENTS_PER_SEARCH = 100  # of one unit of `search_units`
NAMED = 16  # largest number of inputs that a warning names

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
# Classification and clustering have the head's default, as a request without an input type.
INPUT_TYPES: Mapping[str | None, InputType] = {
    "search_query": "query",
    "search_document": "document",
}

router = make_router(f"/{PREFIX}", "cohere_")


class CohereErrorResponse(ErrorBody):
    message: str


ERROR_MODEL = CohereErrorResponse


def error_form(error: QuartetError) -> ErrorForm:
    """Return an error as Cohere shows it, so that its clients raise the same exceptions."""
    return ErrorForm(status_of(error), {"message": error.message})


# -- requests -------------------------------------------------------------------------------------

Priority = Annotated[
    AtLeastZero | None,
    Field(description="accepted and not used: the header X-Priority lowers the priority"),
]


class CohereText(Strict):
    type: Annotated[str, allowed("text", reason=TEXTS_ONLY)]
    text: str
    image_url: Annotated[None, refused(TEXTS_ONLY)] = Field(None, description=REFUSED)


class CohereInput(Strict):
    content: Annotated[list[CohereText], Field(min_length=1, max_length=1)]


class CohereEmbedRequest(Request):
    """Texts as `texts`, or as `inputs` with one text each; not both."""

    task = "embedding"
    text_fields = ("text_list", "inputs")

    text_list: ListOfTexts | None = Field(None, alias="texts", description="several texts")
    inputs: Annotated[list[CohereInput], Field(min_length=1)] | None = Field(
        None, description="several texts, as contents"
    )
    input_type: Annotated[
        str | None,
        allowed(
            *(None, "search_query", "search_document", "classification", "clustering"),
            reason=TEXTS_ONLY,
        ),
    ] = Field(
        None,
        description="search_query and search_document select the prompt, and the head where there are two;"
        " classification and clustering are the default",
    )
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1)] | None = Field(
        None, description="types of the numbers; float when absent"
    )
    output_dimension: AtLeastOne | None = Field(None, description="keep only the first dimensions")
    truncate: Annotated[
        str | None, allowed(None, "NONE", "END", reason="texts are cut at their end")
    ] = Field(None, description="NONE refuses long texts; else their END is cut")
    priority: Priority = None
    images: Annotated[None, refused(TEXTS_ONLY)] = Field(None, description=REFUSED)
    max_tokens: Annotated[None, refused("the limit is that of the model")] = Field(
        None, description=REFUSED
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.text_list is None) == (self.inputs is None):
            raise InvalidInput("texts: required, or inputs, and not both", param="texts")
        return self

    @property
    def input_texts(self) -> list[str]:
        if self.inputs is None:
            return self.text_list or []
        return [one.content[0].text for one in self.inputs]

    @property
    def size(self) -> int:
        return len(self.input_texts)

    @property
    def place(self) -> str:
        return "texts[{}]" if self.inputs is None else super().place

    def texts(self) -> Iterator[tuple[str, str]]:
        return numbered("texts" if self.inputs is None else "inputs", self.input_texts)


class CohereSpans(Strict):
    mode: Annotated[str, allowed("disabled", reason="spans of documents are not found")]
    threshold: float | None = None
    max_spans: int | None = None


class CohereRerankRequest(DocumentsRequest):
    return_documents: bool | None = Field(
        None, description="version 1: whether each result has its document"
    )
    priority: Priority = None
    rank_fields: Annotated[
        list[str] | None, allowed(None, ["text"], reason="documents are ranked by their text")
    ] = Field(None, description='only ["text"]')
    relevant_spans: CohereSpans | None = Field(None, description='only the mode "disabled"')
    max_chunks_per_doc: Annotated[None, refused("long documents are read whole")] = Field(
        None, description=REFUSED
    )
    max_tokens_per_doc: Annotated[None, refused("long documents are read whole")] = Field(
        None, description=REFUSED
    )


class CohereTokenizeRequest(Request):
    task = "tokenize"
    listed = "text"
    text_fields = ("text",)

    text: Annotated[str, Field(min_length=1)]


class CohereDetokenizeRequest(Request):
    task = "detokenize"
    listed = "tokens"
    text_fields = ()

    tokens: list[AtLeastZero] = Field(description="token ids")

    @property
    def size(self) -> int:
        return 1


# -- responses ------------------------------------------------------------------------------------


class CohereVersion(BaseModel):
    version: str


class CohereUnits(BaseModel):
    input_tokens: int | None = Field(None, description="of /embed: tokens that the model read")
    search_units: int | None = Field(None, description="of /rerank: one for 100 documents")


class CohereMeta(BaseModel):
    api_version: CohereVersion
    billed_units: CohereUnits | None = None
    warnings: list[str] | None = Field(None, description="which texts were cut, if any was")


class CohereVectors(BaseModel):
    """The vectors of all texts, by type."""

    float_: list[list[float]] | None = Field(None, alias="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereEmbedResponse(BaseModel):
    response_type: str = Field(description="embeddings_by_type")
    id: str
    embeddings: CohereVectors
    texts: list[str]
    meta: CohereMeta


class CohereV1EmbedResponse(BaseModel):
    response_type: str = Field(
        description="embeddings_floats, or embeddings_by_type if the request has types"
    )
    id: str
    embeddings: list[list[float]] | CohereVectors
    texts: list[str]
    meta: CohereMeta


class CohereRanked(BaseModel):
    index: int
    relevance_score: float
    document: dict[str, str] | None = Field(None, description="where `return_documents` is true")


class CohereRerankResponse(BaseModel):
    id: str
    results: list[CohereRanked]
    meta: CohereMeta


class CohereTokenizeResponse(BaseModel):
    tokens: list[int]
    token_strings: list[str]
    meta: CohereMeta


class CohereDetokenizeResponse(BaseModel):
    text: str
    meta: CohereMeta


class CohereModel(BaseModel):
    name: str
    endpoints: list[str] = Field(description="embed and rerank, where the model has such heads")
    finetuned: bool
    context_length: int
    tokenizer_url: str | None = Field(description="null: clients then send texts to /tokenize")


class CohereModelList(BaseModel):
    models: list[CohereModel]


# -- routes ---------------------------------------------------------------------------------------


@router.post("/v1/embed", **openapi.dialect(CohereEmbedRequest, CohereV1EmbedResponse, TAG))
async def embed_v1(request: HttpRequest) -> Response:
    """One vector for each text, or one of each type."""
    call = await receive_call(request, CohereEmbedRequest)
    return await embed_texts(call, VERSION_1, by_type=call.body.embedding_types is not None)


@router.post("/v2/embed", **openapi.dialect(CohereEmbedRequest, CohereEmbedResponse, TAG))
async def embed_v2(request: HttpRequest) -> Response:
    """One vector of each type for each text."""
    return await embed_texts(
        await receive_call(request, CohereEmbedRequest), VERSION_2, by_type=True
    )


async def embed_texts(
    call: Call[CohereEmbedRequest], meta: Mapping[str, object], *, by_type: bool
) -> Response:
    body = call.body
    types = dict.fromkeys(body.embedding_types or ("float",))
    embedding = Embedding(
        inputs=body.input_texts,
        dimensions=body.output_dimension,
        truncate=body.truncate != "NONE",
        input_type=INPUT_TYPES.get(body.input_type),
    )
    dtypes = [*dict.fromkeys(output_dtype(one) for one in types)]
    reply = await call.compute(EmbeddingByType(embedding=embedding, output_dtypes=dtypes))
    vectors = {one: vectors_of(reply, one) for one in types}
    content = {
        "response_type": "embeddings_by_type" if by_type else "embeddings_floats",
        "id": call.context.request_id,
        "embeddings": vectors if by_type else vectors["float"],
        "texts": body.input_texts,
        "meta": {
            **meta,
            "billed_units": {"input_tokens": reply.usage.tokens},
            **warnings(call, reply),
        },
    }
    return json_response(content, call.headers(reply))


def output_dtype(kind: EmbeddingType) -> OutputDtype:
    return "float" if kind == "base64" else kind


def vectors_of(
    reply: Reply[dict[OutputDtype, Vector]], kind: EmbeddingType
) -> Sequence[Vector | str]:
    form = "base64" if kind == "base64" else "float"
    return [encoded(found[output_dtype(kind)], form) for found in filled(reply.results)]


def warnings(call: Call[Any], reply: Reply[Any]) -> dict[str, object]:
    """Return a warning that names the texts that were cut, if any was."""
    cut = reply.usage.truncated
    if not cut:
        return {}
    names = [call.body.place.format(index) for index in cut[:NAMED]]
    more = f" and {len(cut) - NAMED} more" if len(cut) > NAMED else ""
    most = call.engine.manifest.max_length
    return {"warnings": [f"{', '.join(names)}{more}: cut to {most} tokens"]}


@router.post("/v1/rerank", **openapi.dialect(CohereRerankRequest, CohereRerankResponse, TAG))
async def rerank_v1(request: HttpRequest) -> Response:
    """The documents by falling relevance to a query."""
    return await rank_texts(await receive_call(request, CohereRerankRequest), VERSION_1)


@router.post("/v2/rerank", **openapi.dialect(CohereRerankRequest, CohereRerankResponse, TAG))
async def rerank_v2(request: HttpRequest) -> Response:
    """The documents by falling relevance to a query."""
    return await rank_texts(await receive_call(request, CohereRerankRequest), VERSION_2)


async def rank_texts(call: Call[CohereRerankRequest], meta: Mapping[str, object]) -> Response:
    body = call.body
    show = (lambda one: {"document": as_object(one)}) if body.return_documents else None
    reply, results = await rank_request(call, show=show)
    units = -(-len(body.documents) // DOCUMENTS_PER_SEARCH)
    content = {
        "id": call.context.request_id,
        "results": results,
        "meta": {**meta, "billed_units": {"search_units": units}},
    }
    return json_response(content, call.headers(reply))


def as_object(document: str | dict[str, str]) -> dict[str, str]:
    return {"text": document} if isinstance(document, str) else document


@router.post("/v1/tokenize", **openapi.dialect(CohereTokenizeRequest, CohereTokenizeResponse, TAG))
async def tokenize(request: HttpRequest) -> Response:
    """The tokens of a text, without special tokens."""
    call = await receive_call(request, CohereTokenizeRequest)

    def show(found: Sequence[Encoded]) -> object:
        ids = [token for token, _, sequence in columns_of(found[0]) if sequence >= 0]
        names = [call.engine.encoder.tokenizer.id_to_token(one) for one in ids]
        return {"tokens": ids, "token_strings": names, "meta": VERSION_1}

    return await answer_tokens(call, [call.body.text], None, show)


@router.post(
    "/v1/detokenize", **openapi.dialect(CohereDetokenizeRequest, CohereDetokenizeResponse, TAG)
)
async def detokenize(request: HttpRequest) -> Response:
    """The text of token ids."""
    call = await receive_call(request, CohereDetokenizeRequest)
    (text,) = await join_tokens(call, [call.body.tokens], True)
    return json_response({"text": text, "meta": VERSION_1})


@router.get("/v1/models", **openapi.dialect_page(CohereModelList, TAG))
async def models(request: HttpRequest) -> Response:
    """The models that are served, on one page."""
    engines = engines_of(request).all()
    return json_response({"models": [describe(engine) for engine in engines]})


@router.get(
    "/v1/models/{model:path}",
    **openapi.dialect_page(CohereModel, TAG, errors=(UnknownModel,), of="model"),
)
async def model(request: HttpRequest) -> Response:
    """One model."""
    return json_response(describe(engine_of(request, request.path_params["model"])))


def describe(engine: Engine) -> dict[str, object]:
    return {
        "name": engine.id,
        "endpoints": [one for one in abilities(engine) if one != "classify"],
        "finetuned": False,
        "context_length": engine.manifest.max_length,
        "tokenizer_url": None,
    }
