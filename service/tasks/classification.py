"""Classification: the labels of texts, or of pairs of texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import decode
from service.core.decode import Floats, LabelScore
from service.core.encode import Cut, Truncate
from service.engines.engine import Engine
from service.engines.task_plan import TaskPlan, characters, one_head
from service.errors import InvalidInput
from service.scheduling.entries import Heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """The labels of each text, or of each text with its pair, by falling score.

    pairs: the second text of each input; None for single texts
    top_k: the number of labels, None for all
    threshold: the smallest score of a label that is returned
    function_to_apply: see `decode.activate`
    calibrated: whether scores are calibrated by the head's temperature
    stride: tokens that neighboring windows share; None for the default
    """

    texts: Sequence[str]
    pairs: Sequence[str] | None = None
    top_k: int | None = None
    threshold: float | None = None
    function_to_apply: str | None = None
    calibrated: bool = False
    truncate: Truncate = True
    stride: int | None = None

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, list[LabelScore]]:
        name, head = engine.select_head("classification", heads)
        temperature = head.calibration_temperature if self.calibrated else None
        if self.calibrated and temperature is None:
            raise InvalidInput(
                f"head {name} has no calibration_temperature: leave calibrated out",
                param="calibrated",
            )
        stride, pairs = engine.check_stride(self.stride), self.pairs

        def encode(part: slice) -> Sequence[Cut]:
            texts = self.texts[part]
            if pairs is None:
                return engine.encoder.windows(texts, truncate=self.truncate, stride=stride)
            if self.truncate == "window":
                raise InvalidInput("pairs have no windows: say true or false", param="truncate")
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

        sizes = characters(self.texts) if pairs is None else characters(self.texts, pairs)
        return TaskPlan((name,), sizes, encode, one_head(name, labels))
