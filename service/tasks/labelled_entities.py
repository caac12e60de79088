"""Zero-shot entity recognition: entities with labels that a request names, by a head that was trained for any label."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field

from service.core.decode import EntitySpan, Floats, to_utf16
from service.core.encode import Encoded
from service.core.labelled_entities import label_windows, labelled_entities, word_ids
from service.engines.engine import Engine
from service.engines.task_plan import (
    CHARACTER_BYTES,
    SCORED_BYTES,
    Shared,
    TaskPlan,
    characters,
    one_head,
)
from service.errors import UnknownHead
from service.scheduling.entries import Heads
from service.tasks.fields import (
    Inputs,
    NotBlank,
    Positions,
    TruncateField,
    Windowed,
    as_list,
    labels_that_fit,
)

THRESHOLD = 0.5
ListOfLabels = Annotated[list[NotBlank], Field(min_length=1)]
Labels = Annotated[
    ListOfLabels, BeforeValidator(as_list, json_schema_input_type=str | ListOfLabels)
]
Threshold = Annotated[float, Field(ge=0, le=1)]


class LabelledEntities(Inputs, Windowed, Positions):
    """The entities of each text with the request's labels, in text order."""

    labels: Labels
    threshold: Threshold = THRESHOLD
    nested: bool = False
    truncate: TruncateField = "window"

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Encoded, list[EntitySpan]]:
        try:
            name, head = engine.select_head("zero-shot-ner", heads)
        except UnknownHead as error:
            reason = f"{error.message}: leave out labels for a head with labels of its own"
            raise UnknownHead(reason, param="labels") from None
        prompt = head.label_prompt
        assert prompt is not None, "the manifest requires it for the task"
        encoder, stride = engine.encoder, engine.check_stride(self.stride)
        labels = [*dict.fromkeys(self.labels)]

        def read(part: slice) -> Sequence[list[int]]:
            return word_ids(encoder, labels[part])

        label_ids = Shared("labels[{}]", [*map(len, labels)], read)

        def encode(part: slice) -> Sequence[Encoded]:
            texts, truncate = self.inputs[part], self.truncate
            with labels_that_fit():
                return label_windows(
                    encoder, texts, label_ids.items, prompt, truncate=truncate, stride=stride
                )

        def entities(index: int, item: Encoded, outputs: list[Floats]) -> list[EntitySpan]:
            text = self.inputs[index]
            found = labelled_entities(
                item.windows,
                outputs,
                text,
                labels=labels,
                max_width=prompt.max_width,
                threshold=self.threshold,
                nested=self.nested,
            )
            return to_utf16(found, text) if self.offset_unit == "utf16" else found

        return TaskPlan(
            (name,),
            characters(self.inputs),
            encode,
            one_head(name, entities),
            lambda *_: 0,
            shared=label_ids,
            result_bytes=_size,
            decodes_inline=False,
        )


def _size(found: Sequence[EntitySpan]) -> int:
    """Return the largest size of a result in JSON."""
    texts = sum(len(one.word) + len(one.entity) for one in found)
    return CHARACTER_BYTES * texts + SCORED_BYTES * len(found)
