"""Similarity: the cosines of one text's vector with those of other texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import decode
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
    """

    source: str
    texts: Sequence[str]
    truncate: Truncate = True
    stride: int | None = None

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, Floats]:
        texts = Embedding(
            texts=self.texts, normalize=False, truncate=self.truncate, stride=self.stride
        ).plan(engine, heads)
        source = Embedding(texts=[self.source], normalize=False).plan(engine, heads)
        return with_source(texts, source)

    def scores(self, engine: Engine, reply: Reply[Floats]) -> list[float | None]:
        """Return the cosine of each text's vector with the source's; None for a text that failed."""
        return scores_of_texts(reply, decode.cosines)
