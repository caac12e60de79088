"""Schemas of requests, which are validated here, and of responses, which are only documented here.

Bodies forbid unknown fields, and no value is coerced to another type. The error for an invalid body names all faults,
each with its field and index. The routes build the responses without validation; the response models are for the
OpenAPI document.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from service.core.bundle import (
    DataSet,
    InputType,
    LateInteraction,
    OutputDtype,
    PoolingMode,
    ProblemType,
    Sparse,
    Task,
)
from service.core.decode import OffsetUnit
from service.errors import InvalidInput, TooLarge
from service.settings import did_you_mean

SHOWN = 64  # characters of a client's own field name that a message repeats
NAMED = 16  # largest number of unknown fields that a message names
LONGEST_NAME = 257  # largest number of characters of a bundle's name@version
LONGEST_PROMPT = (
    2048  # largest number of characters of a prompt, which is repeated before each input
)

T = TypeVar("T")

Aggregation = Literal["none", "simple", "first", "average", "max"]


def as_list(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("texts_type", "must be a string or a list of strings")


def check_not_blank(value: str) -> str:
    if value.strip():
        return value
    raise PydanticCustomError("blank", "must not be empty")


def check_truncate(value: object) -> object:
    if value is True or value is False or value == "window":
        return value
    raise PydanticCustomError("truncate_type", 'must be true, false or "window"')


def whole(value: object) -> object:
    """Convert 4.0 to 4, since JSON Schema calls both an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


TRUNCATE = {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["window"]}]}
AtLeastZero = Annotated[int, Field(ge=0), BeforeValidator(whole)]
AtLeastOne = Annotated[int, Field(ge=1), BeforeValidator(whole)]
NotBlank = Annotated[
    str, AfterValidator(check_not_blank), Field(json_schema_extra={"pattern": r"\S"})
]
ServedName = Annotated[str, Field(max_length=LONGEST_NAME)]  # a message repeats it
TruncateField = Annotated[
    Literal[True, False, "window"], BeforeValidator(check_truncate), WithJsonSchema(TRUNCATE)
]  # 1 is not accepted for true
ListOfTexts = Annotated[list[str], Field(min_length=1)]
Texts = Annotated[
    ListOfTexts,
    BeforeValidator(as_list, json_schema_input_type=str | ListOfTexts),
]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


STRIDE = (
    "tokens that neighbouring windows of a long text share; 64 when absent,"
    " or fewer in a model of small windows"
)
ON_ERROR = "what one bad input does: the request fails, or has null for its result and an entry in `errors`"
OnError = Literal["fail", "null"]


