"""The requests of the native API. The fields of a task's request are those of its record in `service.tasks`.

Bodies forbid unknown fields, and no value is coerced to another type. The error for an invalid body names all faults,
each with its field and index.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from service.errors import InvalidInput, TooLarge
from service.settings import UnknownModelRule, did_you_mean
from service.tasks.analysis import Analysis
from service.tasks.attention import Attention
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.fields import (
    AtLeastOne,
    AtLeastZero,
    Inputs,
    NotBlank,
    Positions,
    ServedName,
    Strict,
    Texts,
    check_aligned,
)
from service.tasks.labelled_entities import THRESHOLD, LabelledEntities, Labels, Threshold
from service.tasks.late_interaction import TokenEmbedding
from service.tasks.mask_filling import MaskFilling
from service.tasks.question_answering import QaOptions
from service.tasks.reranking import Reranking
from service.tasks.similarity import Similarity
from service.tasks.sparse_embedding import SparseEmbedding
from service.tasks.zero_shot import ZeroShot

SHOWN = 64  # characters of a client's own field name that a message repeats
NAMED = 16  # largest number of unknown fields that a message names


class Request(Strict):
    """The fields and the interface of all requests to a model."""

    task: ClassVar[str]  # its name in logs, metrics and traces
    listed: ClassVar[str] = "inputs"  # the field that has an item for each result
    text_fields: ClassVar[Sequence[str]] = ("inputs",)  # those with texts
    nested_texts: ClassVar[Sequence[str]] = ()  # those with texts among their own fields
    unknown_model: ClassVar[UnknownModelRule] = "refuse"  # unless a setting says otherwise

    model: ServedName | None = Field(
        None, description="`name`, an alias or `name@version`; the first bundle served when absent"
    )

    @property
    def task_model(self) -> str | None:
        """The model of the request's task, which answers in place of `model` where it is served."""
        return None

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
        inputs = getattr(self, self.listed)
        return 1 if isinstance(inputs, str) else len(inputs)

    @property
    def place(self) -> str:
        """The name of an input in error messages, with {} for its index."""
        name = name_in_body(type(self), self.listed)
        return name if isinstance(getattr(self, self.listed), str) else name + "[{}]"

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every text with its location."""
        for field in self.text_fields:
            name, value = name_in_body(type(self), field), getattr(self, field)
            if isinstance(value, str):
                yield name, value
            else:
                yield from numbered(name, value or ())


@cache
def names_of_texts(schema: type[Request]) -> frozenset[str]:
    """Return the names that the fields with texts have in a request's JSON."""
    fields = (*schema.text_fields, *schema.nested_texts)
    return frozenset(name_in_body(schema, field) for field in fields)


@cache
def name_in_body(schema: type[Request], field: str) -> str:
    """Return the name that a field of a request has in its JSON."""
    return schema.model_fields[field].alias or field


class IsolatingRequest(Request):
    on_error: Literal["fail", "null"] = Field(
        "fail",
        description="what one bad input does: the request fails, or has null for its result and an entry in `errors`",
    )

    @property
    def isolates_errors(self) -> bool:
        return self.on_error == "null"


class OneHead(Request):
    """A request that one head answers."""

    head: ServedName | None = Field(
        None, description="the model's first head for the task when absent"
    )

    @property
    def wanted_heads(self) -> tuple[str, ...]:
        return () if self.head is None else (self.head,)


class HeadRequest(IsolatingRequest, OneHead):
    pass


class ClassifyRequest(HeadRequest, Classification):
    task = "classification"
    text_fields = ("inputs", "text_pair")


class NerRequest(HeadRequest, EntityRecognition):
    task = "ner"
    text_fields = ("inputs", "labels")

    labels: Labels | None = Field(
        None, description="one label, or several, for a head that finds entities with any labels"
    )
    threshold: Threshold | None = Field(
        None, description=f"with `labels`: what an entity's score exceeds; {THRESHOLD} when absent"
    )
    nested: bool = Field(
        False, description="with `labels`: whether an entity may lie within another"
    )

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.labels is None and (self.nested or self.threshold is not None):
            name = "nested" if self.nested else "threshold"
            raise PydanticCustomError("without_labels", "{name} needs labels", {"name": name})
        if self.labels is not None and "aggregation_strategy" in self.model_fields_set:
            raise PydanticCustomError(
                "with_labels", "leave out aggregation_strategy, which no head with labels has"
            )
        return self

    @property
    def labelled(self) -> LabelledEntities | None:
        """The task with the request's labels; None without labels."""
        if self.labels is None:
            return None
        fields = self.model_dump(include={*LabelledEntities.model_fields}, exclude_none=True)
        return LabelledEntities(**fields)


class EmbedRequest(HeadRequest, Embedding):
    task = "embedding"

    encoding_format: Literal["float", "base64"] = Field(
        "float",
        description="numbers, or base64 of the bytes: little-endian float32, or 8-bit integers",
    )


class EmbedTokensRequest(HeadRequest, TokenEmbedding):
    task = "late-interaction"

    encoding_format: Literal["float", "base64"] = Field(
        "float", description="numbers, or base64 of little-endian float32, of each vector"
    )


class EmbedSparseRequest(HeadRequest, SparseEmbedding):
    task = "sparse-embedding"

    return_tokens: bool = Field(False, description="whether each weight's token is in the answer")


class FillMaskRequest(HeadRequest, MaskFilling):
    task = "fill-mask"
    text_fields = ("inputs", "targets")


class AttentionRequest(IsolatingRequest, Attention):
    task = "attention"
    text_fields = ("inputs", "text_pair")

    def name_heads(self, heads: tuple[str, ...]) -> dict[str, object]:
        return {}


