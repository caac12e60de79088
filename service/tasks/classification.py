"""Classification: the labels of texts, or of pairs of texts."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from service.core import decode
from service.core.decode import Floats, LabelScore
from service.core.encode import Cut
from service.engines.engine import Engine
from service.engines.task_plan import TaskPlan, characters, labels_bytes, one_head
from service.errors import InvalidInput
from service.scheduling.entries import Heads
from service.tasks.fields import AtLeastOne, Inputs, Texts, TruncateField, Windowed, check_aligned


class Classification(Inputs, Windowed):
    """The labels of each text, or of each text with its pair, by falling score."""

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
        True, description="cut a long text (true), refuse it (false), or read it in windows"
    )

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        check_aligned(self.inputs, self.text_pair)
        return self

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, list[LabelScore]]:
        name, head = engine.select_head("classification", heads)
        temperature = head.calibration_temperature if self.calibrated else None
        if self.calibrated and temperature is None:
            raise InvalidInput(
                f"head {name} has no calibration_temperature: leave calibrated out",
                param="calibrated",
            )
        stride, pairs = engine.check_stride(self.stride), self.text_pair

        def encode(part: slice) -> Sequence[Cut]:
            texts = self.inputs[part]
            if pairs is None:
                return engine.encoder.windows(texts, truncate=self.truncate, stride=stride)
            if self.truncate == "window":
                raise InvalidInput("pairs have no windows: say true or false", param="truncate")
            if head.pair_prompt:
                both = zip(texts, pairs[part], strict=True)
                joined = [head.join(first, second) for first, second in both]
                return engine.encoder.windows(joined, truncate=self.truncate)
            return engine.encoder.pairs(texts, pairs[part], truncate=self.truncate)

        def labels(_: int, item: Cut, outputs: list[Floats]) -> list[LabelScore]:
            return decode.classify(
                outputs,
                item.lengths,
                labels=head.labels,
                problem_type=head.problem_type,
                top_k=self.top_k,
                threshold=self.threshold,
                function_to_apply=self.function_to_apply,
                temperature=temperature,
            )

        sizes = characters(self.inputs) if pairs is None else characters(self.inputs, pairs)
        largest = labels_bytes(head.labels)
        return TaskPlan((name,), sizes, encode, one_head(name, labels), lambda *_: largest)
