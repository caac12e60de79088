"""Entity recognition: the named entities of texts, with their positions."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from service.core import decode
from service.core.decode import EntitySpan, Floats
from service.core.encode import Encoded
from service.engines.engine import Engine
from service.engines.task_plan import CHARACTER_BYTES, SCORED_BYTES, TaskPlan, characters, one_head
from service.errors import InvalidInput
from service.scheduling.entries import Heads
from service.tasks.fields import Inputs, Positions, TruncateField, Windowed

Aggregation = Literal["none", "simple", "first", "average", "max"]


class EntityRecognition(Inputs, Windowed, Positions):
    """The entities of each text, in text order."""

    aggregation_strategy: Aggregation = Field(
        "first", description="how a word's tokens, and an entity's words, become one entity"
    )
    truncate: TruncateField = Field(
        "window", description="read a long text in windows, cut it (true) or refuse it (false)"
    )

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Encoded, list[EntitySpan]]:
        refuse_without_labels(engine, heads)
        name, head = engine.select_head("ner", heads)
        stride = engine.check_stride(self.stride)

        def encode(part: slice) -> Sequence[Encoded]:
            return engine.encoder.texts(self.inputs[part], truncate=self.truncate, stride=stride)

        def entities(index: int, item: Encoded, outputs: list[Floats]) -> list[EntitySpan]:
            text = self.inputs[index]
            found = decode.ner(
                item.windows,
                outputs,
                text,
                labels=head.labels,
                aggregation_strategy=self.aggregation_strategy,
            )
            return decode.to_utf16(found, text) if self.offset_unit == "utf16" else found

        label = SCORED_BYTES + CHARACTER_BYTES * max(map(len, head.labels))

        def answer_bytes(index: int, item: Encoded) -> int:
            return CHARACTER_BYTES * len(self.inputs[index]) + label * item.tokens

        sizes = characters(self.inputs)
        return TaskPlan((name,), sizes, encode, one_head(name, entities), answer_bytes)


def refuse_without_labels(engine: Engine, wanted: Heads) -> None:
    """Raise InvalidInput if the wanted head, or the only one for entities, takes its labels from the request."""
    described = engine.manifest.heads
    of_labels = [name for name, head in described.items() if head.per_pair]
    has_others = any(head.task == "ner" for head in described.values())
    if of_labels and (wanted[0] in of_labels if wanted else not has_others):
        name = wanted[0] if wanted else of_labels[0]
        reason = f"the head {name} of {engine.id} takes its labels from the request"
        raise InvalidInput(
            f'{reason}: send them to /ner, as "labels": ["person", ...]', param="labels"
        )
