"""Similarity: the cosines of one text's vector with the vectors of other texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import decode
from service.core.bundle import InputType
from service.core.decode import Floats
from service.core.encode import Cut, Truncate
from service.engines.engine import Engine, Reply
from service.engines.task_plan import TaskPlan
from service.scheduling.entries import Heads
from service.tasks.embedding import Embedding
from service.tasks.source_texts import scores_of_texts, with_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """The vector of each text and, last, of the text that they are compared with. See `scores`.

    truncate: of the texts; the source is cut if it is too long
    stride: tokens that neighboring windows share; None for the default
    source_type, texts_type: input types, which select prompts, and heads where there is one for each type
    """

    source: str
    texts: Sequence[str]
    truncate: Truncate = True
    stride: int | None = None
    source_type: InputType | None = None
    texts_type: InputType | None = None

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, Floats]:
        texts = Embedding(
            texts=self.texts,
            normalize=False,
            truncate=self.truncate,
            stride=self.stride,
            input_type=self.texts_type,
        ).plan(engine, _for_type(engine, heads, self.texts_type))
        source = Embedding(texts=[self.source], normalize=False, input_type=self.source_type).plan(
            engine, _for_type(engine, heads, self.source_type)
        )
        return with_source(texts, source)

    def scores(self, engine: Engine, reply: Reply[Floats]) -> list[float | None]:
        """Return the cosine of each text's vector with the source's; None for a text that failed."""
        return scores_of_texts(reply, decode.cosines)


def _for_type(engine: Engine, heads: Heads, input_type: InputType | None) -> Heads:
    """Return the wanted heads, or none where the wanted head is for the other input type."""
    own = [
        engine.manifest.heads[name].input_type for name in heads if name in engine.manifest.heads
    ]
    is_other = input_type is not None and any(own) and input_type not in own
    return () if is_other else heads