class RerankRequest(HeadRequest, Reranking):
    task = "rerank"
    listed = "documents"
    text_fields = ("query", "documents")

    query: NotBlank = Field(description="the text that the documents are compared with")
    top_n: AtLeastOne | None = Field(
        None, description="documents to return; all of them when absent"
    )
    return_text: bool = Field(False, description="whether each result has its document's text")

    @model_validator(mode="after")
    def _one_selection(self) -> Self:
        if self.head is not None and self.weights is not None:
            raise InvalidInput("send head or weights, not both", param="weights")
        return self

    def name_heads(self, heads: tuple[str, ...]) -> dict[str, object]:
        return {"heads": heads} if self.weights else super().name_heads(heads)


class SimilarityRequest(HeadRequest, Similarity):
    task = "similarity"
    text_fields = ("source", "inputs")

    source: NotBlank = Field(description="the text that each input is compared with")


class ZeroShotRequest(HeadRequest, ZeroShot):
    task = "zero-shot"
    text_fields = ("inputs", "labels", "hypothesis_template")


def check_names(value: object) -> object:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise PydanticCustomError("names", "must be a list of names")
    return value


class AnalyzeRequest(IsolatingRequest, Analysis):
    task = "analyze"

    heads: Annotated[list[ServedName] | None, BeforeValidator(lambda v: v and check_names(v))] = (
        Field(None, description="the heads; all that read single texts when absent")
    )

    @property
    def wanted_heads(self) -> tuple[str, ...]:
        return tuple(self.heads or ())

    def name_heads(self, heads: tuple[str, ...]) -> dict[str, object]:
        return {"heads": heads}


class QaInput(Strict):
    question: NotBlank = Field(description="the question about the context")
    context: NotBlank = Field(description="the text that the answer is a span of")


class QaRequest(HeadRequest, QaOptions):
    """One question as `question` and `context`, or several as `inputs`; not both."""

    task = "qa"
    text_fields = ("question", "context", "inputs")

    question: NotBlank | None = Field(None, description="the question about the context")
    context: NotBlank | None = Field(None, description="the text that the answer is a span of")
    inputs: list[QaInput] | None = Field(None, min_length=1, description="several questions")

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
        return len(self.inputs or [self])

    @property
    def place(self) -> str:
        return "context" if self.inputs is None else super().place

    @property
    def questions(self) -> list[str]:
        return [self.question or ""] if self.inputs is None else [i.question for i in self.inputs]

    @property
    def contexts(self) -> list[str]:
        return [self.context or ""] if self.inputs is None else [i.context for i in self.inputs]


def check_ids(value: object) -> object:
    """Return a list of lists of integers. One list of integers becomes the only item of a list."""
    if isinstance(value, list) and value:
        nested = value if all(isinstance(one, list) for one in value) else [value]
        if all(type(token) is int for one in nested for token in one):
            return nested
    raise PydanticCustomError("ids", "must be a list of token ids, or a list of such lists")


Ids = list[AtLeastZero]


class TokenizeRequest(Request, Inputs, Positions):
    task = "tokenize"
    text_fields = ("inputs", "text_pair")

    text_pair: Texts | None = Field(None, description="the second text of each input, aligned")

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        check_aligned(self.inputs, self.text_pair)
        return self


class DetokenizeRequest(Request):
    task = "detokenize"
    listed = "ids"
    text_fields = ()

    ids: Annotated[
        list[Ids], BeforeValidator(check_ids, json_schema_input_type=Ids | list[Ids])
    ] = Field(description="the token ids of one text, or of several")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the texts")


class AdminRequest(Strict):
    """The options of promoting a bundle, so that it answers for its name."""

    keep_old: bool = Field(
        True, description="keep the version that answered before, so that a rollback is instant"
    )
    allow_new_embedding_space: bool = Field(
        False,
        description="promote although its vectors cannot be compared with the current version's",
    )
    aliases: list[Annotated[ServedName, Field(min_length=1)]] | None = Field(
        None,
        description="further names of requests for its name, which other models lose; absent, those that it has",
    )


class LoadRequest(AdminRequest):
    path: str = Field(
        description="the bundle's directory in `models_dir`, by its name or its path; or an address that"
        " `model_sources` allows"
    )
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
LISTS = (
    "inputs",
    "input",
    "instances",
    "text_pair",
    "texts",
    "documents",
    "labels",
    "ids",
    "targets",
)
R = TypeVar("R", bound=Request)
S = TypeVar("S", bound=Strict)


def parse(schema: type[R], body: object, max_inputs: int) -> R:
    """Check the sizes of a parsed body and validate it. Raises TooLarge or an InvalidInput that names every fault."""
    if isinstance(body, dict):
        for name in LISTS:
            if name in body:
                refuse_many(name, body[name], max_inputs)
    valid = validate(schema, body, max_inputs)
    if valid.size > max_inputs:
        raise TooLarge(f"the model would read {valid.size} texts; a request may have {max_inputs}")
    return valid


def validate(schema: type[S], body: object, max_inputs: int | None = None) -> S:
    """Validate a parsed body whose size is already checked. Raises InvalidInput.

    max_inputs: for validators that split a text, as their context
    """
    if not isinstance(body, dict):
        raise InvalidInput("the body must be a JSON object")
    try:
        return schema.model_validate(body, context=max_inputs)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise to_invalid_input(faults, schema.model_fields) from None


def most_parts(max_inputs: int) -> int:
    """Return the largest number of strings, lists and objects of a request.

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