class Request(Strict):
    """The fields and the interface of all requests to a model."""

    task: ClassVar[str]  # its name in logs, metrics and traces

    model: ServedName | None = Field(
        None, description="`name` or `name@version`; the first bundle served when absent"
    )

    def fill(self, record: Callable[..., T], **values: object) -> T:
        """Return a task's record with these values, and with this request's value of every other field that both have.

        A field that a request and its task declare under one name needs no copy in the route.
        """
        own = shared_fields(type(self), record)
        return record(**{name: getattr(self, name) for name in own}, **values)

    @property
    def wanted_heads(self) -> tuple[str, ...]:
        """The names of the requested heads; empty for the default."""
        return ()

    def name_heads(self, heads: tuple[str, ...]) -> dict[str, object]:
        """Return the field of the response that names the heads that answered."""
        return {"head": heads[0]}

    @property
    def isolates_errors(self) -> bool:
        """Whether an input that fails has an error of its own."""
        return False

    @property
    def size(self) -> int:
        """The number of inputs, which is also the number of results."""
        raise NotImplementedError

    @property
    def runs(self) -> int:
        """The number of sequences that the model reads, if none is long."""
        return self.size

    @property
    def place(self) -> str:
        """The name of an input in error messages, with {} for its index."""
        return "inputs[{}]"

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every text with its location."""
        raise NotImplementedError


@cache
def shared_fields(request: type[Request], record: Any) -> tuple[str, ...]:
    """Return the names of the fields that a request and the dataclass of a task have in common."""
    return tuple(one.name for one in fields(record) if one.name in request.model_fields)


class InputsRequest(Request):
    """A request whose inputs are texts."""

    inputs: Texts = Field(description="one text, or several; results are aligned with them")

    @property
    def size(self) -> int:
        return len(self.inputs)

    def texts(self) -> Iterator[tuple[str, str]]:
        return numbered("inputs", self.inputs)


class HeadRequest(Request):
    """A request that one head answers."""

    head: ServedName | None = Field(
        None, description="the model's first head for the task when absent"
    )
    on_error: OnError = Field("fail", description=ON_ERROR)

    @property
    def wanted_heads(self) -> tuple[str, ...]:
        return () if self.head is None else (self.head,)

    @property
    def isolates_errors(self) -> bool:
        return self.on_error == "null"


class TextRequest(HeadRequest, InputsRequest):
    stride: AtLeastZero | None = Field(None, description=STRIDE)


def check_aligned(inputs: Sequence[str], text_pair: Sequence[str] | None) -> None:
    """Raise InvalidInput unless there is a second text for each input, or none at all."""
    if text_pair is not None and len(text_pair) != len(inputs):
        counts = f"{len(text_pair)} texts, inputs has {len(inputs)}"
        raise InvalidInput(f"text_pair has {counts}; they must align", param="text_pair")


class ClassifyRequest(TextRequest):
    task = "classification"

    text_pair: Texts | None = Field(None, description="the second text of each input, aligned")
    top_k: AtLeastOne | None = Field(None, description="labels to return; all of them when absent")
    threshold: float | None = Field(
        None, description="the smallest score of a label that is returned; all of them when absent"
    )
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = Field(
        None, description="turns logits into scores; as the head's problem type says when absent"
    )
    calibrated: bool = Field(
        False,
        description="divide logits by the head's `calibration_temperature`, so that scores are shares of right answers",
    )
    truncate: TruncateField = Field(
        True,
        description="cut a long text (true), refuse it (false), or read it in windows",
    )

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        check_aligned(self.inputs, self.text_pair)
        return self

    def texts(self) -> Iterator[tuple[str, str]]:
        yield from super().texts()
        yield from numbered("text_pair", self.text_pair or ())


OFFSET_UNIT = (
    "of `start` and `end`: code points, or UTF-16 code units, as JavaScript and Java count"
)


class NerRequest(TextRequest):
    task = "ner"

    aggregation_strategy: Aggregation = Field(
        "first", description="how a word's tokens, and an entity's words, become one entity"
    )
    truncate: TruncateField = Field(
        "window", description="read a long text in windows, cut it (true) or refuse it (false)"
    )
    offset_unit: OffsetUnit = Field("code_point", description=OFFSET_UNIT)


class EmbedRequest(TextRequest):
    task = "embedding"

    normalize: bool | None = Field(
        None, description="scale vectors to length 1; as the head says when absent"
    )
    dimensions: AtLeastOne | None = Field(
        None, description="keep only the first dimensions; all of them when absent"
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float",
        description="numbers, or base64 of the bytes: little-endian float32, or 8-bit integers",
    )
    truncate: TruncateField = Field(
        True, description="cut a long text (true), refuse it (false), or pool its windows"
    )
    prompt_name: ServedName | None = Field(
        None, description="the head's prompt before each text; its default prompt when absent"
    )
    prompt: Annotated[str, Field(max_length=LONGEST_PROMPT)] | None = Field(
        None, description="the text before each text, instead of a prompt of the head"
    )
    input_type: InputType | None = Field(
        None, description="what the texts are: selects the prompt, and the head where there are two"
    )
    output_dtype: OutputDtype = Field(
        "float",
        description="the type of the numbers; binary and ubinary have a bit for each dimension",
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.prompt is not None and self.prompt_name is not None:
            raise InvalidInput("send prompt or prompt_name, not both", param="prompt")
        return self


class QaInput(Strict):
    question: NotBlank = Field(description="the question about the context")
    context: NotBlank = Field(description="the text that the answer is a span of")


class QaRequest(HeadRequest):
    """One question as `question` and `context`, or several as `inputs`; not both."""

    task = "qa"

    question: NotBlank | None = Field(None, description="the question about the context")
    context: NotBlank | None = Field(None, description="the text that the answer is a span of")
    inputs: list[QaInput] | None = Field(None, min_length=1, description="several questions")
    stride: AtLeastZero | None = Field(None, description=STRIDE)
    top_k: Annotated[int, Field(ge=1, le=100), BeforeValidator(whole)] = Field(
        1, description="answers to return for each question"
    )
    offset_unit: OffsetUnit = Field("code_point", description=OFFSET_UNIT)
    handle_impossible_answer: bool = Field(
        False, description='may answer "" (start 0, end 0) when the context holds no answer'
    )
    truncate: TruncateField = Field(
        "window",
        description="read a long context in windows, cut it (true) or refuse it (false)",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        single = {"question": self.question, "context": self.context}
        given = [name for name, text in single.items() if text is not None]
        if self.inputs is not None and given:
            raise InvalidInput("send question and context, or inputs, not both", param="inputs")
        if self.inputs is None and len(given) < len(single):
            missing = [name for name in single if name not in given]
            raise InvalidInput(f"{' and '.join(missing)}: required", param=missing[0])
        return self

    def texts(self) -> Iterator[tuple[str, str]]:
        if self.inputs is None:
            yield "question", self.question or ""
            yield "context", self.context or ""
        for index, item in enumerate(self.inputs or ()):
            yield f"inputs[{index}].question", item.question
            yield f"inputs[{index}].context", item.context

    @property
    def size(self) -> int:
        return len(self.questions)

    @property
    def place(self) -> str:
        return "context" if self.inputs is None else super().place

    @property
    def questions(self) -> list[str]:
        return [self.question or ""] if self.inputs is None else [i.question for i in self.inputs]

    @property
    def contexts(self) -> list[str]:
        return [self.context or ""] if self.inputs is None else [i.context for i in self.inputs]


class AdminRequest(Strict):
    """The options of promoting a bundle, so that it answers for its name."""

    keep_old: bool = Field(
        True, description="keep the version that answered before, so that a rollback is instant"
    )
    allow_new_embedding_space: bool = Field(
        False,
        description="promote although its vectors cannot be compared with the current version's",
    )


class LoadRequest(AdminRequest):
    path: str = Field(description="the bundle's directory in `models_dir`, by its name or its path")
    promote: bool = Field(
        True,
        description="make it the current version of its name; false: it answers requests for `name@version` only",
    )
    shadow: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the requests for its name that it gets copies of, to compare its answers; above 0 it is"
        " not promoted",
    )


class PromoteRequest(AdminRequest):
    max_changed: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the answers to copies, of each head, that may have changed or failed;"
        " unset, none were needed",
    )
    min_compared: AtLeastOne = Field(
        100, description="compared answers that `max_changed` requires"
    )


# The fields that hold a list of inputs, or as many items as there are inputs.
LISTS = ("inputs", "input", "text_pair", "texts", "documents", "labels", "ids", "targets")
R = TypeVar("R", bound=Request)
S = TypeVar("S", bound=Strict)


def parse(schema: type[R], body: object, max_inputs: int) -> R:
    """Check the sizes of a parsed body and validate it. Raises TooLarge or an InvalidInput that names every fault."""
    if isinstance(body, dict):
        for name in LISTS:
            if name in body:
                refuse_many(name, body[name], max_inputs)
    valid = validate(schema, body)
    if valid.runs > max_inputs:
        raise TooLarge(f"the model would read {valid.runs} texts; a request may have {max_inputs}")
    return valid


def validate(schema: type[S], body: object) -> S:
    """Validate a parsed body whose size is already checked. Raises InvalidInput."""
    if not isinstance(body, dict):
        raise InvalidInput("the body must be a JSON object")
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise to_invalid_input(faults, schema.model_fields) from None


def most_parts(max_inputs: int) -> int:
    """Return the largest number of strings, commas, colons and opening brackets of a request.

    It is the maximum of a valid request, plus a margin so that slightly invalid requests get a precise error.
    """
    return 16 * max_inputs + 1024


def refuse_many(name: str, value: object, most: int) -> None:
    if isinstance(value, list) and len(value) > most:
        raise TooLarge(f"{name} has {len(value)} items; a request may have {most}", param=name)


def refuse_long(request: Request, most: int) -> None:
    """Check the length of each text. Raises a TooLarge that names every text of more than `most` characters."""
    long = [name for name, text in request.texts() if len(text) > most]
    if long:
        message = f"{', '.join(long)}: must have at most {most} characters"
        raise TooLarge(message, param=long[0])


def numbered(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((f"{name}[{index}]", text) for index, text in enumerate(texts))


def to_invalid_input(faults: Sequence[ErrorDetails], fields: Iterable[str]) -> InvalidInput:
    """Return one readable error for all faults. Locations with the same fault are listed together.

    The message names at most `NAMED` unknown fields, because a body may have any number of them.
    """
    unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
    others = [fault for fault in faults if fault["type"] != "extra_forbidden"]
    places: dict[str, list[str]] = {}
    for fault in [*others, *unknown[:NAMED]]:
        places.setdefault(describe_fault(fault, fields), []).append(place(fault["loc"]))
    told = [f"{', '.join(names)}: {fault}" for fault, names in places.items()]
    if len(unknown) > NAMED:
        told.append(f"and {len(unknown) - NAMED} more unknown fields")
    message = "; ".join(told)
    return InvalidInput(message, param=place(faults[0]["loc"]))


def place(location: Sequence[int | str]) -> str:
    """Format `("inputs", 3, "context")` as `inputs[3].context`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:SHOWN]}" for step in location)
    return "".join(steps).removeprefix(".")


