"""The live view: what the device does, ten times a second, while clients watch.

A frame contains lengths, classes, heads, durations and error codes. It contains no text, request id or tenant.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import orjson

from service.errors import Overloaded
from service.keys import CLASSES
from service.scheduling.executor import BatchStats
from service.scheduling.load import Load

FRAME_S = 0.1  # between two frames
IDLE_S = 1.0  # between two frames in which nothing happened
RECENT_S = 10.0  # of the answers whose latency is shown
ANSWERS = 2048  # of each class, at most
BATCHES = 4  # of a frame that are shown one by one
TEXTS = 64  # of a batch whose lengths are shown
VIEWERS = 8

Send = Callable[[bytes], None]


class LiveView:
    """Collects what happens while there are viewers, and sends the same frames to all of them."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load
        self._viewers: list[Send] = []
        self._sending: asyncio.Task[None] | None = None
        self._clear()

    @property
    def watched(self) -> bool:
        return bool(self._viewers)

    async def watch(self, send: Send) -> None:
        """Call `send` with each frame, in JSON, until cancelled. Raises Overloaded if there are too many viewers."""
        if len(self._viewers) >= VIEWERS:
            raise Overloaded(f"{VIEWERS} clients watch the live view already, which is the limit")
        self._viewers.append(send)
        if self._sending is None:
            self._clear()
            self._sending = asyncio.create_task(self._send_frames())
        try:
            await asyncio.shield(self._sending)
        finally:
            self._viewers.remove(send)
            if not self._viewers and self._sending is not None:
                self._sending.cancel()
                self._sending = None

    def add_batch(self, stats: BatchStats, padded: bool) -> None:
        """Add a batch. padded: whether the graph computes padding like tokens"""
        saved = 0 if padded else stats.slots - stats.tokens
        self._ran.update(
            batches=1, texts=stats.size, tokens=stats.tokens, slots=stats.slots, saved=saved
        )
        if len(self._batches) < BATCHES:
            self._batches.append(show(stats, padded))

    def add_answer(self, priority: int, seconds: float) -> None:
        self._answers[priority].append((time.monotonic(), seconds))

    def add_refusal(self, code: str) -> None:
        self._refused[code] += 1

    def _clear(self) -> None:
        self._answers: list[deque[tuple[float, float]]] = [deque(maxlen=ANSWERS) for _ in CLASSES]
        self._begin(time.monotonic())

    def _begin(self, now: float) -> None:
        """Begin the next frame."""
        self._began = now
        self._batches: list[Mapping[str, object]] = []
        self._ran: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    async def _send_frames(self) -> None:
        latency: Mapping[str, object] = {}
        measured = 0.0
        while True:
            now = time.monotonic()
            is_due = now - measured >= IDLE_S
            if is_due:  # sorting takes longest
                latency, measured = self._latency(now), now
            if is_due or self._ran or self._refused:
                frame = orjson.dumps(self._frame(now, latency))
                self._begin(now)
                for send in [*self._viewers]:
                    send(frame)
            await asyncio.sleep(FRAME_S)

    def _frame(self, now: float, latency: Mapping[str, object]) -> Mapping[str, object]:
        load = self._load()
        queue = {name: {"requests": 0, "tokens": 0} for name in CLASSES}
        for flow, backlog in load.waiting.items():
            own = queue[CLASSES[flow.priority]]
            own["requests"] += backlog.requests.total()
            own["tokens"] += backlog.tokens
        return {
            "seconds": now - self._began,
            "batches": self._batches,
            "ran": self._ran,
            "queue": queue,
            "queue_seconds": load.drain_s,
            "latency": latency,
            "refused": self._refused,
        }

    def _latency(self, now: float) -> Mapping[str, object]:
        """Return number, p50 and p99 of the recent answers of each class."""
        found: dict[str, object] = {}
        for name, answers in zip(CLASSES, self._answers, strict=True):
            while answers and answers[0][0] < now - RECENT_S:
                answers.popleft()
            if seconds := sorted(taken for _, taken in answers):
                p50, p99 = (seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.99))
                found[name] = {"number": len(seconds), "p50": p50, "p99": p99}
        return found


def show(stats: BatchStats, padded: bool) -> Mapping[str, object]:
    """Return a batch as a frame contains it. Texts of one request have the same number in `requests`."""
    numbers: dict[int, int] = {}
    texts = [
        (entry, length)
        for entry in stats.batch
        for length in entry.window.lengths or [entry.tokens]
    ]
    return {
        "model": stats.bundle,
        "seconds": stats.inference_s,
        "size": stats.size,
        "tokens": stats.tokens,
        "slots": stats.slots,
        "padded": padded,
        "lengths": [length for _, length in texts[:TEXTS]],
        "requests": [
            numbers.setdefault(id(entry.request), len(numbers)) for entry, _ in texts[:TEXTS]
        ],
        "heads": Counter(" + ".join(entry.heads) or "all" for entry, _ in texts),
        "bulk": sum(entry.priority > 0 for entry, _ in texts),
    }
