"""Similarity: the cosines of one text's vector with those of other texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import decode
from service.core.decode import Floats
from service.core.encode import Cut, Truncate
from service.engines.engine import Engine
from service.engines.task_plan import TaskPlan
from service.scheduling.entries import Heads
from service.tasks.embedding import Embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """The vector of each text and, last, of the text that they are compared with. See `compare`.

    truncate: of the texts; the source is cut if it is too long
    stride: tokens that neighboring windows share; None for the default
    """

    source: str
    texts: Sequence[str]
    truncate: Truncate = True
    stride: int | None = None

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, Floats]:
        count = len(self.texts)
        texts = Embedding(
            texts=self.texts, normalize=False, truncate=self.truncate, stride=self.stride
        ).plan(engine, heads)
        source = Embedding(texts=[self.source], normalize=False).plan(engine, heads)

        def encode(part: slice) -> Sequence[Cut]:
            found = texts.encode(slice(part.start, min(part.stop, count)))
            return found if part.stop <= count else [*found, *source.encode(slice(0, 1))]

        return TaskPlan(texts.heads, [*texts.sizes, *source.sizes], encode, texts.decode)


def compare(vectors: Sequence[Floats | None]) -> list[float | None]:
    """Return the cosine of the last vector with each other one; None without a vector."""
    *others, source = vectors
    if source is None:
        return [None for _ in others]
    known = iter(decode.cosines(source, [vector for vector in others if vector is not None]))
    return [None if vector is None else next(known) for vector in others]
