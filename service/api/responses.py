"""The responses of the native API, for the OpenAPI document and for the types of what the routes write.

No response is validated.
"""

from typing import Any

from pydantic import BaseModel, Field

from service.core.manifest import (
    DataSet,
    InputType,
    LateInteraction,
    OutputDtype,
    Pooling,
    ProblemType,
    Sparse,
    Task,
)
from service.engines.model_state import ModelState


class Label(BaseModel):
    label: str
    score: float


class Entity(BaseModel):
    """One token, under `aggregation_strategy` none; offsets are code points, half-open."""

    entity: str = Field(examples=["B-LOC"])
    score: float
    word: str
    start: int
    end: int


class EntityGroup(BaseModel):
    """One entity; offsets are code points, half-open."""

    entity_group: str = Field(examples=["LOC"])
    score: float
    word: str
    start: int
    end: int


class Answer(BaseModel):
    """A span of the context; offsets are code points, half-open; no answer is "", 0, 0."""

    answer: str
    score: float
    start: int
    end: int


class Usage(BaseModel):
    tokens: int = Field(description="tokens that the model read, special ones included")
    windows: int = Field(description="windows that the inputs were read in")
    truncated: list[int] = Field(description="indices of the inputs that were cut")


class InputError(BaseModel):
    """Why an input has no result."""

    index: int
    code: str
    message: str


class ModelResponse(BaseModel):
    """Results are null where `on_error` is "null" and `errors` has the input's index."""

    model: str = Field(examples=["quartet-small@1"], description="`name@version` that answered")
    usage: Usage
    errors: list[InputError] = Field(
        [], description='the inputs without a result; only there when `on_error` is "null"'
    )


class Response(ModelResponse):
    head: str


class ClassifyResponse(Response):
    results: list[list[Label] | None] = Field(description="per input, labels by falling score")


class NerResponse(Response):
    results: list[list[EntityGroup] | list[Entity] | None] = Field(
        description="per input, in text order"
    )


class QaResponse(Response):
    results: list[list[Answer] | None] = Field(description="per question, answers by falling score")


class EmbedResponse(Response):
    embeddings: list[list[float] | str | None] = Field(
        description="one vector per input: all as numbers (integers unless `output_dtype` is float), or all as base64"
    )


class EmbedTokensResponse(Response):
    embeddings: list[list[list[float] | str] | None] = Field(
        description="per input, a vector for each token"
    )


class SparseEmbedding(BaseModel):
    """The weights of a text's tokens, by rising id; all others are 0."""

    indices: list[int] = Field(description="ids of tokens in the vocabulary")
    values: list[float] = Field(description="their weights")
    tokens: list[str] | None = Field(None, description="only there with `return_tokens`")


class EmbedSparseResponse(Response):
    embeddings: list[SparseEmbedding | None] = Field(description="one sparse vector per input")


class FilledToken(BaseModel):
    """A token in the place of a mask token."""

    token: int = Field(description="its id in the vocabulary")
    token_str: str = Field(examples=["capital"])
    score: float = Field(description="its probability")
    sequence: str = Field(description="the text with the token in place of the mask token")


class FillMaskResponse(Response):
    results: list[list[FilledToken | list[FilledToken]] | None] = Field(
        description="per input, tokens by falling score; per mask token a list of them, where a text has several"
    )


class AttentionMap(BaseModel):
    tokens: list[str] = Field(description="as the vocabulary has them, special ones included")
    weights: list[list[list[float]]] = Field(
        description="by head, then by the token that attends, then by the token that it attends to"
    )


class AttentionResponse(ModelResponse):
    results: list[AttentionMap | None]


class RankedDocument(BaseModel):
    index: int = Field(description="of the document in the request")
    score: float
    text: str | None = Field(None, description="the document; only where `return_text` is true")


class RerankResponse(ModelResponse):
    """Documents that failed, where `on_error` is "null", are in `errors` only."""

    head: str = Field("", description="the head that ranked; only there without `weights`")
    heads: list[str] = Field([], description="the heads that ranked; only there with `weights`")
    results: list[RankedDocument] = Field(description="by falling score")


class SimilarityResponse(Response):
    results: list[float | None] = Field(description="per input, the cosine with `source`")


class ZeroShotResponse(ClassifyResponse):
    pass


class AnalyzeResponse(ModelResponse):
    heads: list[str]
    results: list[dict[str, list[Any] | SparseEmbedding] | None] = Field(
        description="per input, the result of each head as its own route has it: labels, entity groups, numbers, "
        "or sparse weights"
    )


class Token(BaseModel):
    """A token; its text is `inputs[i][start:end]`, or that of the pair where `sequence` is 1."""

    id: int
    token: str = Field(description="as the vocabulary has it", examples=["##ing"])
    start: int
    end: int
    sequence: int | None = Field(
        description="0 in the text, 1 in its pair, null for a special token"
    )


class Tokenized(BaseModel):
    tokens: list[Token]
    count: int = Field(description="tokens, special ones included")
    truncated: bool = Field(description="whether the model reads fewer tokens at once")


class TokenizeResponse(BaseModel):
    model: str = Field(description="`name@version` whose tokenizer it is")
    max_length: int = Field(description="tokens that the model reads at once")
    results: list[Tokenized]


