"""Entity recognition: the named entities of texts, with their positions."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import decode
from service.core.decode import EntitySpan, Floats, OffsetUnit
from service.core.encode import Encoded, Truncate
from service.engines.engine import Engine
from service.engines.task_plan import TaskPlan, characters, one_head
from service.scheduling.entries import Heads


@dataclass(frozen=True, slots=True, kw_only=True)
class EntityRecognition:
    """The entities of each text, in text order.

    aggregation_strategy: see `decode.ner`
    offset_unit: of the positions
    stride: tokens that neighboring windows share; None for the default
    """

    texts: Sequence[str]
    aggregation_strategy: str = "first"
    offset_unit: OffsetUnit = "code_point"
    truncate: Truncate = "window"
    stride: int | None = None

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Encoded, list[EntitySpan]]:
        name, head = engine.select_head("ner", heads)
        stride = engine.check_stride(self.stride)

        def encode(part: slice) -> Sequence[Encoded]:
            return engine.encoder.texts(self.texts[part], truncate=self.truncate, stride=stride)

        def entities(index: int, item: Encoded, outputs: list[Floats]) -> list[EntitySpan]:
            text = self.texts[index]
            found = decode.ner(
                item.windows,
                outputs,
                text,
                labels=head.labels,
                aggregation_strategy=self.aggregation_strategy,
            )
            return decode.to_utf16(found, text) if self.offset_unit == "utf16" else found

        return TaskPlan((name,), characters(self.texts), encode, one_head(name, entities))
