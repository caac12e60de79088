"""Schemas of sparse embeddings: weights of tokens."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from service.api.schemas import Response, TextRequest, TruncateField, whole


class EmbedSparseRequest(TextRequest):
    task = "sparse-embedding"

    top_k: Annotated[int, Field(ge=1), BeforeValidator(whole)] | None = Field(
        None, description="the number of largest weights to return; all above 0 when absent"
    )
    return_tokens: bool = Field(False, description="whether each weight's token is in the answer")
    truncate: TruncateField = Field(
        True, description="cut a long text (true), refuse it (false), or read it in windows"
    )


class SparseEmbedding(BaseModel):
    """The weights of a text's tokens, by rising id; all others are 0."""

    indices: list[int] = Field(description="ids of tokens in the vocabulary")
    values: list[float] = Field(description="their weights")
    tokens: list[str] | None = Field(None, description="only there with `return_tokens`")


class EmbedSparseResponse(Response):
    embeddings: list[SparseEmbedding | None] = Field(description="one sparse vector per input")
