"""Messages between our own processes, over a stream socket: a small header in JSON, and arrays as they are in memory.

    frame = length of header, length of arrays (u32 each, little-endian), [kind, fields], the arrays' bytes

Both ends are the same version on the same machine, so nothing here is versioned or swapped.
"""

import asyncio
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

import orjson
from numpy.typing import NDArray

from service.core.bundle import BundleTexts, Manifest
from service.engines.commands import COMMANDS, Command
from service.engines.device import RunsOn
from service.engines.model_state import Models, ServedModel
from service.scheduling.load import Backlog, Flow, Load

LENGTHS = struct.Struct("<II")


# -- from an HTTP process to the inference process --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Compute the entries of one request; arrays: all `input_ids`, then all `token_type_ids`, int64.

    each: send each entry's outcome as soon as it is computed, instead of all together
    The other fields are those of `Entry`.
    """

    id: int
    bundle: str
    head: str
    lengths: list[int]
    request_id: str
    arrival: float
    deadline: float
    priority: int
    tenant: str
    each: bool
    unbatched: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this request any more."""

    id: int


@dataclass(frozen=True, slots=True)
class Observed:
    """Calls of the metrics' methods in an HTTP process, in their order: the method's name and its arguments.

    lost_lines: log lines that the process has lost since it sent the message before
    """

    calls: list[tuple[str, Sequence[Any]]]
    lost_lines: int = 0


@dataclass(frozen=True, slots=True)
class Render:
    """Send the metrics' page, with what can be asked for by route: whether it is asked of a model."""

    id: int
    routes: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute a command of `service.engines.commands`: its name and its fields."""

    id: int
    name: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, number: int, command: Command) -> "Execute":
        return cls(number, command.name, asdict(command))

    @property
    def command(self) -> Command:
        return COMMANDS[self.name](**self.fields)


@dataclass(frozen=True, slots=True)
class Adopted:
    """New requests go where this catalogue says, unless there is a problem: then they go where they went before."""

    number: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Released:
    """No request is with a bundle any more that was in a catalogue before, and is no longer."""

    model: str


# -- from the inference process to an HTTP process --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What is served from now on, and the texts of what is new in it.

    models: as `service.engines.model_state` has them; texts: id, sha256, manifest and size of the tokenizer of each
    bundle; arrays: the tokenizers, one after the other
    """

    number: int
    models: list[Any]
    texts: list[tuple[str, str, Any, int]]

    @classmethod
    def of(
        cls, number: int, models: Models, texts: Sequence[BundleTexts]
    ) -> tuple["Catalogue", bytes]:
        """The message, and its arrays."""
        told = [
            (own.manifest.id, own.sha256, own.manifest.model_dump(mode="json"), len(own.tokenizer))
            for own in texts
        ]
        return cls(number, [*models], told), b"".join(own.tokenizer for own in texts)

    @property
    def served(self) -> Models:
        return tuple(
            ServedModel(**{**model, "runs_on": RunsOn(**model["runs_on"])}) for model in self.models
        )

    def read(self, arrays: bytes) -> dict[str, BundleTexts]:
        """The texts, by id."""
        found: dict[str, BundleTexts] = {}
        start = 0
        for name, sha256, manifest, size in self.texts:
            tokenizer = arrays[start : start + size]
            found[name] = BundleTexts(Manifest.model_validate(manifest), sha256, tokenizer)
            start += size
        return found


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The device's load, every so often, which the requests up to `seen` are part of.

    waiting: each flow, with the bits, number and tokens of its requests
    """

    seen: int
    rates: dict[str, float]
    waiting: list[tuple[tuple[str, int, str], list[tuple[int, int, int]]]]
    problem: str
    max_queue_tokens: int

    @classmethod
    def of(cls, load: Load, seen: int) -> "LoadReport":
        waiting = [
            (
                (flow.bundle, flow.priority, flow.tenant),
                [(bits, n, backlog.sizes[bits]) for bits, n in backlog.requests.items() if n],
            )
            for flow, backlog in load.waiting.items()
        ]
        return cls(seen, dict(load.rates), waiting, load.problem, load.max_queue_tokens)

    @property
    def load(self) -> Load:
        waiting = {
            Flow(*flow): Backlog(
                Counter({bits: requests for bits, requests, _ in sizes}),
                Counter({bits: tokens for bits, _, tokens in sizes}),
            )
            for flow, sizes in self.waiting
        }
        return Load(self.rates, waiting, self.problem, self.max_queue_tokens)


@dataclass(frozen=True, slots=True)
class Computed:
    """Entries of a request by their places in it; arrays: their outputs, float32, one after the other.

    facts: queue_s, inference_s, batch_size, batch_tokens, padding_ratio of each
    failed: place, code and message of each entry that failed
    """

    id: int
    places: list[int]
    shapes: list[list[int]]
    facts: list[tuple[float, float, int, int, float]]
    failed: list[tuple[int, str, str]]


@dataclass(frozen=True, slots=True)
class Failed:
    """The whole request failed with an error of the tree."""

    id: int
    code: str
    message: str
    param: str | None
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics' page; arrays: its bytes."""

    id: int


@dataclass(frozen=True, slots=True)
class Executed:
    """The result of a command."""

    id: int
    answer: dict[str, Any]


Message = (
    Submit
    | Cancel
    | Observed
    | Render
    | Execute
    | Adopted
    | Released
    | Catalogue
    | LoadReport
    | Computed
    | Failed
    | Page
    | Executed
)
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def frame(message: Message, *arrays: NDArray[Any] | bytes) -> bytes:
    header = orjson.dumps([type(message).__name__, message])
    body = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in arrays)
    return LENGTHS.pack(len(header), len(body)) + header + body


class Channel(asyncio.Protocol):
    """One end of a socket: `received(message, arrays)` for each message, `lost()` once, when the other end is gone.

    broken: whether what came could not be received, by a bug of ours; the socket is closed then
    """

    def __init__(
        self, received: Callable[[Message, bytes], None], lost: Callable[[], None]
    ) -> None:
        self._received = received
        self._lost = lost
        self.broken = False
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no such class

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Message, *arrays: NDArray[Any] | bytes) -> None:
        """What one turn of the event loop says is sent at once: to wake the other end costs more than to read it.

        What is sent to an end that is gone is dropped: `lost` has been called, or will be.
        """
        if not self.open:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame(message, *arrays))

    def _flush(self) -> None:
        if self._unsent and self._transport is not None and self.open:
            self._transport.writelines(self._unsent)
        self._unsent = []

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self._receive(data)
        except Exception:
            self.broken = True
            raise  # to the event loop, which tells of it and closes

    def _receive(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= LENGTHS.size:
            header, body = LENGTHS.unpack_from(self._buffer, start)
            middle = start + LENGTHS.size + header
            if len(self._buffer) < middle + body:
                break
            kind, fields = orjson.loads(self._buffer[start + LENGTHS.size : middle])
            start = middle + body
            self._received(KINDS[kind](**fields), bytes(self._buffer[middle:start]))
        del self._buffer[:start]

    def connection_lost(self, _: Exception | None) -> None:
        self._lost()