def describe_fault(fault: ErrorDetails, fields: Iterable[str]) -> str:
    if fault["type"] == "extra_forbidden":
        return f"unknown field{did_you_mean(str(fault['loc'][-1])[:SHOWN], fields)}"
    if fault["type"] in PHRASES:
        return PHRASES[fault["type"]].format_map(fault.get("ctx", {}))
    return fault["msg"]


PHRASES: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be an integer",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be one of {expected}",
    "missing": "required",
    "model_type": "must be an object",
    "string_too_long": "must have at most {max_length} characters",
    "string_type": "must be a string",
    "too_long": "must have at most {max_length} items",
    "too_short": "must not be empty",
}


# Responses.


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


class ServedHead(BaseModel):
    task: Task
    labels: list[str]
    problem_type: ProblemType | None = Field(None, description="of a classification head, if known")
    pooling: PoolingMode | list[PoolingMode] | None = Field(
        None, description="of an embedding head; several ways are concatenated"
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
    state: str = Field(
        description="current (answers for its name), previous (did before), pinned (answers requests that name its"
        " version)"
    )
    heads: dict[str, ServedHead]
    max_length: int = Field(description="tokens that it reads at once")
    precision: str
    layout: str
    provider: str
    provider_note: str | None = Field(description="why a GPU is not used")
    runtime: str
    memory: ModelMemory | None = Field(
        None, description="of the graph that runs, where its manifest states it; null on a GPU"
    )
    sha256: str = Field(description="of its manifest")
    embedding_space: str | None
    metrics: dict[str, dict[str, dict[str, float]]] = Field(
        description="measured, by head and precision, in points"
    )
    weights_license: str
    commercial_use: str = Field(description="whether the terms of all data sets allow it")
    commercial_use_by_head: dict[str, str]
    datasets: list[DataSet]


class ModelsResponse(BaseModel):
    models: list[DescribedModel] = Field(description="the bundles served, the default first")


class Model(BaseModel):
    id: str | None = Field(description="`name@version`; null while it is being loaded")
    path: str
    sha256: str | None = Field(description="of its manifest; null while it is being loaded")
    state: str = Field(
        description="current (answers for its name), previous (answered before), pinned (answers `name@version` only),"
        " loading, draining"
    )
    since: str = Field(description="when it got its state")
    embedding_space: str | None
    requests: int = Field(description="requests that wait or are computed")
    shadow: float = Field(description="share of requests that are mirrored to it")
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
