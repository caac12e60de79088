"""Reranking: the relevance of documents to a query."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import Field

from service.core import decode
from service.core.bundle import Head, Task
from service.core.decode import Floats
from service.core.encode import Cut
from service.engines.engine import Engine, EngineTask, Reply
from service.engines.task_plan import SCORED_BYTES, Shared, TaskPlan, characters, one_head
from service.errors import UnknownHead
from service.scheduling.entries import Heads
from service.tasks.fields import Documents
from service.tasks.late_interaction import LateInteractionRanking
from service.tasks.similarity import VectorRanking
from service.tasks.sparse_embedding import SparseRanking

T = TypeVar("T")

# The tasks whose heads rank documents for a model without a cross-encoder, the best first.
WITHOUT_CROSS_ENCODER: Sequence[Task] = ("late-interaction", "embedding", "sparse-embedding")


class Ranking(EngineTask[T], Protocol[T]):
    """A task whose results make a score for each document of a request."""

    def scores(self, engine: Engine, reply: Reply[T]) -> Sequence[float | None]:
        """Return the score of each document; None for one that failed. Raises the error of the query."""
        ...


class Ranked(NamedTuple):
    """A document by its position in the request, and its score."""

    position: int
    score: float


class Reranking(Documents):
    """The score of each document, by a cross-encoder: a classification head with a single label.

    The query and the document are one input. A long document is read in windows, of which the best one counts.
    """

    raw_scores: bool = Field(
        False, description="logits of a cross-encoder, in place of scores from its activation"
    )

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, float]:
        name = select_cross_encoder(engine, heads)
        head = engine.manifest.heads[name]
        stride, encoder = engine.check_stride(self.stride), engine.encoder
        query = Shared("query", [len(self.query)], lambda _: encoder.text_ids([self.query]))

        def encode(part: slice) -> Sequence[Cut]:
            documents = encoder.text_ids(self.documents[part], self.truncate)
            return encoder.one_with_each(
                query.items[0], documents, truncate=self.truncate, stride=stride
            )

        def relevance(_: int, item: Cut, outputs: list[Floats]) -> float:
            return decode.relevance(outputs, problem_type=head.problem_type, raw=self.raw_scores)

        return TaskPlan(
            (name,),
            characters(self.documents),
            encode,
            one_head(name, relevance),
            lambda *_: SCORED_BYTES,
            shared=query,
        )

    def scores(self, engine: Engine, reply: Reply[float]) -> Sequence[float | None]:
        return reply.results


def make_ranking(engine: Engine, head: str | None, asked: Reranking) -> Ranking[Any]:
    """Return the ranking by a head: by its vectors, or by a cross-encoder for a head of another task, and for None."""
    wanted = engine.manifest.heads.get(head or "")
    query, documents = asked.query, asked.documents
    windows: dict[str, Any] = {"truncate": asked.truncate, "stride": asked.stride}
    match wanted.task if wanted else None:
        case "embedding":
            return VectorRanking(source=query, inputs=documents, **windows)
        case "late-interaction":
            return LateInteractionRanking(query=query, documents=documents, **windows)
        case "sparse-embedding":
            return SparseRanking(query=query, documents=documents, **windows)
        case _:
            return asked


def select_cross_encoder(engine: Engine, wanted: Heads) -> str:
    """Return the wanted head, or the first cross-encoder if there is none. Raises UnknownHead."""
    heads = engine.manifest.heads
    found = [name for name, head in heads.items() if is_cross_encoder(head)]
    name = wanted[0] if wanted else next(iter(found), None)
    if name not in found:
        what = f"no head {name!r} that scores pairs with one label" if name else "no cross-encoder"
        by_vectors = [n for n, head in heads.items() if head.gives_vectors]
        hint = f"; to rank by vectors, set head: {by_vectors[0]}" if by_vectors else ""
        has = ", ".join(found) or "none"
        raise UnknownHead(f"{engine.id} has {what}; cross-encoders: {has}{hint}", param="head")
    return name


def select_ranking_head(engine: Engine) -> str | None:
    """Return the head that ranks documents for a model without a cross-encoder; None for one that has it.

    None, too, for a model without any of these: `make_ranking` then makes a ranking that raises UnknownHead.
    """
    heads = engine.manifest.heads
    if any(is_cross_encoder(head) for head in heads.values()):
        return None
    by_task = {head.task: name for name, head in reversed(heads.items())}
    return next((by_task[task] for task in WITHOUT_CROSS_ENCODER if task in by_task), None)


def is_cross_encoder(head: Head) -> bool:
    return head.task == "classification" and len(head.labels) == 1


def rank(scores: Sequence[float | None], top_n: int | None = None) -> list[Ranked]:
    """Return the documents that have a score, by falling score, equal scores in the order of the request."""
    known = [Ranked(position, score) for position, score in enumerate(scores) if score is not None]
    return sorted(known, key=lambda one: -one.score)[:top_n]
