"""One served bundle: text in, results out. Only this module combines encoding, batching and decoding.

Calls take and return plain values without HTTP types, so that any API can call them.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from service.core.bundle import EMBEDDING_FIELDS, BundleTexts, Head, Manifest, Task
from service.core.encode import Cut, Encoded, Encoder, TextError
from service.engines.device import Device, RunsOn
from service.engines.model_state import ServedModel
from service.engines.result_collector import (
    CompleteInput,
    Errors,
    OnResult,
    ResultCollector,
    windows,
)
from service.engines.task_plan import TaskPlan, characters
from service.errors import InvalidInput, TooLarge, UnknownHead
from service.scheduling.entries import Entry, EntryOutcome, Heads, Outcome
from service.scheduling.load import Flow
from service.scheduling.text_threads import LONG_CHARACTERS, TextThreads

T = TypeVar("T")
W = TypeVar("W")
C = TypeVar("C", bound=Cut)

STRIDE = 64  # tokens that neighboring windows share, unless the request sets `stride`
# A text thread encodes or decodes a request above these limits. A request that is cancelled or late while it waits for
# a text thread costs no computation.
INLINE_CHARACTERS = 4096
INLINE_TOKENS = 4096
# Per encoding call of a large request; limits the temporary memory of encoding.
PART_CHARACTERS = LONG_CHARACTERS
CHARACTERS_PER_TOKEN = 4  # the size of decoding in a text thread, in characters


@dataclass(frozen=True, slots=True)
class Ticket:
    """The attributes of a request, apart from its inputs."""

    request_id: str
    deadline: float  # when the client stops waiting, in seconds of `time.monotonic`
    priority: int = 0
    tenant: str = ""
    # Whether an input that fails gets an error of its own; otherwise it fails the whole request.
    isolate_errors: bool = False
    # Called with the number of characters before the engine encodes the inputs.
    on_encode: Callable[[int], object] | None = None
    # Called with the number of tokens when the engine submits the inputs to the device.
    on_submit: Callable[[int], object] | None = None
    place: str = "inputs[{}]"  # format of an input's index in error messages


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The size of an encoded request."""

    tokens: int  # of all windows, special tokens included
    windows: int
    truncated: list[int]  # indices of the inputs that lost text


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds by stage, and the size of the batch; each value is the maximum over the request's entries."""

    encode_s: float
    queue_s: float  # from the end of encoding until the batch began
    inference_s: float
    return_s: float  # from the end of the last batch until the engine had its outputs
    decode_s: float
    batch_size: int
    batch_tokens: int


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """The results of a request."""

    heads: Heads  # the names of the heads that computed it
    results: list[T | None]  # one for each input, None for an input that has an error
    usage: TokenUsage
    timing: Timing
    errors: Errors = field(default_factory=dict)


class EngineTask(Protocol[T]):
    """A task with its inputs and its options, which any engine can plan."""

    def plan(self, engine: "Engine", heads: Heads) -> TaskPlan[Any, T]:
        """Return the plan for an engine and heads, by default the task's. Raises UnknownHead and InvalidInput."""
        ...


# Called with a completed task, its ticket and its reply.
Copies = Callable[[EngineTask[Any], Ticket, Reply[Any]], None]


