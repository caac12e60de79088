"""The API of text-embeddings-inference (TEI), under `/tei`.

For `/tei/predict`, a list of two texts is a pair, and a batch is a list of lists. Offsets of tokens are bytes of UTF-8.
The answers of tasks are lists without a name of the model, which is in the header `X-Quartet-Model`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from service import __version__
from service.api import openapi
from service.api.dialects.common import (
    REFUSED,
    ErrorBody,
    Lenient,
    allowed,
    filled,
    rank_request,
    refused,
)
from service.api.engine_call import Call, engines_of, json_response, receive_call, service_of
from service.api.native_routes import label, make_router, numbers
from service.api.responses import Label
from service.api.schemas import DetokenizeRequest, Request, numbered
from service.api.token_routes import answer_tokens, columns_of, join_tokens
from service.core.decode import LabelScore
from service.core.encode import Encoded
from service.core.manifest import InputType
from service.engines.engine import Engine
from service.errors import ErrorForm, QuartetError
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.fields import AtLeastOne, Inputs, NotBlank, ServedName, Strict, Texts
from service.tasks.late_interaction import TokenEmbedding
from service.tasks.similarity import Similarity
from service.tasks.sparse_embedding import SparseEmbedding

PREFIX = "tei"
TAG = "text-embeddings-inference"
ERROR_TYPES: Mapping[int, str] = {429: "Overloaded", 503: "Unhealthy"}

router = make_router(f"/{PREFIX}", "tei_")


class TeiErrorResponse(ErrorBody):
    error: str
    error_type: str


ERROR_MODEL = TeiErrorResponse


def error_form(error: QuartetError) -> ErrorForm:
    kind = ERROR_TYPES.get(error.status) or ("Backend" if error.status >= 500 else "Validation")
    return ErrorForm(error.status, {"error": error.message, "error_type": kind})


# -- requests -------------------------------------------------------------------------------------


class Truncation(Strict):
    """The fields that say what happens to long texts."""

    truncate: bool | None = Field(None, description="false refuses long texts; else they are cut")
    truncation_direction: Annotated[
        str | None, allowed(None, "right", "Right", reason="texts are cut at their end")
    ] = Field(None, description='"right", the end of texts, or absent')

    @property
    def cuts(self) -> bool:
        return self.truncate is not False


class TeiRequest(Truncation, Lenient):
    """The common fields. TEI serves one model; `model` selects another than the first."""

    unknown_model = "default"


class TeiEmbedRequest(Inputs, TeiRequest):
    task = "embedding"

    normalize: bool | None = Field(None, description="false keeps the length of vectors")
    dimensions: AtLeastOne | None = Field(None, description="keep only the first dimensions")
    prompt_name: ServedName | None = Field(
        None, description="the head's prompt before each text; its default prompt when absent"
    )


class TeiEmbedAllRequest(Inputs, TeiRequest):
    task = "late-interaction"

    prompt_name: Annotated[
        InputType | None,
        allowed(None, "query", "document", reason="how late interaction reads texts"),
    ] = Field(None, description="query or document, which is the default")


class TeiEmbedSparseRequest(Inputs, TeiRequest):
    task = "sparse-embedding"

    prompt_name: Annotated[None, refused("sparse heads have no prompts")] = Field(
        None, description=REFUSED
    )


@dataclass(frozen=True)
class Sequences:
    """Lists of one text or of a pair. is_batch: whether the request had a list of lists"""

    lists: list[list[str]]
    is_batch: bool

    def __len__(self) -> int:
        return len(self.lists)


def check_sequences(value: object) -> object:
    if isinstance(value, str):
        return Sequences([[value]], is_batch=False)
    if isinstance(value, list) and value:
        is_batch = isinstance(value[0], list)
        lists = value if is_batch else [value]
        if all(isinstance(one, list) and 1 <= len(one) <= 2 for one in lists) and all(
            isinstance(text, str) for one in lists for text in one
        ):
            return Sequences(lists, is_batch)
    raise PydanticCustomError(
        "sequences", "must be a text, a pair of texts, or a list of lists of one or two texts"
    )


TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}
BATCH = {"type": "array", "items": TEXTS, "minItems": 1}


class TeiPredictRequest(TeiRequest):
    task = "classification"

    inputs: Annotated[
        Sequences,
        BeforeValidator(check_sequences),
        WithJsonSchema({"anyOf": [{"type": "string"}, TEXTS, BATCH]}),
    ] = Field(description="a text, a pair as a list of two texts, or a list of lists of one or two")
    raw_scores: bool | None = Field(None, description="logits in place of scores")

    def texts(self) -> Iterator[tuple[str, str]]:
        for index, one in enumerate(self.inputs.lists):
            yield from ((f"inputs[{index}]", text) for text in one)


class TeiRerankRequest(TeiRequest):
    task = "rerank"
    listed = "documents"
    text_fields = ("query", "documents")

    query: NotBlank = Field(description="the text that the others are compared with")
    documents: Texts = Field(alias="texts", description="one text, or several")
    raw_scores: bool | None = Field(None, description="logits in place of scores")
    return_text: bool | None = Field(None, description="whether each result has its text")


class TeiSentences(Strict):
    source_sentence: NotBlank
    sentences: Texts


class SentencesRequest(Request):
    """A request whose inputs are a source sentence and the sentences that are compared with it."""

    task = "similarity"

    inputs: TeiSentences

    @property
    def size(self) -> int:
        return len(self.inputs.sentences)

    @property
    def place(self) -> str:
        return "inputs.sentences[{}]"

    def texts(self) -> Iterator[tuple[str, str]]:
        yield "inputs.source_sentence", self.inputs.source_sentence
        yield from numbered("inputs.sentences", self.inputs.sentences)


class TeiSimilarityParameters(Truncation):
    model_config = ConfigDict(extra="ignore")

    prompt_name: Annotated[None, refused("texts are compared without a prompt")] = Field(
        None, description=REFUSED
    )


class TeiSimilarityRequest(SentencesRequest, TeiRequest):
    parameters: TeiSimilarityParameters | None = None


class TeiTokenizeRequest(Inputs, Lenient):
    task = "tokenize"
    unknown_model = "default"

    add_special_tokens: bool | None = Field(
        None, description="false leaves special tokens out of the answer"
    )
    prompt_name: Annotated[None, refused("tokens are those of the text")] = Field(
        None, description=REFUSED
    )


class TeiDecodeRequest(DetokenizeRequest, Lenient):
    unknown_model = "default"


# -- responses ------------------------------------------------------------------------------------


class TeiWeight(BaseModel):
    index: int = Field(description="id of a token")
    value: float


class TeiRank(BaseModel):
    index: int
    score: float
    text: str | None = None


class TeiToken(BaseModel):
    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TeiHealth(BaseModel):
    pass


class TeiInfo(BaseModel):
    model_id: str
    model_sha: str
    model_dtype: str
    model_type: dict[str, Any]
    max_input_length: int
    max_client_batch_size: int
    auto_truncate: bool
    version: str


# -- routes ---------------------------------------------------------------------------------------


@router.post("/embed", **openapi.dialect(TeiEmbedRequest, list[list[float]], TAG))
async def embed(request: HttpRequest) -> Response:
    """One vector for each text."""
    return await embed_texts(await receive_call(request, TeiEmbedRequest))


async def embed_texts(call: Call[TeiEmbedRequest]) -> Response:
    body = call.body
    task = Embedding(
        inputs=body.inputs,
        normalize=body.normalize is not False,
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        truncate=body.cuts,
    )
    reply = await call.compute(task)
    return json_response([*map(numbers, filled(reply.results))], call.headers(reply))


@router.post("/embed_all", **openapi.dialect(TeiEmbedAllRequest, list[list[list[float]]], TAG))
async def embed_all(request: HttpRequest) -> Response:
    """The vectors of each text's tokens, by the model's head of late interaction."""
    call = await receive_call(request, TeiEmbedAllRequest)
    body = call.body
    task = TokenEmbedding(
        inputs=body.inputs, input_type=body.prompt_name or "document", truncate=body.cuts
    )
    reply = await call.compute(task)
    return json_response([*map(numbers, filled(reply.results))], call.headers(reply))


@router.post("/embed_sparse", **openapi.dialect(TeiEmbedSparseRequest, list[list[TeiWeight]], TAG))
async def embed_sparse(request: HttpRequest) -> Response:
    """The weights of tokens for each text, by the model's sparse head."""
    call = await receive_call(request, TeiEmbedSparseRequest)
    reply = await call.compute(SparseEmbedding(inputs=call.body.inputs, truncate=call.body.cuts))

    def content() -> object:
        return [
            [*map(weight, found.indices.tolist(), found.values.tolist())]
            for found in filled(reply.results)
        ]

    return json_response(content, call.headers(reply))


