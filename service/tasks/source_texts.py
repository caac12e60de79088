"""One text, the source, that is compared with several others: one request, whose last input is the source."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from service.core.encode import Cut
from service.engines.engine import Reply
from service.engines.task_plan import SCORED_BYTES, TaskPlan
from service.scheduling.entries import Outputs

C = TypeVar("C", bound=Cut)
T = TypeVar("T")


def with_source(texts: TaskPlan[C, T], source: TaskPlan[C, T]) -> TaskPlan[C, T]:
    """Return a plan that has the inputs of `texts` and, last, the input of `source`."""
    count = len(texts.sizes)

    def encode(part: slice) -> Sequence[C]:
        found = texts.encode(slice(part.start, min(part.stop, count)))
        return found if part.stop <= count else [*found, *source.encode(slice(0, 1))]

    def decode(index: int, item: C, outputs: list[Outputs]) -> T:
        if index < count:
            return texts.decode(index, item, outputs)
        return source.decode(0, item, outputs)

    heads = tuple(dict.fromkeys([*texts.heads, *source.heads]))
    sizes = [*texts.sizes, *source.sizes]
    return TaskPlan(heads, sizes, encode, decode, lambda *_: SCORED_BYTES)


def scores_of_texts(
    reply: Reply[T], compare: Callable[[T, Sequence[T]], list[float]]
) -> list[float | None]:
    """Return the score of each text; None for a text that failed.

    compare: returns the scores of texts from the vectors of the source and of the texts
    Raises the error of the source, without which nothing can be compared.
    """
    *texts, source = reply.results
    if source is None:
        raise reply.errors[len(texts)]
    known = iter(compare(source, [vectors for vectors in texts if vectors is not None]))
    return [None if vectors is None else next(known) for vectors in texts]
