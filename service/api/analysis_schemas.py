"""Schemas of zero-shot classification, and of the analysis of texts by several heads."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from service.api.schemas import (
    OFFSET_UNIT,
    ON_ERROR,
    STRIDE,
    AtLeastZero,
    ClassifyResponse,
    HeadRequest,
    InputsRequest,
    ModelResponse,
    NotBlank,
    OnError,
    ServedName,
    Texts,
    TruncateField,
    numbered,
)
from service.core.decode import OffsetUnit
from service.tasks.zero_shot import TEMPLATE


def check_template(value: object) -> object:
    if isinstance(value, str) and "{}" not in value:
        raise PydanticCustomError("template", "must contain {{}}, the place of the label")
    return value


def check_names(value: object) -> object:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise PydanticCustomError("names", "must be a list of names")
    return value


class ZeroShotRequest(HeadRequest, InputsRequest):
    task = "zero-shot"

    labels: Texts = Field(description="one label, or several")
    hypothesis_template: Annotated[NotBlank, BeforeValidator(check_template)] = Field(
        TEMPLATE, description="the hypothesis about a label, which replaces {}"
    )
    multi_label: bool = Field(
        False, description="whether several labels may hold together, each with a score of its own"
    )
    truncate: bool = Field(True, description="cut a long text (true) or refuse it (false)")

    @property
    def runs(self) -> int:
        return len(self.inputs) * len(self.labels)

    def texts(self) -> Iterator[tuple[str, str]]:
        yield from super().texts()
        yield from numbered("labels", self.labels)
        yield "hypothesis_template", self.hypothesis_template


class ZeroShotResponse(ClassifyResponse):
    pass


class AnalyzeRequest(InputsRequest):
    task = "analyze"

    heads: Annotated[list[ServedName] | None, BeforeValidator(lambda v: v and check_names(v))] = (
        Field(None, description="the heads; all that read single texts when absent")
    )
    offset_unit: OffsetUnit = Field("code_point", description=OFFSET_UNIT)
    truncate: TruncateField = Field(
        "window",
        description="read a long text in windows, cut it (true) or refuse it (false), for all heads",
    )
    stride: AtLeastZero | None = Field(None, description=STRIDE)
    on_error: OnError = Field("fail", description=ON_ERROR)

    @property
    def wanted_heads(self) -> tuple[str, ...]:
        return tuple(self.heads or ())

    def name_heads(self, heads: tuple[str, ...]) -> dict[str, object]:
        return {"heads": heads}

    @property
    def isolates_errors(self) -> bool:
        return self.on_error == "null"


class AnalyzeResponse(ModelResponse):
    heads: list[str]
    results: list[dict[str, list[Any]] | None] = Field(
        description="per input, the result of each head as its own route has it: labels, entity groups, or numbers"
    )