def weight(index: int, value: float) -> dict[str, object]:
    return {"index": index, "value": value}


@router.post("/predict", **openapi.dialect(TeiPredictRequest, list[list[Label]] | list[Label], TAG))
async def predict(request: HttpRequest) -> Response:
    """The labels of a text or a pair; a list of them for a batch."""
    return await label_sequences(await receive_call(request, TeiPredictRequest))


async def label_sequences(call: Call[TeiPredictRequest]) -> Response:
    """Single texts and pairs are two tasks."""
    body, lists = call.body, call.body.inputs.lists
    found: dict[int, list[LabelScore]] = {}
    for length in (1, 2):
        places = [index for index, one in enumerate(lists) if len(one) == length]
        if not places:
            continue
        texts, *pairs = zip(*(lists[index] for index in places), strict=True)
        task = Classification(
            inputs=[*texts],
            text_pair=[*pairs[0]] if pairs else None,
            function_to_apply="none" if body.raw_scores else None,
            truncate=body.cuts,
        )
        reply = await call.compute(task)
        found |= {
            index: result
            for index, result in zip(places, reply.results, strict=True)
            if result is not None
        }

    def content() -> object:
        shown = [[*map(label, found[index])] for index in range(len(lists))]
        return shown if body.inputs.is_batch else shown[0]

    return json_response(content, call.headers(reply))


