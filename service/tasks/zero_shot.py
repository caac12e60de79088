"""Zero-shot classification: labels that a request names, by a head that was trained on entailment or for any label."""

import itertools
from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from service.core import decode
from service.core.decode import Floats, LabelScore
from service.core.encode import Cut, Encoder, TextError, TextIds
from service.core.label_prompts import classified_texts, label_ids, label_scores
from service.core.manifest import Head
from service.engines.engine import Engine
from service.engines.task_plan import Shared, TaskPlan, characters, labels_bytes, one_head
from service.errors import UnknownHead
from service.scheduling.entries import Heads
from service.tasks.fields import Inputs, NotBlank, Texts, labels_that_fit

ENTAILMENT, CONTRADICTION = "entail", "contra"  # beginnings of labels, in lower case
TEMPLATE = "This example is {}."  # of transformers' pipeline


def check_template(value: object) -> object:
    if isinstance(value, str) and "{}" not in value:
        raise PydanticCustomError("template", "must contain {}, the place of the label")
    return value


Template = Annotated[NotBlank, BeforeValidator(check_template)]


class ZeroShot(Inputs):
    """The labels of each text by falling score.

    A head that was trained on entailment reads the text with a hypothesis for each label. A zero-shot-classification
    head (GLiClass) reads all labels together with the text.
    """

    labels: Texts = Field(description="one label, or several")
    hypothesis_template: Template | None = Field(
        None,
        description=f"the text about a label, which replaces {{}}; when absent {TEMPLATE!r}, or the label alone for a"
        " zero-shot-classification head",
    )
    multi_label: bool = Field(
        False, description="whether several labels may hold together, each with a score of its own"
    )
    truncate: bool = Field(True, description="cut a long text (true) or refuse it (false)")

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, list[LabelScore]]:
        name = select_zero_shot(engine, heads)
        head, encoder = engine.manifest.heads[name], engine.encoder
        prompt = head.label_prompt
        template = self.hypothesis_template or ("{}" if prompt else TEMPLATE)
        places = template.count("{}")
        sizes = [len(template) + places * (len(label) - len("{}")) for label in self.labels]

        def read(part: slice) -> Sequence[TextIds]:
            texts = [template.replace("{}", one) for one in self.labels[part]]
            return label_ids(encoder, texts, prompt) if prompt else encoder.text_ids(texts)

        shared = Shared("labels[{}] in hypothesis_template", sizes, read)

        def encode(part: slice) -> Sequence[Cut]:
            if prompt is None:
                return self._pairs(encoder, self.inputs[part], shared.items)
            texts, ids, truncate = (
                self.inputs[part],
                [own.ids for own in shared.items],
                self.truncate,
            )
            with labels_that_fit():
                return classified_texts(encoder, texts, ids, prompt, truncate=truncate)

        def labels(_: int, item: Cut, outputs: list[Floats]) -> list[LabelScore]:
            if prompt is not None:
                return label_scores(outputs[0], self.labels, multi_label=self.multi_label)
            entailment, contradiction = entailment_labels(head)
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
            shared=shared,
            sequences=1 if prompt else len(self.labels),
        )

    def _pairs(
        self, encoder: Encoder, texts: Sequence[str], hypotheses: Sequence[TextIds]
    ) -> list[Cut]:
        encoded, too_long = [], {}
        for index, text in enumerate(encoder.text_ids(texts)):
            try:
                encoded.append(self._pair(encoder, text, hypotheses))
            except TextError as error:
                too_long[index] = error
        if too_long:
            raise TextError([*too_long], next(iter(too_long.values())).reason)
        return encoded

    def _pair(self, encoder: Encoder, text: TextIds, hypotheses: Sequence[TextIds]) -> Cut:
        """Return one window for each hypothesis."""
        pairs = encoder.one_with_each(text, hypotheses, truncate=self.truncate)
        windows = itertools.chain.from_iterable(pair.windows for pair in pairs)
        return Cut(tuple(windows), any(pair.truncated for pair in pairs))


def select_zero_shot(engine: Engine, wanted: Heads) -> str:
    """Return the wanted head, or the first one that scores labels of a request. Raises UnknownHead."""
    heads = engine.manifest.heads
    found = [
        name
        for name, head in heads.items()
        if head.task == "zero-shot-classification"
        or (head.task == "classification" and _index(head, ENTAILMENT) is not None)
    ]
    name = wanted[0] if wanted else next(iter(found), None)
    if name not in found:
        what = f"no head {name!r}" if name else "no head"
        has = ", ".join(found) or "none"
        reason = (
            f"{engine.id} has {what} of the task zero-shot-classification, or with a label that begins with"
            f" {ENTAILMENT!r}"
        )
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
