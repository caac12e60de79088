"""Copies of requests: whose, when, at whose cost, and what counts as the same answer."""

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from service.core.agreement import distance, same_answer
from service.core.decode import AnswerSpan, EntitySpan, LabelScore, SparseVector, TokenScore
from service.engines.engine import Engine, Reply, Ticket, Timing, TokenUsage
from service.engines.mirroring import MirroredTraffic
from service.errors import InferenceFailed, InvalidInput, Overloaded
from service.scheduling.entries import Heads
from service.scheduling.load import Load
from service.tasks.classification import Classification

SMALL = 7  # tokens
TASK = Classification(inputs=["text"])
SIX, TEN = TokenScore(6, "six", 0.5, "at six"), TokenScore(10, "ten", 0.4, "at ten")
GOOD, BAD = (
    [LabelScore("good", 0.75), LabelScore("bad", 0.25)],
    [LabelScore("bad", 0.6), LabelScore("good", 0.4)],
)


def reply(*results: Any, tokens: int = SMALL, queue_s: float = 0.001) -> Reply[Any]:
    timing = Timing(0.0, queue_s, 0.002, 0.0, 0.0, 1, tokens)
    return Reply(("sentiment",), [*results], TokenUsage(tokens, 1, []), timing)


class Copied:
    """A shadow of an engine that answers as configured."""

    def __init__(self, share: float = 1.0, draw: Callable[[], float] = lambda: 0.0) -> None:
        self.id = "a@2"
        self.users = 0
        self.load = Load()
        self.told: list[tuple[str, str, str, int]] = []
        self.asked: list[tuple[object, Ticket, Heads]] = []
        self.answers: list[Reply[Any] | Exception] = []
        self.hold = asyncio.Event()
        self.hold.set()
        engine = cast(Engine, self)
        self.shadow = MirroredTraffic(
            engine, share, lambda: self.load, lambda *it: self.told.append(it), draw
        )

    def acquire(self) -> None:
        self.users += 1

    def release(self) -> None:
        self.users -= 1

    async def answer(self, task: object, ticket: Ticket, heads: Heads) -> Reply[Any]:
        assert 1 == self.users
        self.asked.append((task, ticket, heads))
        await self.hold.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def hear(self, answered: Reply[Any]) -> None:
        ticket = Ticket("r", deadline=math.inf, tenant="ann", on_submit=lambda: None)
        self.shadow(TASK, ticket, answered)

    async def copied(self, answered: Reply[Any], answer: Reply[Any] | Exception) -> None:
        self.answers.append(answer)
        self.hear(answered)
        if self.shadow.copying is not None:
            await self.shadow.copying


async def test_answers_are_compared():
    """By head and input: an input without a result is not compared; an input with one must have one again."""
    copied = Copied()
    answered = reply(GOOD, GOOD, GOOD, GOOD, None, None)
    await copied.copied(answered, reply(GOOD, BAD, None, None, BAD, None))
    assert [
        ("a@2", "sentiment", "same", 1),
        ("a@2", "sentiment", "changed", 1),
        ("a@2", "sentiment", "failed", 2),
    ] == copied.told
    assert 0 == copied.users


async def test_a_mirrored_request_has_no_tenant_and_low_priority():
    """The copy is for the head that answered, isolates errors, and does not arrive for the finished request."""
    copied = Copied()
    await copied.copied(reply(GOOD), reply(GOOD))
    task, ticket, heads = copied.asked[0]
    assert (TASK, ("sentiment",)) == (task, heads)
    assert ("r", 1, "", True) == (
        ticket.request_id,
        ticket.priority,
        ticket.tenant,
        ticket.isolate_errors,
    )
    assert ticket.deadline < math.inf
    assert ticket.on_submit is None


async def test_a_share_is_copied():
    """The others leave no trace."""
    draws = itertools.cycle([0.04, 0.05, 0.5, 0.99])
    copied = Copied(0.05, lambda: next(draws))
    for _ in range(8):
        await copied.copied(reply(GOOD), reply(GOOD))
    assert [("a@2", "sentiment", "same", 1)] * 2 == copied.told


@pytest.mark.parametrize(
    ("problem", "said"), [("", {"queue_s": 0.003}), ("it starts", {}), ("", {"tokens": 10_000})]
)
async def test_where_there_is_no_room_none_is_made(problem, said):
    """No copy is made while requests wait or for large requests; the metrics count the skipped ones."""
    copied = Copied()
    copied.load = Load(problem=problem)
    copied.hear(reply(GOOD, BAD, **said))
    assert ([], [("a@2", "sentiment", "dropped", 2)]) == (copied.asked, copied.told)


async def test_one_at_a_time():
    """What comes while a copy is answered is left out."""
    copied = Copied()
    copied.hold.clear()
    copied.answers.append(reply(GOOD))
    copied.hear(reply(GOOD))
    copied.hear(reply(GOOD))
    copied.hold.set()
    assert copied.shadow.copying is not None
    await copied.shadow.copying
    assert ["dropped", "same"] == [told[2] for told in copied.told]
    await copied.copied(reply(GOOD), reply(GOOD))
    assert 2 == len(copied.asked)


