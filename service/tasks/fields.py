"""The types of a task's options, and the options that several tasks have.

A task is a record of its inputs and options. The native request for it has the same fields.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from service.core.decode import OffsetUnit
from service.core.label_prompts import LabelsError
from service.errors import InvalidInput, TooLarge

MOST_LOGITS = 2**25  # of a request, over the vocabulary; 128 MiB until they are decoded
LONGEST_NAME = 386  # largest number of characters of a bundle's owner/name@version


class Strict(BaseModel):
    """A record without unknown fields, in which no value is converted to another type."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


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
UpToHundred = Annotated[int, Field(ge=1, le=100), BeforeValidator(whole)]
NotBlank = Annotated[
    str, AfterValidator(check_not_blank), Field(json_schema_extra={"pattern": r"\S"})
]
ServedName = Annotated[str, Field(max_length=LONGEST_NAME)]  # a message repeats it
TruncateField = Annotated[
    Literal[True, False, "window"], BeforeValidator(check_truncate), WithJsonSchema(TRUNCATE)
]  # 1 is not accepted for true
ListOfTexts = Annotated[list[str], Field(min_length=1)]
Texts = Annotated[ListOfTexts, BeforeValidator(as_list, json_schema_input_type=str | ListOfTexts)]


class Windowed(Strict):
    stride: AtLeastZero | None = Field(
        None,
        description="tokens that neighbouring windows of a long text share; 64 when absent,"
        " or fewer in a model of small windows",
    )


class Inputs(Strict):
    inputs: Texts = Field(description="one text, or several; results are aligned with them")


class Positions(Strict):
    offset_unit: OffsetUnit = Field(
        "code_point",
        description="of `start` and `end`: code points, or UTF-16 code units, as JavaScript and Java count",
    )


def check_aligned(inputs: Sequence[str], text_pair: Sequence[str] | None) -> None:
    """Raise InvalidInput unless there is a second text for each input, or none at all."""
    if text_pair is not None and len(text_pair) != len(inputs):
        counts = f"{len(text_pair)} texts, inputs has {len(inputs)}"
        raise InvalidInput(f"text_pair has {counts}; they must align", param="text_pair")


@contextmanager
def labels_that_fit() -> Iterator[None]:
    """Refuse a request whose labels leave too little of a window for the text."""
    try:
        yield
    except LabelsError as error:
        raise InvalidInput(f"{error}: name fewer or shorter labels", param="labels") from None


def check_logits(count: int, what: str, vocabulary_size: int) -> None:
    """Raise TooLarge for too many rows of logits over the vocabulary. what: the `count` things that have a row each"""
    if count > (most := MOST_LOGITS // vocabulary_size):
        raise TooLarge(f"inputs: {count} {what}; a request may have {most}", param="inputs")


class Documents(Windowed):
    """Documents that are ranked by their relevance to a query, which is cut if it is too long."""

    query: str = Field(description="the text that the documents are compared with")
    documents: Texts = Field(description="one text, or several")
    truncate: TruncateField = Field(
        "window",
        description="read a long document in windows, of which the best one counts (an embedding head pools"
        " them, late interaction has the tokens of all), cut it (true) or refuse it (false)",
    )
