"""Similarity: the cosines of one text's vector with those of other texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import decode
from service.core.bundle import InputType
from service.core.decode import Floats
from service.core.encode import Cut, Truncate
from service.engines.engine import Engine
from service.engines.task_plan import TaskPlan
from service.scheduling.entries import Heads, Outputs
from service.tasks.embedding import Embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """The vector of each text and, last, of the text that they are compared with. See `compare`.

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
        count = len(self.texts)
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

        def encode(part: slice) -> Sequence[Cut]:
            found = texts.encode(slice(part.start, min(part.stop, count)))
            return found if part.stop <= count else [*found, *source.encode(slice(0, 1))]

        def vector(index: int, item: Cut, outputs: list[Outputs]) -> Floats:
            return (texts if index < count else source).decode(index % count, item, outputs)

        both = tuple(dict.fromkeys([*texts.heads, *source.heads]))
        return TaskPlan(both, [*texts.sizes, *source.sizes], encode, vector)


def _for_type(engine: Engine, heads: Heads, input_type: InputType | None) -> Heads:
    """Return the wanted heads, or none where the wanted head is for the other input type."""
    own = [
        engine.manifest.heads[name].input_type for name in heads if name in engine.manifest.heads
    ]
    is_other = input_type is not None and any(own) and input_type not in own
    return () if is_other else heads


def compare(vectors: Sequence[Floats | None]) -> list[float | None]:
    """Return the cosine of the last vector with each other one; None without a vector."""
    *others, source = vectors
    if source is None:
        return [None for _ in others]
    known = iter(decode.cosines(source, [vector for vector in others if vector is not None]))
    return [None if vector is None else next(known) for vector in others]
