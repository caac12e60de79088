"""One served bundle: text in, results out. Only this module combines encoding, batching and decoding.

Calls take and return plain values without HTTP types, so that any API can call them.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from service.core.bundle import BundleTexts
from service.core.cpu import CPU
from service.core.encode import Cut, Encoded, Encoder, TextError, Window, is_panic
from service.core.manifest import ATTENTION, EMBEDDING_FIELDS, Head, Manifest, Task
from service.core.packing import join
from service.core.state_heads import output_name
from service.engines.device import Device, RunsOn
from service.engines.model_state import ServedModel
from service.engines.result_collector import (
    CompleteInput,
    Decode,
    Errors,
    OnResult,
    ResultCollector,
    windows,
)
from service.engines.task_plan import CHARACTER_BYTES, SCORED_BYTES, Limits, TaskPlan, characters
from service.errors import InferenceFailed, InvalidInput, TooLarge, UnknownHead
from service.scheduling.entries import Entry, EntryOutcome, Heads, Outcome, Outputs
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
BYTES_PER_TOKEN = 256  # the size of writing results in JSON, in tokens
LARGE_BYTES = BYTES_PER_TOKEN * INLINE_TOKENS  # of results that a text thread writes
CHARACTERS_PER_TOKEN = 4  # the size of decoding in a text thread, in characters


@dataclass(slots=True)
class Ticket:
    """The attributes of a request, apart from its inputs, and their size, which the engine fills in."""

    request_id: str
    deadline: float  # when the client stops waiting, in seconds of `time.monotonic`
    priority: int = 0
    tenant: str = ""
    # Whether an input that fails gets an error of its own; otherwise it fails the whole request.
    isolate_errors: bool = False
    # Called when the engine submits the inputs to the device.
    on_submit: Callable[[], object] | None = None
    place: str = "inputs[{}]"  # format of an input's index in error messages
    characters: int = 0  # of the inputs, before the engine encodes them
    tokens: int = 0  # of the inputs that the engine submits to the device


@dataclass(slots=True)
class TokenUsage:
    """The size of an encoded request."""

    tokens: int  # of all windows, special tokens included
    windows: int
    truncated: list[int]  # indices of the inputs that lost text


@dataclass(slots=True)
class Timing:
    """Seconds by stage, and the size of the batch; each value is the maximum over the request's entries."""

    encode_s: float
    queue_s: float  # from the end of encoding until the batch began
    inference_s: float
    return_s: float  # from the end of the last batch until the engine had its outputs
    decode_s: float
    batch_size: int
    batch_tokens: int


@dataclass(slots=True)
class Reply(Generic[T]):
    """The results of a request."""

    heads: Heads  # the names of the heads that computed it
    results: list[T | None]  # one for each input, None for an input that has an error
    usage: TokenUsage
    timing: Timing
    errors: Errors = field(default_factory=dict)
    answer_bytes: int = 0  # the largest size of the results in JSON


@dataclass(slots=True)
class EncodedRequest(Generic[C]):
    """The inputs of a request, encoded."""

    items: list[C | None] = field(default_factory=list)  # None for an input that has an error
    errors: Errors = field(default_factory=dict)
    tokens: int = 0
    answer_bytes: int = 0  # the largest size of the results in JSON


class EngineTask(Protocol[T]):
    """A task with its inputs and its options, which any engine can plan."""

    def plan(self, engine: "Engine", heads: Heads) -> TaskPlan[Any, T]:
        """Return the plan for an engine and heads, by default the task's. Raises UnknownHead and InvalidInput."""
        ...


# Called with a completed task, its ticket and its reply.
Copies = Callable[[EngineTask[Any], Ticket, Reply[Any]], None]


