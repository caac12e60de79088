"""Schemas of filling in the mask tokens of texts."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from service.api.schemas import Response, TextRequest, Texts, TruncateField, numbered, whole


class FillMaskRequest(TextRequest):
    task = "fill-mask"

    top_k: Annotated[int, Field(ge=1, le=100), BeforeValidator(whole)] = Field(
        5, description="tokens to return for each mask token"
    )
    targets: Texts | None = Field(
        None, description="the only tokens to consider; the whole vocabulary when absent"
    )
    truncate: TruncateField = Field(
        "window", description="read a long text in windows, cut it (true) or refuse it (false)"
    )

    def texts(self) -> Iterator[tuple[str, str]]:
        yield from super().texts()
        yield from numbered("targets", self.targets or ())


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
