"""Schemas of the vectors of tokens, for late interaction."""

from typing import Literal

from pydantic import Field

from service.api.schemas import Response, TextRequest, TruncateField


class EmbedTokensRequest(TextRequest):
    task = "late-interaction"

    input_type: Literal["query", "document"] = Field(
        "document", description="how the text is read: the prefix, the length and the tokens"
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="numbers, or base64 of little-endian float32, of each vector"
    )
    truncate: TruncateField = Field(
        True,
        description="cut a long text (true), refuse it (false), or read a long document in windows",
    )


class EmbedTokensResponse(Response):
    embeddings: list[list[list[float] | str] | None] = Field(
        description="per input, a vector for each token"
    )