class Engine:
    """A served bundle that encodes requests for a device and decodes its outputs.

    text_threads: encode and decode the large requests of all engines
    model: the bundle's current serving state
    copies: receives each completed request, for mirrored traffic; None if the bundle has no mirrored traffic
    """

    def __init__(
        self,
        texts: BundleTexts,
        encoder: Encoder,
        model: ServedModel,
        device: Device,
        text_threads: TextThreads,
    ) -> None:
        self.manifest: Manifest = texts.manifest
        self.id = texts.manifest.id
        self.sha256 = texts.sha256
        self.encoder = encoder
        self.model = model
        self.copies: Copies | None = None
        self._device = device
        self._text_threads = text_threads
        self._users = 0
        self._unused = asyncio.Event()

    # -- for the plans of tasks -------------------------------------------------------------------

    def select_head(self, task: Task, wanted: Heads) -> tuple[str, Head]:
        """Return the wanted head, or the first head of the task if there is none. Raises UnknownHead."""
        of_task = {name: head for name, head in self.manifest.heads.items() if head.task == task}
        if not wanted and of_task:
            return next(iter(of_task.items()))
        name = wanted[0] if wanted else None
        if name not in of_task:
            what = f"no {task} head" + (f" {name!r}" if name else "")
            has = ", ".join(of_task) or "none"
            raise UnknownHead(f"{self.id} has {what}; of this task it has: {has}", param="head")
        return name, of_task[name]

    def check_stride(self, wanted: int | None) -> int:
        """Return the number of tokens that windows share. Raises InvalidInput for more than half a window."""
        longest = self.encoder.longest_stride
        if wanted is None:
            return min(STRIDE, longest)
        if wanted > longest:
            raise InvalidInput(f"{self.id} takes strides of at most {longest}", param="stride")
        return wanted

    # -- answers ----------------------------------------------------------------------------------

    async def answer(
        self,
        task: EngineTask[T],
        ticket: Ticket,
        heads: Heads = (),
        on_result: OnResult[T] | None = None,
    ) -> Reply[T]:
        """Encode the inputs of a task, submit their entries to the device, and decode the outputs.

        heads: the heads to compute; empty for the default of the task
        on_result: called with each result as soon as it is decoded
        Raises the errors of `EngineTask.plan`, and the first error of an input unless errors are isolated.
        """
        plan = task.plan(self, heads)
        began = time.perf_counter()
        encoded, errors = await self._encode(plan.encode, plan.sizes, ticket)
        encode_s = time.perf_counter() - began
        usage = _usage(encoded)
        submitted = time.monotonic()
        entries = self._entries(plan.heads, encoded, ticket, submitted)
        if ticket.on_submit is not None:
            ticket.on_submit(usage.tokens)
        collector = ResultCollector(
            encoded, entries, errors, ticket.isolate_errors, plan.decode, on_result
        )
        most = INLINE_TOKENS if plan.decodes_inline else 0
        if on_result is None:
            outcomes = await self._device.submit(entries)
            waited_s = time.monotonic() - submitted
            decode_all = partial(collector.add_all, entries, outcomes)
            await self.run(decode_all, usage.tokens, ticket, most)
        else:
            outcomes = await self._stream(entries, collector, ticket, most)
            waited_s = time.monotonic() - submitted - collector.decode_s
        timing = _timing(outcomes, encode_s, waited_s, collector.decode_s)
        reply = Reply(plan.heads, collector.results(), usage, timing, errors)
        if self.copies is not None and on_result is None:
            self.copies(task, ticket, reply)
        return reply

    async def tokenize(
        self, texts: Sequence[str], pairs: Sequence[str] | None, ticket: Ticket
    ) -> list[Encoded]:
        """Return the tokens of each text, or of each text with its pair, as one window without truncation."""

        def encode(part: slice) -> list[Encoded]:
            return self.encoder.whole(texts[part], None if pairs is None else pairs[part])

        sizes = characters(texts) if pairs is None else characters(texts, pairs)
        encoded, _ = await self._encode(encode, sizes, ticket)
        return [item for item in encoded if item is not None]

    async def detokenize(
        self, ids: Sequence[Sequence[int]], skip_special_tokens: bool, ticket: Ticket
    ) -> list[str]:
        """Return the text of each sequence of token ids."""
        tokenizer = self.encoder.tokenizer

        def decode_all() -> list[str]:
            return [tokenizer.decode(one, skip_special_tokens=skip_special_tokens) for one in ids]

        return await self.run(decode_all, sum(map(len, ids)), ticket)

    async def _stream(
        self, entries: Sequence[Entry], collector: ResultCollector[C, T], ticket: Ticket, most: int
    ) -> list[EntryOutcome]:
        """Submit entries, and decode each complete input, here if it has at most `most` tokens."""
        large: list[asyncio.Task[None]] = []

        async def decode_in_thread(complete: CompleteInput[C], began: float) -> None:
            decode = partial(collector.decode, complete)
            result = await self.run(decode, complete.item.tokens, ticket, most)
            collector.finish(complete, result, began)

        def on_outcome(entry: Entry, outcome: EntryOutcome) -> None:
            complete = collector.add(entry, outcome)
            if complete is None:
                return
            began = time.perf_counter()
            if complete.item.tokens > most:
                large.append(asyncio.create_task(decode_in_thread(complete, began)))
            else:
                collector.finish(complete, collector.decode(complete), began)

        try:
            outcomes = await self._device.submit(entries, on_outcome)
            await asyncio.gather(*large)
        finally:
            for task in large:
                task.cancel()
        return outcomes

    async def run(
        self, work: Callable[[], W], tokens: int, ticket: Ticket, most: int = INLINE_TOKENS
    ) -> W:
        """Run work on `tokens` tokens of a request, in a text thread if there are more than `most`."""
        if tokens <= most:
            return work()
        size = CHARACTERS_PER_TOKEN * tokens
        return await self._text_threads.run(self._flow(ticket), size, work)

    def _flow(self, ticket: Ticket) -> Flow:
        return Flow(self.id, ticket.priority, ticket.tenant)

    async def _encode(
        self, encode: Callable[[slice], Sequence[C]], sizes: Sequence[int], ticket: Ticket
    ) -> tuple[list[C | None], Errors]:
        """Encode inputs part by part, so that other requests can use the thread between two parts.

        Raises InvalidInput that names all inputs that cannot be encoded, unless errors are isolated. Raises TooLarge
        as soon as the encoded tokens exceed the limit of the queue. Raises Overloaded if other texts wait for the text
        threads and the expected completion is too late.

        sizes: characters of each input
        """
        encoded: list[C | None] = []
        errors: Errors = {}
        tokens, characters = 0, sum(sizes)

        # The annotations are quoted, because Python would compute them for each request.
        def add(own: "Sequence[C | None]", reasons: "Mapping[int, str]") -> None:
            nonlocal tokens
            encoded.extend(own)
            for index, reason in reasons.items():
                errors[index] = InvalidInput(reason, param=ticket.place.format(index))
            tokens += sum(item.tokens for item in own if item is not None)
            if tokens > self._device.max_queue_tokens:
                limit = f"max_queue_tokens, {self._device.max_queue_tokens}"
                raise TooLarge(f"at least {tokens} tokens exceed {limit}")

        if ticket.on_encode is not None:
            ticket.on_encode(characters)
        if characters <= INLINE_CHARACTERS:
            for part in _parts(sizes):
                add(*_encode_part(encode, part, ticket.isolate_errors))
        else:
            parts = [(part, sum(sizes[part])) for part in _parts(sizes)]
            self._check_in_time([size for _, size in parts], ticket)
            with self._text_threads.open(
                self._flow(ticket), [size for _, size in parts]
            ) as run_part:
                for part, size in parts:
                    work = partial(_encode_part, encode, part, ticket.isolate_errors)
                    add(*await run_part(size, work))
        if errors and not ticket.isolate_errors:
            first = next(iter(errors.values()))
            alike = [index for index, error in errors.items() if str(error) == str(first)]
            named = ", ".join(ticket.place.format(index) for index in alike)
            raise InvalidInput(f"{named}: {first.message}", param=first.param)
        return encoded, errors

    def _check_in_time(self, sizes: Sequence[int], ticket: Ticket) -> None:
        """Raise Overloaded if a request with parts of these characters waits for the text threads for too long."""
        flow = self._flow(ticket)
        encode_s = self._text_threads.wait_s(flow, sizes)
        if encode_s:
            left_s = ticket.deadline - time.monotonic()
            self._device.load().check_in_time(flow, 1, left_s, before_s=encode_s)

    def _entries(
        self, heads: Heads, encoded: Sequence[Cut | None], ticket: Ticket, arrival: float
    ) -> list[Entry]:
        return [
            Entry(
                bundle=self.id,
                window=window,
                request_id=ticket.request_id,
                arrival=arrival,
                deadline=ticket.deadline,
                priority=ticket.priority,
                tenant=ticket.tenant,
                heads=heads,
            )
            for item in encoded
            for window in windows(item)
        ]

    # -- lifecycle --------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Keep the engine open for one more request, until `release`."""
        self._users += 1
        self._unused.clear()

    def release(self) -> None:
        """Release the engine for one request that called `acquire`."""
        self._users -= 1
        if not self._users:
            self._unused.set()

    async def unused(self) -> None:
        """Wait until no request uses the engine."""
        if self._users:
            await self._unused.wait()

    def close(self) -> None:
        """Forget the measurements of the model's texts."""
        self._text_threads.forget(self.id)

    # -- description ------------------------------------------------------------------------------

    @property
    def runs_on(self) -> RunsOn:
        return self.model.runs_on

    @property
    def fingerprint(self) -> str:
        """Bundle hash, precision, provider and runtime, for a response header."""
        on = self.runs_on
        return f"{self.sha256[:12]};precision={on.precision};provider={on.provider};runtime={on.runtime}"

    def describe(self) -> dict[str, object]:
        """Return the model's description in the response of `GET /models`."""
        manifest, on = self.manifest, self.runs_on
        memory = on.stated_memory(manifest)
        return {
            "id": self.id,
            "name": manifest.name,
            "version": manifest.version,
            "state": self.model.state,
            "aliases": self.model.aliases,
            "heads": {name: self._describe_head(head) for name, head in manifest.heads.items()},
            "max_length": manifest.max_length,
            "precision": on.precision,
            "layout": on.layout,
            "provider": on.provider,
            "provider_note": on.provider_note,
            "runtime": on.runtime,
            "memory": memory.model_dump(mode="json") if memory else None,
            "sha256": self.sha256,
            "embedding_space": manifest.embedding_space,
            "metrics": manifest.metrics,
            "weights_license": manifest.weights_license,
            "commercial_use": manifest.provenance.commercial_use,
            "commercial_use_by_head": manifest.provenance.commercial_use_by_head(manifest.heads),
            "datasets": [data.model_dump(mode="json") for data in manifest.provenance.datasets],
        }

    def _describe_head(self, head: Head) -> dict[str, object]:
        described = _describe_head(head)
        if head.mask_token_id is not None:
            described["mask_token"] = self.encoder.tokenizer.id_to_token(head.mask_token_id)
        return described


