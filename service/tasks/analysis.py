"""Analysis: the answers of several heads from one pass of the encoder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.core import bundle
from service.core.decode import OffsetUnit
from service.core.encode import Encoded, Truncate
from service.engines.engine import Engine, EngineTask
from service.engines.task_plan import TaskPlan, characters
from service.errors import InvalidInput, UnknownHead
from service.scheduling.entries import Heads, Outputs
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import EntityRecognition

# The tasks whose heads read single texts.
TASKS: Mapping[bundle.Task, Callable[..., EngineTask[Any]]] = {
    "classification": Classification,
    "ner": EntityRecognition,
    "embedding": Embedding,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The results of several heads for each text, by head. Each equals the result of the head alone.

    Without named heads, all heads that read single texts answer, except heads with a default prompt: they read other
    tokens.

    offset_unit: of the positions of entities
    stride: tokens that neighboring windows share; None for the default
    """

    texts: Sequence[str]
    offset_unit: OffsetUnit = "code_point"
    truncate: Truncate = "window"
    stride: int | None = None

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Encoded, dict[str, Any]]:
        names = select_heads(engine, heads)
        stride = engine.check_stride(self.stride)
        plans = {name: self._of_head(engine, name).plan(engine, (name,)) for name in names}

        def encode(part: slice) -> Sequence[Encoded]:
            return engine.encoder.texts(self.texts[part], truncate=self.truncate, stride=stride)

        def by_head(index: int, item: Encoded, outputs: list[Outputs]) -> dict[str, Any]:
            return {name: plan.decode(index, item, outputs) for name, plan in plans.items()}

        return TaskPlan(names, characters(self.texts), encode, by_head)

    def _of_head(self, engine: Engine, name: str) -> EngineTask[Any]:
        task = engine.manifest.heads[name].task
        options = {"texts": self.texts, "truncate": self.truncate, "stride": self.stride}
        if task == "ner":
            options["offset_unit"] = self.offset_unit
        return TASKS[task](**options)


def select_heads(engine: Engine, wanted: Heads) -> Heads:
    """Return the wanted heads, each once, or all heads that read single texts if there are none.

    Raises UnknownHead, and InvalidInput for a head that does not read single texts, or reads them after a prompt.
    """
    heads = engine.manifest.heads
    prompted = [name for name, head in heads.items() if head.default_prompt_text]
    of_texts = [n for n, head in heads.items() if head.task in TASKS and n not in prompted]
    for name in wanted:
        if name not in heads:
            has = ", ".join(heads)
            raise UnknownHead(f"{engine.id} has no head {name!r}; it has: {has}", param="heads")
        if name in prompted:
            reason = f"{name} has the default prompt {heads[name].default_prompt!r}, so it reads other tokens"
            raise InvalidInput(f"{reason}: leave it out, and send it to /embed", param="heads")
        if name not in of_texts:
            reason = f"{name} does not read single texts; these heads do: {', '.join(of_texts)}"
            raise InvalidInput(reason, param="heads")
    if not of_texts:
        raise UnknownHead(f"{engine.id} has no head that reads single texts", param="heads")
    return tuple(dict.fromkeys(wanted or of_texts))