class InlineTokens:
    """The tokens that the event loop decodes in one turn, in which many small results may arrive."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, tokens: int) -> bool:
        """Return whether the event loop may decode this many tokens now."""
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._renew)
        self._taken += tokens
        return self._taken <= INLINE_TOKENS

    def _renew(self) -> None:
        self._taken = 0


class Engine:
    """A served bundle that encodes requests for a device and decodes its outputs.

    text_threads: encode and decode the large requests of all engines
    limits: of each request
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
        limits: Limits,
    ) -> None:
        self.limits = limits
        self.manifest: Manifest = texts.manifest
        self.id = texts.manifest.id
        self.sha256 = texts.sha256
        shared = texts.manifest.encoder
        # The bundle that computes, and the beginning of the names of its outputs for the heads of this one.
        self.computed_by, self._prefix = (
            (shared.id, output_name(self.id, "")) if shared else (self.id, "")
        )
        self.encoder = encoder
        self.model = model
        self.copies: Copies | None = None
        self._device = device
        self._text_threads = text_threads
        self._inline = InlineTokens()
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

    def check_prompt(self, prompt: str, param: str) -> None:
        """Raise InvalidInput for a prompt that is too long for each window of a long text. param: its field"""
        tokens, most = self.encoder.count_tokens(prompt), self.encoder.longest_prompt
        if tokens > most:
            reason = f'the prompt has {tokens} tokens; with truncate "window" it may have {most}'
            raise InvalidInput(reason, param=param)

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
        encoded = await self._encode(plan, ticket)
        encode_s = time.perf_counter() - began
        items, errors = encoded.items, encoded.errors
        usage = _usage(items)
        submitted = time.monotonic()
        inputs = self._entries(plan.heads, items, ticket, submitted)
        entries = [*inputs]
        ticket.tokens = usage.tokens
        if ticket.on_submit is not None:
            ticket.on_submit()
        decode = plan.decode if plan.result_bytes is None else self._count(plan, encoded)
        if self._prefix:
            decode = _with_own_names(decode, self._prefix)
        rows = None if self._prefix or plan.result_bytes else plan.decode_rows
        collector = ResultCollector(
            items, inputs, errors, ticket.isolate_errors, decode, rows, on_result
        )
        if on_result is None:
            outcomes = await self._device.submit(entries)
            waited_s = time.monotonic() - submitted
            decode_all = partial(collector.add_all, entries, outcomes)
            size = max(usage.tokens, ticket.characters // CHARACTERS_PER_TOKEN)
            size = max(size, encoded.answer_bytes // BYTES_PER_TOKEN)
            await self.run(decode_all, size, ticket, INLINE_TOKENS if plan.decodes_inline else 0)
        else:
            outcomes = await self._stream(plan, entries, collector, ticket)
            waited_s = time.monotonic() - submitted - collector.decode_s
        timing = _timing(outcomes, encode_s, waited_s, collector.decode_s)
        results = collector.results()
        reply = Reply(plan.heads, results, usage, timing, errors, encoded.answer_bytes)
        if self.copies is not None and on_result is None:
            self.copies(task, ticket, reply)
        return reply

    def _count(self, plan: TaskPlan[C, T], encoded: EncodedRequest[C]) -> Decode[C, T]:
        """Return the plan's `decode`, which also counts the size of the results. It raises TooLarge above the limit."""

        def decode(index: int, item: C, outputs: list[Outputs]) -> T:
            result = plan.decode(index, item, outputs)
            if plan.result_bytes is not None:
                encoded.answer_bytes += plan.result_bytes(result)
                self.limits.check_response(encoded.answer_bytes)
            return result

        return decode

    async def tokenize(
        self, texts: Sequence[str], pairs: Sequence[str] | None, ticket: Ticket
    ) -> list[Encoded]:
        """Return the tokens of each text, or of each text with its pair, as one window without truncation."""

        def encode(part: slice) -> list[Encoded]:
            return self.encoder.whole(texts[part], None if pairs is None else pairs[part])

        sizes = characters(texts) if pairs is None else characters(texts, pairs)

        def answer_bytes(index: int, item: Encoded) -> int:
            return CHARACTER_BYTES * sizes[index] + SCORED_BYTES * item.tokens

        plan = TaskPlan((), sizes, encode, lambda _, item, __: item, answer_bytes)
        encoded = await self._encode(plan, ticket)
        return [item for item in encoded.items if item is not None]

    async def detokenize(
        self, ids: Sequence[Sequence[int]], skip_special_tokens: bool, ticket: Ticket
    ) -> list[str]:
        """Return the text of each sequence of token ids. Raises TooLarge for texts above the limit of a response."""
        tokenizer = self.encoder.tokenizer

        def decode_all() -> list[str]:
            texts, size = [], 0
            for one in ids:
                # Unlike `decode`, this does not hold the interpreter's lock.
                texts += tokenizer.decode_batch([one], skip_special_tokens=skip_special_tokens)
                size += len(texts[-1].encode())
                self.limits.check_response(size)
            return texts

        return await self.run(decode_all, sum(map(len, ids)), ticket)

    async def _stream(
        self,
        plan: TaskPlan[C, T],
        entries: Sequence[Entry],
        collector: ResultCollector[C, T],
        ticket: Ticket,
    ) -> list[EntryOutcome]:
        """Submit entries, and decode each input as soon as its last outcome arrives."""
        large: list[asyncio.Task[None]] = []

        async def decode_in_thread(complete: CompleteInput[C], size: int, began: float) -> None:
            decode = partial(collector.decode, complete)
            result = await self.run(decode, size, ticket, 0)
            collector.finish(complete, result, began)

        def on_outcome(entry: Entry, outcome: EntryOutcome) -> None:
            for complete in collector.add(entry, outcome):
                began = time.perf_counter()
                own = plan.sizes[complete.place] // CHARACTERS_PER_TOKEN
                size = max(complete.item.tokens, own, 1)
                if plan.decodes_inline:
                    written = plan.answer_bytes(complete.place, complete.item)
                    size = max(size, written // BYTES_PER_TOKEN)
                if not (plan.decodes_inline and self._inline.take(size)):
                    large.append(asyncio.create_task(decode_in_thread(complete, size, began)))
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
            return _without_panic(work)
        size = CHARACTERS_PER_TOKEN * tokens
        return await self._text_threads.run(self._flow(ticket), size, partial(_without_panic, work))

    def _flow(self, ticket: Ticket) -> Flow:
        return Flow(self.computed_by, ticket.priority, ticket.tenant)

    async def _encode(self, plan: TaskPlan[C, Any], ticket: Ticket) -> EncodedRequest[C]:
        """Encode inputs part by part, so that other requests can use the thread between two parts.

        Raises TooLarge for a request that costs more than the limits allow, and as soon as the encoded tokens exceed
        the limit of the queue, or the results the limit of a response. Raises InvalidInput that names all inputs that
        cannot be encoded, unless errors are isolated. Raises Overloaded if other texts wait for the text threads and
        the expected completion is too late.
        """
        self.limits.check(plan)
        encoded: EncodedRequest[C] = EncodedRequest()
        parts = [
            (size, partial(_without_panic, work))
            for size, work in _work(plan, ticket.isolate_errors)
        ]

        # The annotation is quoted, because Python would compute it for each request.
        def add(own: "EncodedPart[C] | None") -> None:
            if own is None:
                return
            encoded.items.extend(own.items)
            for index, reason in own.reasons.items():
                encoded.errors[index] = InvalidInput(reason, param=ticket.place.format(index))
            encoded.tokens += sum(item.tokens for item in own.items if item is not None)
            if encoded.tokens > self._device.max_queue_tokens:
                limit = f"max_queue_tokens, {self._device.max_queue_tokens}"
                raise TooLarge(f"at least {encoded.tokens} tokens exceed {limit}")
            encoded.answer_bytes += own.answer_bytes
            self.limits.check_response(encoded.answer_bytes)

        ticket.characters = plan.characters
        if ticket.characters <= INLINE_CHARACTERS:
            for _, work in parts:
                add(work())
        else:
            sizes = [size for size, _ in parts]
            self._check_in_time(sizes, ticket)
            with self._text_threads.open(self._flow(ticket), sizes) as run_part:
                for size, work in parts:
                    add(await run_part(size, work))
        errors = encoded.errors
        if errors and not ticket.isolate_errors:
            first = next(iter(errors.values()))
            alike = [index for index, error in errors.items() if str(error) == str(first)]
            named = ", ".join(ticket.place.format(index) for index in alike)
            raise InvalidInput(f"{named}: {first.message}", param=first.param)
        return encoded

    def _check_in_time(self, sizes: Sequence[int], ticket: Ticket) -> None:
        """Raise Overloaded if a request with parts of these characters waits for the text threads for too long."""
        flow = self._flow(ticket)
        encode_s = self._text_threads.wait_s(flow, sizes)
        if encode_s:
            left_s = ticket.deadline - time.monotonic()
            self._device.load().check_in_time(flow, 1, left_s, before_s=encode_s)

    def _entries(
        self, heads: Heads, encoded: Sequence[Cut | None], ticket: Ticket, arrival: float
    ) -> dict[Entry, Sequence[int]]:
        """Return the entries of a request, each with the indices of its inputs."""
        own_heads = tuple(self._prefix + head for head in heads) if self._prefix else heads

        def entry(window: Window) -> Entry:
            return Entry(
                bundle=self.computed_by,
                window=window,
                request_id=ticket.request_id,
                arrival=arrival,
                deadline=ticket.deadline,
                priority=ticket.priority,
                tenant=ticket.tenant,
                heads=own_heads,
            )

        entries: dict[Entry, Sequence[int]] = {}
        together: set[int] = set()
        for group in self._group(heads, encoded):
            together.update(group)
            entries[entry(join([windows(encoded[index])[0] for index in group]))] = group
        for index, item in enumerate(encoded):
            if index not in together:
                entries |= {entry(window): (index,) for window in windows(item)}
        return entries

    def _group(self, heads: Heads, encoded: Sequence[Cut | None]) -> list[list[int]]:
        """Return the inputs of each entry of several: of similar lengths, and short for the device's speed."""
        if len(encoded) < 2 or self._prefix or self.runs_on.layout == "alone":
            return []
        if ATTENTION in heads or not all(self.manifest.heads[name].per_sequence for name in heads):
            return []
        sizes = [
            (item.tokens, index)
            for index, item in enumerate(encoded)
            if item is not None and len(item.windows) == 1
        ]
        load = self._device.load()
        # Every slot gets an entry.
        part = -(-sum(size for size, _ in sizes) // load.slots)
        most = min(load.entry_tokens(self.computed_by), part)
        groups: list[list[int]] = []
        tokens = most
        for size, index in sorted(sizes):
            if tokens + size <= most and len(groups[-1]) < load.entry_size:
                tokens += size
                groups[-1].append(index)
            else:
                tokens = size
                groups.append([index])
        return [group for group in groups if len(group) > 1]

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
        if not self._prefix:
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

    @property
    def faster(self) -> dict[str, str]:
        """The setting with which the bundle computes faster on this device, for the log; empty if there is none."""
        is_slow = self.runs_on.provider == CPU.provider and self.runs_on.precision != "int8"
        return (
            {"faster": "precision=int8"} if is_slow and "int8" in self.manifest.precisions else {}
        )

    def describe(self) -> dict[str, object]:
        """Return the model's description in the response of `GET /models`."""
        manifest, on = self.manifest, self.runs_on
        memory = on.stated_memory(manifest)
        return {
            "id": self.id,
            "name": manifest.name,
            "version": manifest.version,
            "encoder": manifest.encoder.id if manifest.encoder else None,
            "state": self.model.shown_state,
            "aliases": self.model.aliases,
            "heads": {name: self._describe_head(head) for name, head in manifest.heads.items()},
            "max_length": manifest.max_length,
            "attention_layers": manifest.attention.layers if manifest.attention else None,
            "precision": on.precision,
            "layout": on.layout,
            "provider": on.provider,
            "provider_note": on.provider_note,
            "runtime": on.runtime,
            "memory": memory.model_dump(mode="json") if memory else None,
            "reserved": self.model.reserved or None,
            "problem": self.model.problem or None,
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


class EncodedPart(NamedTuple, Generic[C]):
    """A slice of the inputs, encoded."""

    # None for an input that cannot be encoded; empty if there is one and errors are not isolated.
    items: list[C | None]
    reasons: dict[int, str]  # why inputs cannot be encoded, by index
    answer_bytes: int


def _work(
    plan: TaskPlan[C, Any], isolate: bool
) -> list[tuple[int, Callable[[], EncodedPart[C] | None]]]:
    """Return the work of encoding a request in parts, each with its characters. Shared texts come first."""
    parts: list[tuple[int, Callable[[], EncodedPart[C] | None]]] = []
    if plan.shared is not None:
        sizes = plan.shared.sizes
        parts += [(sum(sizes[own]), partial(plan.shared.add, own)) for own in _parts(sizes)]
    parts += [
        (sum(plan.sizes[own]), partial(_encode_part, plan, own, isolate))
        for own in _parts(plan.sizes)
    ]
    return parts


def _without_panic(work: Callable[[], W]) -> W:
    """Return the result of work on texts. Raises InferenceFailed where the tokenizer's Rust code panics."""
    try:
        return work()
    except BaseException as error:
        if not is_panic(error):
            raise
        message = f"the tokenizer of the model fails on a text: {error}"
        raise InferenceFailed(message) from None


def _encode_part(plan: TaskPlan[C, Any], part: slice, isolate: bool) -> EncodedPart[C]:
    """Encode a slice of the inputs. isolate: whether the other inputs are encoded if one cannot be"""
    try:
        items = plan.encode(part)
    except TextError as error:
        reasons = {part.start + index: error.reason for index in error.indices}
    else:
        size = sum(plan.answer_bytes(part.start + index, item) for index, item in enumerate(items))
        return EncodedPart([*items], {}, size)
    encoded: list[C | None] = []
    size, start = 0, part.start
    for index in [*sorted(reasons), part.stop] if isolate else []:
        if index > start:
            own = _encode_part(plan, slice(start, index), isolate)
            encoded += own.items
            reasons |= own.reasons
            size += own.answer_bytes
        if index < part.stop:
            encoded.append(None)
        start = index + 1
    return EncodedPart(encoded, dict(sorted(reasons.items())), size)


def _with_own_names(decode: Decode[C, T], prefix: str) -> Decode[C, T]:
    """Return a plan's `decode` that gets outputs whose names begin with a prefix."""

    def decode_own(index: int, item: C, outputs: list[Outputs]) -> T:
        own = [{n.removeprefix(prefix): rows for n, rows in each.items()} for each in outputs]
        return decode(index, item, [*own])

    return decode_own


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
