"""Schemas of the routes of the tokenizer."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from service.api.schemas import (
    OFFSET_UNIT,
    AtLeastZero,
    InputsRequest,
    Request,
    Texts,
    check_aligned,
    numbered,
)
from service.core.decode import OffsetUnit


def check_ids(value: object) -> object:
    """Return a list of lists of integers. One list of integers becomes the only item of a list."""
    if isinstance(value, list) and value:
        nested = value if all(isinstance(one, list) for one in value) else [value]
        if all(type(token) is int for one in nested for token in one):
            return nested
    raise PydanticCustomError("ids", "must be a list of token ids, or a list of such lists")


Ids = list[AtLeastZero]


class TokenizeRequest(InputsRequest):
    task = "tokenize"

    text_pair: Texts | None = Field(None, description="the second text of each input, aligned")
    offset_unit: OffsetUnit = Field("code_point", description=OFFSET_UNIT)

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        check_aligned(self.inputs, self.text_pair)
        return self

    def texts(self) -> Iterator[tuple[str, str]]:
        yield from super().texts()
        yield from numbered("text_pair", self.text_pair or ())


class DetokenizeRequest(Request):
    task = "detokenize"

    ids: Annotated[
        list[Ids], BeforeValidator(check_ids, json_schema_input_type=Ids | list[Ids])
    ] = Field(description="the token ids of one text, or of several")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the texts")

    @property
    def size(self) -> int:
        return len(self.ids)

    def texts(self) -> Iterator[tuple[str, str]]:
        return iter(())


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
