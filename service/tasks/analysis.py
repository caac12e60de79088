"""Analysis: the answers of several heads from one pass of the encoder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from service.core.encode import Encoded
from service.core.manifest import Task
from service.engines.engine import Engine, EngineTask
from service.engines.task_plan import TaskPlan, together
from service.errors import InvalidInput, UnknownHead
from service.scheduling.entries import Heads
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.fields import Inputs, Positions, TruncateField, Windowed
from service.tasks.late_interaction import TokenEmbedding
from service.tasks.sparse_embedding import SparseEmbedding

# The tasks whose heads read single texts.
TASKS: Mapping[Task, Callable[..., EngineTask[Any]]] = {
    "classification": Classification,
    "ner": EntityRecognition,
    "embedding": Embedding,
    "sparse-embedding": SparseEmbedding,
    "late-interaction": TokenEmbedding,
}


class Analysis(Inputs, Windowed, Positions):
    """The results of several heads for each text, by head. Each equals the result of the head alone.

    Without named heads, all heads that read single texts answer, except heads that read other tokens: those with a
    default prompt, or with a prefix or a length of documents.
    """

    truncate: TruncateField = Field(
        "window",
        description="read a long text in windows, cut it (true) or refuse it (false), for all heads",
    )

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Encoded, dict[str, Any]]:
        names = select_heads(engine, heads)
        stride = engine.check_stride(self.stride)
        plans = {name: self._of_head(engine, name).plan(engine, (name,)) for name in names}

        def encode(part: slice) -> Sequence[Encoded]:
            return engine.encoder.texts(self.inputs[part], truncate=self.truncate, stride=stride)

        return replace(together(plans), encode=encode)

    def _of_head(self, engine: Engine, name: str) -> EngineTask[Any]:
        task = engine.manifest.heads[name].task
        options: dict[str, Any] = {
            "inputs": self.inputs,
            "truncate": self.truncate,
            "stride": self.stride,
        }
        if task == "ner":
            options["offset_unit"] = self.offset_unit
        return TASKS[task](**options)


def select_heads(engine: Engine, wanted: Heads) -> Heads:
    """Return the wanted heads, each once, or all heads that read single texts if there are none.

    Raises UnknownHead, and InvalidInput for a head that does not read single texts, or reads other tokens.
    """
    heads = engine.manifest.heads
    others = [name for name, head in heads.items() if not head.reads_as_is(None)]
    of_texts = [n for n, head in heads.items() if head.task in TASKS and n not in others]
    for name in wanted:
        if name not in heads:
            has = ", ".join(heads)
            raise UnknownHead(f"{engine.id} has no head {name!r}; it has: {has}", param="heads")
        if name in others:
            reason = f"{name} has a default prompt, or a prefix or a length of documents, and reads other tokens"
            raise InvalidInput(f"{reason}: leave it out, and send it alone", param="heads")
        if name not in of_texts:
            reason = f"{name} does not read single texts; these heads do: {', '.join(of_texts)}"
            raise InvalidInput(reason, param="heads")
    if not of_texts:
        raise UnknownHead(f"{engine.id} has no head that reads single texts", param="heads")
    return tuple(dict.fromkeys(wanted or of_texts))