@router.post("/rerank", **openapi.dialect(TeiRerankRequest, list[TeiRank], TAG))
async def rerank(request: HttpRequest) -> Response:
    """The texts by falling score, by the model's cross-encoder, or by vectors of a model without one."""
    call = await receive_call(request, TeiRerankRequest)
    body = call.body
    show = (lambda one: {"text": one}) if body.return_text else None
    reply, results = await rank_request(
        call, raw_scores=body.raw_scores, truncate=body.cuts, score="score", show=show
    )
    return json_response(results, call.headers(reply))


@router.post("/similarity", **openapi.dialect(TeiSimilarityRequest, list[float], TAG))
async def similarity(request: HttpRequest) -> Response:
    """The cosine of each sentence's vector with that of the source sentence."""
    return await compare_sentences(await receive_call(request, TeiSimilarityRequest))


async def compare_sentences(call: Call[TeiSimilarityRequest]) -> Response:
    sentences, parameters = call.body.inputs, call.body.parameters or TeiSimilarityParameters()
    task = Similarity(
        source=sentences.source_sentence,
        inputs=sentences.sentences,
        truncate=call.body.cuts and parameters.cuts,
    )
    reply = await call.compute(task)
    return json_response(task.scores(call.engine, reply), call.headers(reply))


@router.post("/tokenize", **openapi.dialect(TeiTokenizeRequest, list[list[TeiToken]], TAG))
async def tokenize(request: HttpRequest) -> Response:
    """The tokens of each text; `start` and `stop` are bytes of its UTF-8."""
    call = await receive_call(request, TeiTokenizeRequest)
    body, engine = call.body, call.engine

    def show(found: Sequence[Encoded]) -> object:
        return [
            token_list(engine, item, text, body.add_special_tokens is not False)
            for item, text in zip(found, body.inputs, strict=True)
        ]

    return await answer_tokens(call, body.inputs, None, show)


def token_list(
    engine: Engine, item: Encoded, text: str, with_special: bool
) -> list[dict[str, object]]:
    sizes = (len(letter.encode("utf-8", "surrogatepass")) for letter in text)
    places = [0, *itertools.accumulate(sizes)]  # bytes before each code point
    found: list[dict[str, object]] = []
    for token, (start, end), sequence in columns_of(item):
        if sequence >= 0:
            own = {"text": text[start:end], "special": False}
            found.append({"id": token, **own, "start": places[start], "stop": places[end]})
        elif with_special:
            own = {"text": engine.encoder.tokenizer.id_to_token(token), "special": True}
            found.append({"id": token, **own, "start": None, "stop": None})
    return found


@router.post("/decode", **openapi.dialect(TeiDecodeRequest, list[str], TAG))
async def decode(request: HttpRequest) -> Response:
    """The text of each list of token ids."""
    call = await receive_call(request, TeiDecodeRequest)
    return json_response(await join_tokens(call, call.body.ids, call.body.skip_special_tokens))


@router.get("/info", **openapi.dialect_page(TeiInfo, TAG))
async def info(request: HttpRequest) -> Response:
    """The first model that is served."""
    service = service_of(request)
    engine = engines_of(request).get(None)
    return json_response(
        {
            "model_id": engine.id,
            "model_sha": engine.sha256,
            "model_dtype": engine.runs_on.precision,
            "model_type": model_type(engine),
            "max_input_length": engine.manifest.max_length,
            "max_client_batch_size": service.settings.max_inputs_per_request,
            "auto_truncate": True,
            "version": __version__,
        }
    )


def model_type(engine: Engine) -> dict[str, object]:
    """Return TEI's type of the model: embedding where it has such a head, else that of its first classifier."""
    heads = sorted(engine.manifest.heads.values(), key=lambda head: head.task != "embedding")
    for head in heads:
        if head.task == "embedding":
            return {"embedding": {"pooling": head.pooling}}
        if head.task == "classification":
            names = {str(index): name for index, name in enumerate(head.labels)}
            table = {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
            return {"reranker" if len(head.labels) == 1 else "classifier": table}
    return {}


@router.get("/health", **openapi.dialect_page(TeiHealth, TAG))
async def health(request: HttpRequest) -> Response:
    """New requests may be sent here."""
    service_of(request).check_ready()
    return json_response({})