@pytest.mark.parametrize(
    "error", [InferenceFailed("no number"), InvalidInput("too long"), RuntimeError("bug")]
)
async def test_a_copy_that_fails_is_counted(error):
    """It is counted by inputs with a result, and affects no request; only a bug is an error of its task."""
    copied = Copied()
    with capture_logs() as logs:
        if isinstance(error, RuntimeError):
            with pytest.raises(RuntimeError):
                await copied.copied(reply(GOOD, BAD, None), error)
        else:
            await copied.copied(reply(GOOD, BAD, None), error)
    assert [("a@2", "sentiment", "failed", 2)] == copied.told
    assert [] == [line for line in logs if line["log_level"] == "error"]
    assert (0, None) == (copied.users, copied.shadow.copying)


async def test_a_copy_that_finds_no_room_says_nothing_of_the_version():
    """It was left out."""
    copied = Copied()
    await copied.copied(reply(GOOD, BAD), Overloaded("the queue is full"))
    assert [("a@2", "sentiment", "dropped", 2)] == copied.told


PER = EntitySpan("PER", 0.9, "Ada", 0, 3)
SPARSE = SparseVector(np.array([3, 7]), np.float32([1, 0.5]))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (GOOD, [LabelScore("good", 0.51), LabelScore("bad", 0.49)], True),
        (GOOD, BAD, False),
        ([PER], [PER._replace(score=0.5)], True),
        ([PER], [PER._replace(entity="LOC")], False),
        ([PER], [PER._replace(end=4)], False),
        ([PER], [], False),
        ([], [], True),
        ([AnswerSpan("six", 0.9, 4, 7)], [AnswerSpan("six", 0.2, 4, 7), AnswerSpan("ten", 0.1, 9, 12)], True),
        ([AnswerSpan("six", 0.9, 4, 7)], [AnswerSpan("six", 0.9, 14, 17)], False),
        (0.5, 0.54, True),
        (0.5, 0.56, False),
        ([[SIX, TEN], [TEN]], [[SIX._replace(score=0.3)], [TEN, SIX]], True),
        ([[SIX, TEN], [TEN]], [[TEN, SIX], [TEN]], False),
        (np.float32([1, 0]), np.float32([2, 0.1]), True),
        (np.float32([1, 0]), np.float32([1, 0.2]), False),
        (np.float32([1, 0]), np.float32([1, 0, 0]), False),
        (np.uint8([200]), np.uint8([200]), True),
        (np.uint8([200]), np.uint8([55]), False),
        (np.int8([127, -128, 5, 60]), np.int8([127, -120, 0, 64]), True),
        (np.int8([127, -128, 5, 60]), np.int8([-128, 127, 5, 60]), False),
        (np.int8([1, 2]), np.int8([1, 2, 3]), False),
        (SPARSE, SPARSE._replace(values=np.float32([1.1, 0.5])), True),
        (SPARSE, SPARSE._replace(indices=np.array([3, 8])), False),
        ({"float": np.float32([1, 0])}, {"float": np.float32([1, 0.1])}, True),
        ({"float": np.float32([1, 0])}, {"float": np.float32([0, 1])}, False),
    ],
)  # fmt: skip
def test_the_same_answer(one, other, same):
    """Says the same, however sure it is."""
    assert same == same_answer(one, other) == same_answer(other, one)


async def test_results_of_several_heads_are_compared_by_head():
    """Each head's results count for that head."""
    copied = Copied()
    heads = ("sentiment", "entities")
    answered = replace(reply({"sentiment": GOOD, "entities": [PER]}, None), heads=heads)
    answer = replace(reply({"sentiment": BAD, "entities": [PER]}, None), heads=heads)
    await copied.copied(answered, answer)
    assert [("a@2", "sentiment", "changed", 1), ("a@2", "entities", "same", 1)] == copied.told
    assert heads == copied.asked[0][2]


async def test_vectors_of_several_types_are_one_result():
    """They are by type, as Cohere's API requests them, and count for their head."""
    copied = Copied()
    answered = reply({"float": np.float32([1, 0]), "ubinary": np.uint8([200])})
    await copied.copied(answered, answered)
    assert [("a@2", "sentiment", "same", 1)] == copied.told


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (np.float32([0, 2]), np.float32([0, 1]), 0.5),
        (np.float32([0, 2]), np.float32([0, 2, 0]), 1.0),
        (SPARSE, SparseVector(np.array([3]), np.float32([1])), 0.5 / math.sqrt(1.25)),
        (GOOD, BAD, 0.35),
        (GOOD, GOOD[:1], 0.0),
        (GOOD, [LabelScore("LABEL_0", 0.75)], 1.0),
        ([LabelScore("a", 8.0)], [LabelScore("a", 6.0)], 0.25),
        ([PER], [PER._replace(score=0.8)], 0.1),
        ([PER], [PER, PER._replace(start=5, end=8)], 1 / 3),
        ([PER], [], 1.0),
        ([], [], 0.0),
    ],
)
def test_the_distance_of_answers(one, other, apart):
    """It is that of vectors, of scores, or the share of spans that one result lacks."""
    assert apart == pytest.approx(distance(one, other))