def _describe_head(head: Head) -> dict[str, object]:
    """Return a head's fields. Embedding heads have more, but not their ranges, which are long."""
    if head.task != "embedding":
        return head.model_dump(mode="json", exclude_none=True, exclude={*EMBEDDING_FIELDS})
    described = head.model_dump(mode="json", exclude_none=True, exclude={"quantization_ranges"})
    return {**described, "prompts": head.named_prompts, "output_dtypes": head.output_dtypes}


def _parts(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield slices of consecutive inputs with at most `PART_CHARACTERS` together; a longer input has its own slice."""
    start = characters = 0
    for index, size in enumerate(sizes):
        if index > start and characters + size > PART_CHARACTERS:
            yield slice(start, index)
            start, characters = index, 0
        characters += size
    yield slice(start, len(sizes))


def _encode_part(
    encode: Callable[[slice], Sequence[C]], part: slice, isolate: bool
) -> tuple[list[C | None], dict[int, str]]:
    """Encode a slice of the inputs; return its items, and by index why an input cannot be encoded.

    isolate: such an input's item is None; otherwise there are no items
    """
    try:
        return [*encode(part)], {}
    except TextError as error:
        reasons = {part.start + index: error.reason for index in error.indices}
    encoded: list[C | None] = []
    start = part.start
    for index in [*sorted(reasons), part.stop] if isolate else []:
        if index > start:
            own, more = _encode_part(encode, slice(start, index), isolate)
            encoded += own
            reasons |= more
        if index < part.stop:
            encoded.append(None)
        start = index + 1
    return encoded, dict(sorted(reasons.items()))


def _usage(encoded: Sequence[Cut | None]) -> TokenUsage:
    tokens = count = 0
    truncated = []
    for index, item in enumerate(encoded):
        if item is not None:
            tokens += item.tokens
            count += len(item.windows)
            if item.truncated:
                truncated.append(index)
    return TokenUsage(tokens, count, truncated)


def _timing(
    outcomes: Sequence[EntryOutcome], encode_s: float, waited_s: float, decode_s: float
) -> Timing:
    """Return the timing of a request. waited_s: from its submission to its last outcome, without decoding"""
    queue_s = inference_s = computed_s = 0.0
    batch_size = batch_tokens = 0
    for outcome in outcomes:
        if isinstance(outcome, Outcome):
            queue_s = max(queue_s, outcome.queue_s)
            inference_s = max(inference_s, outcome.inference_s)
            computed_s = max(computed_s, outcome.queue_s + outcome.inference_s)
            batch_size = max(batch_size, outcome.batch_size)
            batch_tokens = max(batch_tokens, outcome.batch_tokens)
    return_s = max(0.0, waited_s - computed_s)
    return Timing(encode_s, queue_s, inference_s, return_s, decode_s, batch_size, batch_tokens)
