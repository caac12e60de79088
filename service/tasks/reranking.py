"""Reranking: the relevance of documents to a query."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, Protocol, Self, TypeVar

from pydantic import Field, model_validator

from service.core import decode
from service.core.decode import Floats
from service.core.encode import Cut
from service.core.manifest import Head, Task
from service.engines.engine import Engine, EngineTask, Reply
from service.engines.task_plan import SCORED_BYTES, Shared, TaskPlan, characters, one_head, together
from service.errors import InvalidInput, UnknownHead
from service.scheduling.entries import Heads
from service.tasks.fields import Documents, ServedName
from service.tasks.late_interaction import LateInteractionRanking
from service.tasks.similarity import VectorRanking
from service.tasks.sparse_embedding import SparseRanking

T = TypeVar("T")
MOST_WEIGHT = 1e6

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
    weights: dict[ServedName, Annotated[float, Field(ge=0, le=MOST_WEIGHT)]] | None = Field(
        None,
        description="weights of heads by name: the score is the weighted mean of the heads' scores",
    )

    @model_validator(mode="after")
    def _weighed(self) -> Self:
        if self.weights is not None and not any(self.weights.values()):
            raise InvalidInput("must have a weight above 0", param="weights")
        return self

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, float]:
        name = select_cross_encoder(engine, heads)
        head = engine.manifest.heads[name]
        stride, encoder = engine.check_stride(self.stride), engine.encoder
        query = Shared("query", [len(self.query)], lambda _: encoder.text_ids([self.query]))

        prompt = head.before_second(self.query)
        if prompt and self.truncate == "window":
            engine.check_prompt(prompt, param="query")

        def encode(part: slice) -> Sequence[Cut]:
            if prompt:
                return encoder.windows(
                    self.documents[part], truncate=self.truncate, stride=stride, prompt=prompt
                )
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


@dataclass(frozen=True, slots=True)
class HybridRanking:
    """The weighted mean of the scores of several heads, which read the same tokens in one pass of the encoder."""

    rankings: Mapping[str, Ranking[Any]]  # by head
    weights: Mapping[str, float]

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, dict[str, Any]]:
        return together({name: one.plan(engine, (name,)) for name, one in self.rankings.items()})

    def scores(self, engine: Engine, reply: Reply[dict[str, Any]]) -> Sequence[float | None]:
        """Return the score of each document; None for one that failed."""
        by_head = []
        for name, ranking in self.rankings.items():
            results = [found and found[name] for found in reply.results]
            by_head.append(ranking.scores(engine, replace(reply, heads=(name,), results=results)))
        weights = [self.weights[name] for name in self.rankings]
        return [
            sum(w * score for w, score in zip(weights, own, strict=True)) / sum(weights)
            if None not in own
            else None
            for own in zip(*by_head, strict=True)
        ]


def make_ranking(engine: Engine, head: str | None, asked: Reranking) -> Ranking[Any]:
    """Return the ranking by a head: by its vectors, or by a cross-encoder for a head of another task, and for None.

    With `weights`, several heads rank, and `head` has no effect. Raises UnknownHead and InvalidInput for their names.
    """
    if asked.weights is not None:
        alone = asked.model_copy(update={"weights": None})
        _check_weighed(engine, asked.weights)
        return HybridRanking(
            {name: make_ranking(engine, name, alone) for name in asked.weights}, asked.weights
        )
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


def _check_weighed(engine: Engine, names: Iterable[str]) -> None:
    """Raise UnknownHead for a head without vectors, InvalidInput for one that reads other tokens than the text's."""
    heads = engine.manifest.heads
    by_vectors = [name for name, head in heads.items() if head.gives_vectors]
    for name in names:
        if name not in by_vectors:
            has = ", ".join(by_vectors) or "none"
            reason = f"{engine.id} has no head {name!r} that gives vectors; these do: {has}"
            raise UnknownHead(reason, param="weights")
        if heads[name].input_type or not heads[name].reads_as_is("query", "document"):
            reason = f"{name} has prompts, prefixes or lengths of its own, so it reads other tokens"
            raise InvalidInput(f"{reason}: rank with it alone", param="weights")


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
