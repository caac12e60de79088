"""Zero-shot classification: labels that a request names, by a head that was trained on entailment."""

import itertools
from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from service.core import decode
from service.core.decode import Floats, LabelScore
from service.core.encode import Cut, Encoder, TextError, TextIds
from service.core.manifest import Head
from service.engines.engine import Engine
from service.engines.task_plan import Shared, TaskPlan, characters, labels_bytes, one_head
from service.errors import UnknownHead
from service.scheduling.entries import Heads
from service.tasks.fields import Inputs, NotBlank, Texts

ENTAILMENT, CONTRADICTION = "entail", "contra"  # beginnings of labels, in lower case
TEMPLATE = "This example is {}."  # of transformers' pipeline


def check_template(value: object) -> object:
    if isinstance(value, str) and "{}" not in value:
        raise PydanticCustomError("template", "must contain {}, the place of the label")
    return value


Template = Annotated[NotBlank, BeforeValidator(check_template)]


class ZeroShot(Inputs):
    """The labels of each text by falling score, each from the text with a hypothesis that names the label."""

    labels: Texts = Field(description="one label, or several")
    hypothesis_template: Template = Field(
        TEMPLATE, description="the hypothesis about a label, which replaces {}"
    )
    multi_label: bool = Field(
        False, description="whether several labels may hold together, each with a score of its own"
    )
    truncate: bool = Field(True, description="cut a long text (true) or refuse it (false)")

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, list[LabelScore]]:
        name = select_entailment(engine, heads)
        entailment, contradiction = entailment_labels(engine.manifest.heads[name])
        template, encoder = self.hypothesis_template, engine.encoder
        places = template.count("{}")
        sizes = [len(template) + places * (len(label) - len("{}")) for label in self.labels]

        def read(part: slice) -> Sequence[TextIds]:
            return encoder.text_ids([template.replace("{}", one) for one in self.labels[part]])

        hypotheses = Shared("labels[{}] in hypothesis_template", sizes, read)

        def encode(part: slice) -> Sequence[Cut]:
            encoded, too_long = [], {}
            for index, text in enumerate(encoder.text_ids(self.inputs[part])):
                try:
                    encoded.append(self._pair(encoder, text, hypotheses.items))
                except TextError as error:
                    too_long[index] = error
            if too_long:
                raise TextError([*too_long], next(iter(too_long.values())).reason)
            return encoded

        def labels(_: int, item: Cut, outputs: list[Floats]) -> list[LabelScore]:
            return decode.zero_shot(
                outputs,
                self.labels,
                entailment=entailment,
                contradiction=contradiction,
                multi_label=self.multi_label,
            )

        return TaskPlan(
            (name,),
            characters(self.inputs),
            encode,
            one_head(name, labels),
            lambda *_: labels_bytes(self.labels),
            shared=hypotheses,
            sequences=len(self.labels),
        )

    def _pair(self, encoder: Encoder, text: TextIds, hypotheses: Sequence[TextIds]) -> Cut:
        """Return one window for each hypothesis."""
        pairs = encoder.one_with_each(text, hypotheses, truncate=self.truncate)
        windows = itertools.chain.from_iterable(pair.windows for pair in pairs)
        return Cut(tuple(windows), any(pair.truncated for pair in pairs))


def select_entailment(engine: Engine, wanted: Heads) -> str:
    """Return the wanted head, or the first head with an entailment label if there is none. Raises UnknownHead."""
    heads = engine.manifest.heads
    found = [
        name
        for name, head in heads.items()
        if head.task == "classification" and _index(head, ENTAILMENT) is not None
    ]
    name = wanted[0] if wanted else next(iter(found), None)
    if name not in found:
        what = f"no head {name!r}" if name else "no head"
        has = ", ".join(found) or "none"
        reason = f"{engine.id} has {what} with a label that begins with {ENTAILMENT!r}"
        raise UnknownHead(f"{reason}; such heads: {has}", param="head")
    return name


def entailment_labels(head: Head) -> tuple[int, int]:
    """Return the indices of the labels of entailment and contradiction.

    Without a label of contradiction, it is the last label, or the first one if the last is entailment, as in
    transformers' pipeline.
    """
    entailment = _index(head, ENTAILMENT) or 0
    contradiction = _index(head, CONTRADICTION)
    if contradiction is None:
        contradiction = len(head.labels) - 1 if entailment == 0 else 0
    return entailment, contradiction


def _index(head: Head, beginning: str) -> int | None:
    found = (i for i, label in enumerate(head.labels) if label.lower().startswith(beginning))
    return next(found, None)