class DetokenizeResponse(BaseModel):
    model: str = Field(description="`name@version` whose tokenizer it is")
    results: list[str]


class ServedHead(BaseModel):
    task: Task
    labels: list[str]
    problem_type: ProblemType | None = Field(None, description="of a classification head, if known")
    pooling: Pooling | None = Field(
        None,
        description="of an embedding head; several ways are concatenated, and `none` is an external graph's own",
    )
    dimensions: int | None = Field(None, description="of an embedding or late-interaction head")
    prompts: dict[str, str] | None = Field(
        None, description="of an embedding head: the values of `prompt_name`, with their texts"
    )
    default_prompt: str | None = Field(
        None, description="of an embedding head: the prompt of requests that set none"
    )
    include_prompt: bool | None = Field(
        None, description="of an embedding head: false if it takes no `prompt`"
    )
    input_type: InputType | None = Field(
        None, description="of an embedding head that is for queries or for documents only"
    )
    matryoshka_dimensions: list[int] | None = Field(
        None, description="of an embedding head: the values of `dimensions`; any when empty"
    )
    output_dtypes: list[OutputDtype] | None = Field(
        None, description="of an embedding head: the values of `output_dtype`"
    )
    normalize: bool
    calibration_temperature: float | None = Field(
        None, description="of a classification head whose scores can be `calibrated`"
    )
    pair_prompt: str | None = Field(
        None, description="of a reranker: the text before a document, with {first} for the query"
    )
    null_threshold: float
    max_answer_tokens: int
    max_query_tokens: int
    mask_token_id: int | None = Field(None, description="of a fill-mask head")
    mask_token: str | None = Field(None, description="of a fill-mask head, as texts contain it")
    vocabulary_size: int | None = Field(None, description="of a fill-mask or sparse head")
    late_interaction: LateInteraction | None = Field(
        None, description="how a head of late interaction reads and compares texts"
    )
    sparse: Sparse | None = Field(None, description="how a sparse head weighs tokens")
    demo: bool


class ModelMemory(BaseModel):
    opened: int = Field(description="bytes of one session")
    batches: dict[str, int] = Field(
        description="bytes that a batch of the longest texts adds at its peak, by its tokens"
    )


class DescribedModel(BaseModel):
    id: str = Field(description="`name@version`")
    name: str
    version: str
    state: ModelState = Field(description="requests for its name reach the current version")
    aliases: list[str] = Field(description="further names of requests for its name")
    heads: dict[str, ServedHead]
    encoder: str | None = Field(
        None, description="`name@version` of the served model that computes a head bundle"
    )
    max_length: int = Field(description="tokens that it reads at once")
    precision: str
    layout: str
    provider: str
    provider_note: str | None = Field(description="why a GPU is not used")
    runtime: str
    attention_layers: int | None = Field(
        None, description="layers of `/attention`; null for a model without an attention graph"
    )
    memory: ModelMemory | None = Field(
        None, description="of the graph that runs, where its manifest states it; null on a GPU"
    )
    reserved: int | None = Field(
        None, description="bytes of memory_budget while it is open; null if it is always open"
    )
    problem: str | None = Field(None, description="why it is set aside")
    sha256: str = Field(description="of its manifest")
    embedding_space: str | None
    metrics: dict[str, dict[str, dict[str, float]]] = Field(
        description="measured, by head and precision, in points"
    )
    weights_license: str
    commercial_use: str = Field(description="whether the terms of all data sets allow it")
    commercial_use_by_head: dict[str, str]
    datasets: list[DataSet]


class DescribedDevice(BaseModel):
    name: str
    ready: bool
    queue_tokens: int = Field(description="tokens that wait for a batch")


class ModelsResponse(BaseModel):
    models: list[DescribedModel] = Field(description="the bundles served, the default first")
    devices: list[DescribedDevice] = Field(
        description="the devices, each of which serves all models"
    )


class Model(BaseModel):
    id: str | None = Field(description="`name@version`; null while it is being loaded")
    path: str
    sha256: str | None = Field(description="of its manifest; null while it is being loaded")
    state: ModelState
    since: str = Field(description="when it got its state")
    embedding_space: str | None
    requests: int = Field(description="requests that wait or are computed")
    shadow: float = Field(description="share of requests that are mirrored to it")
    aliases: list[str] = Field(description="further names of requests for its name")
    reserved: int | None = Field(
        None, description="bytes of memory_budget while it is open; null if it is always open"
    )
    problem: str | None = Field(None, description="why it is set aside")
    compared: dict[str, dict[str, int]] = Field(
        description="its results of mirrored requests, by head: same, changed, failed, dropped"
    )


class AdminModelsResponse(BaseModel):
    models: list[Model]


class IntroducedResponse(BaseModel):
    model: Model
    previous: Model | None = Field(
        description="the version that answered before, kept for a rollback"
    )
    unloading: list[str] = Field(
        description="versions that complete their requests before they are unloaded"
    )


class UnloadedResponse(BaseModel):
    unloaded: str
    current: str | None = Field(description="the version that answers for the name now")


class HealthResponse(BaseModel):
    status: str


class ErrorDetail(BaseModel):
    code: str
    message: str
    param: str | None = Field(description="the field or header at fault, e.g. `inputs[3]`")


class ErrorResponse(BaseModel):
    error: ErrorDetail
