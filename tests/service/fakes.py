"""An engine that answers at once, remembers what it was asked, and fails or waits when told to."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from service.api.ndjson import InLines
from service.api.schemas import Request
from service.core.decode import AnswerSpan, EntitySpan, LabelScore, SparseVector, TokenScore
from service.core.manifest import Head, LateInteraction
from service.engines.commands import Command
from service.engines.engine import EngineTask, Reply, Ticket, Timing, TokenUsage
from service.engines.result_collector import OnResult
from service.errors import QuartetError, UnknownModel
from service.scheduling.entries import Heads
from service.scheduling.load import Load
from service.scheduling.text_threads import TextThreads
from service.settings import Settings
from service.tasks.analysis import Analysis
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.late_interaction import LateInteractionRanking, TokenEmbedding
from service.tasks.mask_filling import MaskFilling
from service.tasks.question_answering import QuestionAnswering
from service.tasks.reranking import HybridRanking, Reranking
from service.tasks.similarity import Similarity
from service.tasks.sparse_embedding import SparseEmbedding
from service.tasks.zero_shot import ZeroShot

VECTOR = np.array([0.5, -0.25, 0.125], dtype=np.float32)
VECTORS = np.array([[1, 0, 0], [0, 1, 0]], dtype=np.float32)  # of the tokens of a text
WEIGHTS = SparseVector(np.array([2, 5]), np.array([0.5, 1.25], dtype=np.float32))
TOKENS = 7  # of every request


class FakeEngine:
    id = "tiny@1"
    model = SimpleNamespace(cold=False)
    manifest = SimpleNamespace(
        heads={
            "sentiment": Head(task="classification", labels=("good", "bad")),
            "embeddings": Head(task="embedding", pooling="mean", dimensions=3),
            "tokens": Head(
                task="late-interaction", dimensions=3, late_interaction=LateInteraction()
            ),
        }
    )
    encoder = SimpleNamespace(
        tokenizer=SimpleNamespace(id_to_token=lambda number: f"token {number}")
    )
    fingerprint = "0123456789ab;precision=int8;provider=CPUExecutionProvider;runtime=onnxruntime 1"
    faster: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.asked: EngineTask[Any] | None = None
        self.heads: Heads = ()
        self.ticket: Ticket | None = None
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None  # before the answer, after the reported results
        self.tell_first: int | None = None  # number of reported results; None: all
        self.bad: dict[int, QuartetError] = {}  # inputs that have no result
        self.users = 0
        self.reached = asyncio.Event()
        self.cancelled = asyncio.Event()

    def acquire(self) -> None:
        self.users += 1

    def release(self) -> None:
        self.users -= 1

    async def answer(
        self,
        task: EngineTask[Any],
        ticket: Ticket,
        heads: Heads = (),
        on_result: OnResult[Any] | None = None,
    ) -> Reply[Any]:
        lines = task if isinstance(task, InLines) else None
        task = lines.task if lines else task
        names, found = fake_results(task)
        results = [None if index in self.bad else one for index, one in enumerate(found)]
        self.asked, self.heads, self.ticket = as_task(task), heads, ticket
        self.reached.set()
        ticket.tokens = TOKENS
        if ticket.on_submit is not None:
            ticket.on_submit()
        for index, result in enumerate(results if on_result else ()):
            made = result is not None and lines is not None
            on_result(index, lines.line(index, result) if made else result)
            if index + 1 == self.tell_first:
                break
        try:
            if self.hold:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error:
            raise self.error
        usage = TokenUsage(tokens=TOKENS, windows=1, truncated=[])
        timing = Timing(0.001, 0.002, 0.003, 0.0005, 0.004, 8, 312)
        return Reply(
            (names,) if isinstance(names, str) else names, results, usage, timing, self.bad
        )

    async def run(self, work: Callable[[], Any], tokens: int, ticket: Ticket) -> Any:
        return work()

    def describe(self) -> dict[str, object]:
        return {"id": self.id, "precision": "int8"}


def as_task(task: EngineTask[Any]) -> Any:
    """Return the task whose fields a request has, or the task itself."""
    if not isinstance(task, Request):
        return task
    kind: Any = next(k for k in type(task).__mro__ if k.__module__.startswith("service.tasks"))
    return kind(**task.model_dump(include={*kind.model_fields}))


def fake_results(task: EngineTask[Any]) -> tuple[str | Heads, list[Any]]:
    """Return a head's name, or several, and the same result for each input of a task."""
    match task:
        case Classification():
            labels = [LabelScore("good", 0.75), LabelScore("bad", 0.25)][: task.top_k]
            return "sentiment", [labels] * len(task.inputs)
        case EntityRecognition():
            name = "B-LOC" if task.aggregation_strategy == "none" else "LOC"
            return "entities", [[EntitySpan(name, 0.5, "Oslo", 3, 7)]] * len(task.inputs)
        case QuestionAnswering():
            return "answers", [[AnswerSpan("six", 0.5, 4, 7)]] * len(task.questions)
        case MaskFilling():
            masks = [[TokenScore(7, "six", 0.5, "at six")]] * max(task.inputs[0].count("_"), 1)
            return "masks", [masks] * len(task.inputs)
        case Embedding():
            return "embeddings", [VECTOR] * len(task.inputs)
        case Similarity():
            return "embeddings", [VECTOR] * (len(task.inputs) + 1)
        case TokenEmbedding():
            return "tokens", [VECTORS] * len(task.inputs)
        case LateInteractionRanking():
            return "tokens", [VECTORS] * (len(task.documents) + 1)
        case SparseEmbedding():
            return "weights", [WEIGHTS] * len(task.inputs)
        case HybridRanking():
            found = {"embeddings": VECTOR, "tokens": VECTORS}
            return tuple(found), [found] * (len(task.rankings["embeddings"].inputs) + 1)
        case Reranking():
            return "relevance", [place / 4 for place in range(len(task.documents))]
        case ZeroShot():
            return "entailment", [[LabelScore("good", 0.75)]] * len(task.inputs)
        case Analysis():
            return "sentiment", [{"sentiment": [LabelScore("good", 0.75)]}] * len(task.inputs)
    raise AssertionError(f"no results for {task}")


