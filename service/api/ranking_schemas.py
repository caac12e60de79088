"""Schemas of the routes that compare texts: reranking and similarity."""

from collections.abc import Iterator

from pydantic import BaseModel, Field

from service.api.schemas import (
    STRIDE,
    AtLeastOne,
    AtLeastZero,
    HeadRequest,
    NotBlank,
    Response,
    TextRequest,
    Texts,
    TruncateField,
    numbered,
)


class RerankRequest(HeadRequest):
    task = "rerank"

    query: NotBlank = Field(description="the text that the documents are compared with")
    documents: Texts = Field(description="one text, or several")
    top_n: AtLeastOne | None = Field(
        None, description="documents to return; all of them when absent"
    )
    return_text: bool = Field(False, description="whether each result has its document's text")
    raw_scores: bool = Field(
        False, description="logits of a cross-encoder, in place of scores from its activation"
    )
    truncate: TruncateField = Field(
        "window",
        description="read a long document in windows, of which the best one counts (an embedding head pools"
        " them, late interaction has the tokens of all), cut it (true) or refuse it (false)",
    )

    stride: AtLeastZero | None = Field(None, description=STRIDE)

    @property
    def size(self) -> int:
        return len(self.documents)

    @property
    def place(self) -> str:
        return "documents[{}]"

    def texts(self) -> Iterator[tuple[str, str]]:
        yield "query", self.query
        yield from numbered("documents", self.documents)


class SimilarityRequest(TextRequest):
    task = "similarity"

    source: NotBlank = Field(description="the text that each input is compared with")
    truncate: TruncateField = Field(
        True, description="cut a long text (true), refuse it (false), or pool its windows"
    )

    def texts(self) -> Iterator[tuple[str, str]]:
        yield "source", self.source
        yield from super().texts()


class RankedDocument(BaseModel):
    index: int = Field(description="of the document in the request")
    score: float
    text: str | None = Field(None, description="the document; only where `return_text` is true")


class RerankResponse(Response):
    """Documents that failed, where `on_error` is "null", are in `errors` only."""

    results: list[RankedDocument] = Field(description="by falling score")


class SimilarityResponse(Response):
    results: list[float | None] = Field(description="per input, the cosine with `source`")