class FakeEngines:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.ready = True
        self.closed = False
        self.told: Load | None = None
        self.expected = ["tiny@1", "other@1"]
        self.commands: list[Command] = []
        self.text_threads = TextThreads()

    def visible_to(self, models: tuple[str, ...]) -> "FakeEngines":
        return self

    def serves(self, model: str) -> bool:
        return model in ("tiny", self.engine.id)

    def get(self, model: str | None, unknown: str = "refuse") -> FakeEngine:
        if not (model is None or self.serves(model) or unknown == "default"):
            raise UnknownModel(f"no model {model!r} is served", param="model")
        return self.engine

    def all(self) -> list[FakeEngine]:
        return [self.engine]

    async def execute(self, command: Command) -> Mapping[str, Any]:
        self.commands.append(command)
        if self.engine.error:
            raise self.engine.error
        return {"did": command.name}

    def load(self) -> Load:
        return self.told or Load(problem="" if self.ready else "inference does not run")

    def loads(self) -> Mapping[str, Load]:
        return {"cpu": self.load()}

    def alive(self) -> bool:
        return self.ready

    @asynccontextmanager
    async def open(self, settings: Settings) -> AsyncIterator["FakeEngines"]:
        yield self
        self.closed = True


class FakeDriver:
    """NVIDIA's driver library, as ctypes loads it: one H100, unless its fields say otherwise.

    cuda: as `cuDriverGetVersion` gives it; failing: a function that returns an error
    """

    def __init__(self) -> None:
        self.name = b"NVIDIA H100"
        self.capability = (9, 0)
        self.memory = 80 * 2**30
        self.cuda = 13000
        self.count = 1
        self.failing = ""
        self.calls: Counter[str] = Counter()

    def __getattr__(self, function: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls[function] += 1
            if function == self.failing:
                return 999
            match function, arguments:
                case "cuDriverGetVersion", (number,):
                    number._obj.value = self.cuda
                case "cuDeviceGetCount", (number,):
                    number._obj.value = self.count
                case "cuDeviceGet", (number, 0):
                    number._obj.value = 7  # a handle
                case "cuDeviceGetName", (buffer, _, device) if device.value == 7:
                    buffer.value = self.name
                case "cuDeviceGetAttribute", (number, 75 | 76 as attribute, device) if (
                    device.value == 7
                ):
                    number._obj.value = self.capability[attribute - 75]
                case "cuDeviceTotalMem_v2", (number, device) if device.value == 7:
                    number._obj.value = self.memory
                case "cuGetErrorString", (999, text):
                    text._obj.value = b"what failed"
                case "cuInit", (0,):
                    pass
                case _:
                    raise AssertionError(f"{function}{arguments}")
            return 0

        return call


class Clock:
    """Time as the test sets it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    """Wait until a condition is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


def ticket(**fields: Any) -> Ticket:
    """Return the ticket of a request that has a minute."""
    return Ticket("a request", deadline=time.monotonic() + 60, **fields)
