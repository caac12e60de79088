"""The device of this process: the bundles' sessions, and the batcher that they share."""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import structlog

from service import liveness
from service.core.bundle import Bundle, BundleError, BundleTexts, check_goldens, read_texts
from service.core.cpu import CPU
from service.core.device_kind import DeviceKind, Slots
from service.core.encode import Window
from service.core.goldens import Golden
from service.core.manifest import ATTENTION, Manifest
from service.core.packing import (
    SLOT_MULTIPLE,
    count_masks,
    fill_rows,
    golden_windows,
    pack,
    row_starts,
    split,
)
from service.core.session import (
    RUNTIME,
    RUNTIME_ERRORS,
    Attend,
    Session,
    SessionOptions,
    TimeLimit,
    keep_freed_memory,
    open_attention,
    open_session,
    trim,
    usable_kinds,
)
from service.core.state_heads import (
    Floats,
    StateHead,
    StateOutputs,
    graph_outputs,
    output_name,
    read_heads,
)
from service.engines.device import RunsOn
from service.engines.memory_need import fit_memory, on_demand_folders
from service.engines.proofs import Proof
from service.engines.self_test import SelfTest, SelfTests, smallest
from service.errors import QuartetError
from service.liveness import StallClock, hang_limit_s
from service.observability.logs import LogLimiter
from service.observability.metrics import Metrics
from service.scheduling.batcher import Batcher
from service.scheduling.cost_model import Estimator, Sample, measure, time_run
from service.scheduling.entries import Entry, Heads, Outputs
from service.scheduling.executor import BatchStats
from service.scheduling.load import MAX_QUEUE_TOKENS, Load
from service.settings import Settings, usable_cores

log = structlog.get_logger()

WARM_UP_S = 0.3
MASKED_LENGTH = 64  # tokens of the input that measures the cost of mask tokens
QUEUE_S = 3.0  # seconds of a GPU's work that may wait, where `max_queue_tokens` is unset
# Upper limit of that queue in tokens. A token takes about 50 bytes in all processes together.
QUEUE_MOST = 2**23
SCORES = 64  # numbers that attention stores for each pair of slots: 16 heads, 4 arrays


class Runner:
    """The sessions of one bundle, by the number of slots that a run takes.

    shared: the heads of other bundles that read this one's hidden states, by the names of their outputs
    attend: computes the attention weights of a window; None for a bundle without an attention graph
    """

    def __init__(
        self, bundle: Bundle, sessions: Mapping[int, Session], attend: Attend | None = None
    ) -> None:
        self._attend = attend
        self._bundle = bundle
        self._sessions = sessions
        self._heads = bundle.manifest.heads
        self._states = bundle.manifest.states
        self._golden_states: tuple[bytes, list[Floats]] = (b"", [])
        self.shared: Mapping[str, StateHead] = {}  # replaced whole, because threads read it

    def run(self, width: int, windows: Sequence[Window], heads: Heads = ()) -> list[Outputs]:
        """Compute the outputs of these heads, or of all own heads if empty, for each window, on `width` slots."""
        if self._attend is not None and heads == (ATTENTION,):
            return [{ATTENTION: self._attend(window)} for window in windows]
        packed = pack(windows)
        wanted = heads if self._states is None else graph_outputs(heads, self._states)
        outputs = self._sessions[width].run(packed, wanted)
        computed = {name: self._heads[name] for name in outputs}
        rows = split(outputs, windows, row_starts(packed, computed))
        states, shared = self._states, self.shared
        if states is None or states not in outputs or not shared:
            return [*rows]
        return [StateOutputs(own, states, shared) for own in rows]

    def check_heads(self, bundle: Bundle) -> dict[str, StateHead]:
        """Read the heads of a bundle for the states of this one, and check their goldens. Raises BundleError."""
        if self._states is None:
            reason = f"the graphs of its encoder {self._bundle.manifest.id} give no hidden states: export it"
            raise BundleError(bundle.path, f"{reason} with --states")
        heads = read_heads(bundle, self._heads[self._states].width)
        session = self._sessions[1]
        precision = session.graph.precision
        if precision not in bundle.manifest.goldens.tolerance:
            has = ", ".join(bundle.manifest.precisions)
            reason = f"its encoder computes {precision}, and it has goldens for {has} only"
            raise BundleError(bundle.path, reason)
        states = self._states_of(bundle.golden)
        outputs = {}
        for name, head in heads.items():
            join = np.concatenate if bundle.manifest.heads[name].per_token else np.stack
            outputs[name] = join([head(own) for own in states])
        tolerance = session.tolerance_of(bundle.manifest)
        check_goldens(bundle, session.precision, tolerance, outputs, session.runtime)
        return heads

    def _states_of(self, golden: Golden) -> list[Floats]:
        """Return the states of each golden, which are kept, because the goldens of most heads have equal inputs."""
        key = b"".join(
            part.tobytes() for part in (golden.input_ids, golden.token_type_ids, golden.lengths)
        )
        if self._golden_states[0] != key and self._states is not None:
            heads = (self._states,)
            computed = [self.run(1, [window], heads) for window in golden_windows(golden)]
            self._golden_states = key, [own[0][self._states] for own in computed]
        return self._golden_states[1]

    def count_masks(self, window: Window, heads: Heads = ()) -> int:
        """Return how many mask tokens, or pairs of words and labels, these heads compute, or all heads if empty."""
        computed = [self._heads[name] for name in heads or self._heads if name in self._heads]
        return count_masks(window, computed)

    def warm_up(
        self, full: Sequence[Sample] = (), max_tokens: float = math.inf
    ) -> dict[int, list[Sample]]:
        """Measure batches by their number of slots.

        full: measured batches on one slot; max_tokens: of a batch of several inputs
        """
        max_length = self._bundle.manifest.max_length

        def measured(width: int) -> list[Sample]:
            run = partial(self.run, width)
            budget_s = WARM_UP_S / len(self._sessions)
            samples = measure(
                run,
                self._build,
                max_length=max_length,
                max_size=1 if self.unbatched else 8,
                max_tokens=max_tokens,
                budget_s=budget_s,
            )
            known = full if width == 1 else ()
            masked = self._measure_masks(run, max_length)
            return [*samples, *masked, *known]

        return {width: measured(width) for width in self._sessions}

    def _measure_masks(
        self, run: Callable[[Sequence[Window]], object], max_length: int
    ) -> list[Sample]:
        """Time one input of mask tokens, or words and labels, the faster of two runs; nothing if no head has them."""
        length = min(MASKED_LENGTH, max_length)
        window = fill_rows(self._build(length), self._heads)
        if not self.count_masks(window):
            return []
        seconds = min(time_run(run, [window]) for _ in range(2))
        return [Sample(length, 1, length, seconds, self.count_masks(window))]

    def _build(self, length: int) -> Window:
        """Return an input of this many tokens."""
        golden, first = self._bundle.golden, np.zeros(length, dtype=np.intp)
        return Window(golden.input_ids[first], golden.token_type_ids[first])

    def run_at_once(self, size: int, length: int, slots: int) -> Sample:
        """Run a batch on each slot at the same time; return the cost of one in the second of two runs."""
        batch = [self._build(length)] * size
        with ThreadPoolExecutor(slots) as threads:
            for _ in range(2):
                began = time.perf_counter()
                for _ in threads.map(partial(self.run, 1), [batch] * slots):
                    pass
                seconds = time.perf_counter() - began
        return Sample(size * length, size, length, seconds)

    def self_test(self) -> SelfTest:
        """Return the bundle's self-test, with the outputs of the shortest golden computed now as expected values."""
        window = smallest(self._bundle.golden, self._bundle.manifest.mask_token_id)
        (expected,) = self.run(1, [window])
        return SelfTest(window, expected, self._sessions[1].tolerance)

    @property
    def unbatched(self) -> bool:
        """Whether each window needs its own run."""
        return self._sessions[1].graph.layout == "alone"

    @property
    def padded(self) -> bool:
        """Whether the graph computes padding like tokens."""
        return self._sessions[1].graph.layout in ("portable", "padded")

    @property
    def runs_on(self) -> RunsOn:
        return describe_session(self._sessions[1])


def describe_session(session: Session) -> RunsOn:
    return RunsOn(
        session.precision,
        session.graph.layout,
        session.provider,
        session.provider_note,
        session.runtime,
    )


def fingerprint(window: Window) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a window's token ids, as little-endian int64."""
    return hashlib.sha256(window.input_ids.astype("<i8").tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class OpenedBundle:
    """A bundle with open sessions whose goldens agree on this machine and whose batch cost is measured.

    proof: its graph, its measured batches and, on a GPU, the tokens per second in full batches on all slots
    area: the limit of B * S * S of a batch
    """

    texts: BundleTexts
    runner: Runner
    self_test: SelfTest | None  # None for a head bundle, whose encoder has one
    proof: Proof
    area: float = math.inf
    # Of a head bundle, whose runner is its encoder's.
    heads: Mapping[str, StateHead] = field(default_factory=dict)

    @property
    def estimators(self) -> dict[int, Estimator]:
        padded = self.runner.padded
        return {w: Estimator(own, padded=padded) for w, own in self.proof.samples.items()}


def full_shapes(max_length: int, tokens: int, size: int, area: float) -> list[tuple[int, int]]:
    """Return the batches of equal lengths that need most memory, as (number of sequences, tokens of each sequence).

    tokens, size, area: limits of a batch, see `Budget`; a batch of a single sequence may exceed them
    """
    length = max_length
    if tokens * max_length > area:
        length = max(int(area / tokens) // SLOT_MULTIPLE * SLOT_MULTIPLE, SLOT_MULTIPLE)
        length = min(length, max_length)
    full = max(min(size, tokens // length), 1), length
    return [full] if length == max_length else [full, (1, max_length)]


def outputs_of(manifest: Manifest) -> frozenset[str]:
    """Return the names of the outputs of a head bundle."""
    return frozenset(output_name(manifest.id, head) for head in manifest.heads)


class LocalDevice:
    """The device of this process. texts, runs_on: each bundle's texts and computing graph, by bundle id"""

    def __init__(
        self, settings: Settings, slots: Slots, metrics: Metrics, kind: DeviceKind = CPU
    ) -> None:
        self.texts: dict[str, BundleTexts] = {}
        self.runs_on: dict[str, RunsOn] = {}
        self.kind = kind
        self._settings = settings
        self.slots = slots
        self._runners: dict[str, Runner] = {}
        self._gpu_rates: dict[str, float] = {}  # tokens per second; 0 on the CPU
        self._hang_s = settings.hang_s
        self._metrics = metrics
        self._poison = LogLimiter()
        self.batcher = Batcher(
            self._run,
            slots=slots.number,
            wide=max(slots.threads),
            max_batch_tokens=settings.batch_tokens(kind),
            max_batch_size=settings.batch_size(kind),
            max_queue_tokens=self._queue_limit(),
            max_batch_ms=settings.max_batch_ms,
            max_wait_ms=settings.max_wait_ms,
            fixed_batches=settings.fixed_batches,
            observe=self._observe,
        )
        self.submit = self.batcher.submit
        self._self_tests = SelfTests(self.batcher.probe, metrics.observe_canary)

    def open(self, bundle: Bundle, proof: Proof | None = None) -> OpenedBundle:
        """Open a bundle's sessions, check its goldens and measure its cost; takes seconds, in any thread.

        proof: of an earlier opening, after which only the self-test is computed
        Raises BundleError or ProviderError when the bundle must not be served, or takes longer than `load_timeout_s`.
        """
        if bundle.manifest.encoder is not None:
            runner = self._runners[self.encoder_of(bundle.path, bundle.manifest)]
            heads, texts = runner.check_heads(bundle), read_texts(bundle)
            return OpenedBundle(texts, runner, None, Proof(runner.runs_on, {}, 0.0), heads=heads)
        seconds = self._settings.load_timeout_s
        with TimeLimit(seconds) as limit:
            opened = self._open(bundle, limit, proof)
        if limit.over:
            reason = f"opening and testing it takes more than load_timeout_s, {seconds:g} s"
            raise BundleError(bundle.path, reason)
        return opened

    def encoder_of(self, path: Path | str, manifest: Manifest) -> str:
        """Return the id of the served bundle whose states a head bundle reads. Raises BundleError without it."""
        shared = manifest.encoder
        assert shared is not None, "our bug: this bundle has its own encoder"
        texts = self.texts.get(shared.id)
        if texts is None or texts.sha256 != shared.sha256:
            found = "is not served here" if texts is None else "is served with other contents"
            named = f"its encoder {shared.id} (SHA-256 of the manifest {shared.sha256[:12]}...)"
            reason = f"{named} {found}: serve it first"
            raise BundleError(path, reason)
        return shared.id

    def _open(self, bundle: Bundle, limit: TimeLimit, proof: Proof | None) -> OpenedBundle:
        settings = self._settings

        def proven(session: Session) -> bool:
            return proof is not None and proof.runs_on == describe_session(session)

        texts = read_texts(bundle)
        number = self.slots.number
        sessions = {
            width: open_session(
                bundle,
                precision=settings.precision,
                provider=settings.provider,
                options=SessionOptions(
                    threads, max(number // width, 1), settings.spin, settings.arena, limit
                ),
                proven=proven,
            )
            for width, threads in self.slots.threads.items()
        }
        runner = Runner(bundle, sessions, open_attention(bundle, limit))
        on_host = sessions[1].kind.on_host
        area = math.inf if on_host else self._area(sessions[1])
        if proof is None or not proven(sessions[1]):
            full, rate = [], 0.0
            if not on_host:
                full = self._run_full_batches(bundle, runner, area, sessions[1].kind)
                rate = self.slots.number * full[0].tokens / full[0].seconds
            samples = runner.warm_up(full, settings.batch_tokens(self.kind))
            proof = Proof(runner.runs_on, samples, rate)
        opened = OpenedBundle(texts, runner, runner.self_test(), proof, area)
        trim()  # other threads cannot use what this thread's batches have freed
        return opened

    def _run_full_batches(
        self, bundle: Bundle, runner: Runner, area: float, kind: DeviceKind
    ) -> list[Sample]:
        """Run the largest batches on all slots at once. Raises BundleError if the device lacks the memory."""
        tokens, slots = self._settings.batch_tokens(kind), self.slots.number
        size = 1 if runner.unbatched else self._settings.batch_size(kind)
        samples = []
        for shape in full_shapes(bundle.manifest.max_length, tokens, size, area):
            try:
                samples.append(runner.run_at_once(*shape, slots))
            except RUNTIME_ERRORS as error:
                reason = (
                    f"{slots} batches of {shape[0]} x {shape[1]} tokens at once failed on {kind.label}: lower"
                    f" max_batch_tokens ({tokens}) or replicas ({slots})"
                )
                if area < math.inf:
                    reason += f" or max_batch_attention ({area:.0f})"
                raise BundleError(
                    bundle.path, f"{reason}: {' '.join(str(error).split())}"
                ) from error
        return samples

    def _area(self, session: Session) -> float:
        """Return the limit of B * S * S of a batch: the setting `max_batch_attention`, if the graph stores scores.

        Where it is unset, the attention scores of the batches on all slots take at most half of the GPU's memory.
        """
        if session.kind.memory is None or not session.stores_scores:
            return math.inf
        if self._settings.max_batch_attention is not None:
            return self._settings.max_batch_attention
        number = 2 if session.graph.precision == "fp16" else 4  # bytes
        return session.kind.memory() // (2 * self.slots.number * SCORES * number)

    def list_closed(self, texts: BundleTexts) -> None:
        """List a bundle whose sessions are not open, with the graph that is tried first. Raises BundleError."""
        manifest = texts.manifest
        if manifest.encoder is not None:
            runs_on = self.runs_on[self.encoder_of(manifest.id, manifest)]
            self._list(texts, runs_on)
            return
        graphs = manifest.graphs_for(self.kind, self._settings.precision)
        if not graphs:
            raise BundleError(
                manifest.id, f"it has no graph for {self.kind.label} at this precision"
            )
        provider = self.kind.provider
        self._list(texts, RunsOn(graphs[0].precision, graphs[0].layout, provider, None, RUNTIME))

    def _list(self, texts: BundleTexts, runs_on: RunsOn) -> None:
        """List a bundle. Bundles with equal tokenizers share the bytes of one."""
        for other in self.texts.values():
            if other.tokenizer == texts.tokenizer:
                texts = replace(texts, tokenizer=other.tokenizer)
                break
        self.texts[texts.manifest.id], self.runs_on[texts.manifest.id] = texts, runs_on

    def is_open(self, name: str) -> bool:
        """Return whether a bundle's sessions are open, for a head bundle the sessions of its encoder."""
        encoder = self.texts[name].manifest.encoder if name in self.texts else None
        return (encoder.id if encoder else name) in self._runners

    def has_answered(self, name: str) -> bool:
        """Return whether a batch of an open bundle has succeeded."""
        return self._self_tests.has_answered(name)

    def add(self, opened: OpenedBundle) -> None:
        """Start to compute batches of an opened bundle. Raises BundleError for heads whose encoder is not served."""
        name = opened.texts.manifest.id
        if opened.heads:
            self.encoder_of(name, opened.texts.manifest)
            own = {output_name(name, head): heads for head, heads in opened.heads.items()}
            opened.runner.shared = {**opened.runner.shared, **own}
        self._list(opened.texts, opened.proof.runs_on)
        if opened.heads:
            return
        self._runners[name] = opened.runner
        self._gpu_rates[name] = opened.proof.gpu_rate
        self.batcher.admission.max_queue_tokens = self._queue_limit()
        runner = opened.runner
        self.batcher.add_bundle(
            name, opened.estimators, runner.unbatched, opened.area, runner.count_masks
        )
        if opened.self_test is not None:
            self._self_tests.add(name, opened.self_test)
        if note := self.runs_on[name].provider_note:
            log.warning("the GPU is not used", model=name, reason=note)

    async def close(self, name: str) -> None:
        """Close a bundle's sessions once all accepted requests for it are answered; it stays listed."""
        self._self_tests.remove(name)
        await self.batcher.drained(name)
        self.batcher.remove_bundle(name)
        del self._runners[name], self._gpu_rates[name]
        self.batcher.admission.max_queue_tokens = self._queue_limit()

    async def drop(self, name: str) -> None:
        """Remove a bundle once all accepted requests for it are answered."""
        manifest = self.texts[name].manifest
        if self.is_open(name) and manifest.encoder is None:
            await self.close(name)
        elif self.is_open(name) and manifest.encoder is not None:
            encoder, outputs = manifest.encoder.id, outputs_of(manifest)
            await self.batcher.drained(encoder, outputs)
            runner = self._runners[encoder]
            runner.shared = {n: head for n, head in runner.shared.items() if n not in outputs}
        del self.texts[name], self.runs_on[name]

    def requests(self, name: str) -> int:
        """Return the number of unanswered requests for a bundle."""
        manifest = self.texts[name].manifest
        if manifest.encoder is None:
            return self.batcher.requests(name)
        return self.batcher.requests(manifest.encoder.id, outputs_of(manifest))

    def _queue_limit(self) -> int:
        """Return the tokens that may wait: the setting, or `QUEUE_S` seconds at the fastest bundle's rate on a GPU."""
        if self._settings.max_queue_tokens is not None:
            return self._settings.max_queue_tokens
        work = QUEUE_S * max(self._gpu_rates.values(), default=0.0)
        return max(MAX_QUEUE_TOKENS, min(int(work), QUEUE_MOST))

    @property
    def max_queue_tokens(self) -> int:
        return self.batcher.admission.max_queue_tokens

    def load(self) -> Load:
        load = self.batcher.load()
        return replace(load, problem=load.problem or self._hung() or self._self_tests.problem)

    def loads(self) -> dict[str, Load]:
        return {self.kind.name: self.load()}

    def facts(self) -> dict[str, dict[str, str]]:
        """Return the labels of each bundle for the metrics, by id."""
        return {
            name: {"sha256": texts.sha256, **self.runs_on[name].facts}
            for name, texts in self.texts.items()
        }

    def alive(self) -> bool:
        return not (self.batcher.problem or self._hung() or self._self_tests.lost)

    async def watch(self) -> None:
        """Run the self-tests, and count the ages of running batches to detect one that hangs."""
        async with asyncio.TaskGroup() as watching:
            watching.create_task(self._self_tests.run())
            watching.create_task(self._count_ages())

    async def _count_ages(self) -> None:
        """Add the ticks of a stall clock to the age of each running batch."""
        clock = StallClock(liveness.TICK_S)
        while True:
            await clock.tick()
            for batch in self.batcher.running:
                batch.age_s += clock.tick_s

    def _hung(self) -> str:
        """Return a description of a batch that has exceeded its time limit, or an empty string."""
        for batch in self.batcher.running:
            if batch.age_s > hang_limit_s(self._hang_s, batch.expected_s):
                what = f"{batch.size} texts, {batch.tokens} tokens"
                return f"a batch of {batch.bundle} ({what}) has run for {batch.age_s:.1f} s"
        return ""

    def _observe(self, stats: BatchStats) -> None:
        if len(stats.failed) < stats.size:
            self._self_tests.ended_well(stats.bundle)
        for failed in stats.failed:
            self._tell_poison(*failed)
        runner = self._runners.get(stats.bundle)  # None if it is unloaded since
        self._metrics.observe_batch(stats, runner is not None and runner.padded)

    def _tell_poison(self, entry: Entry, window: Window, error: QuartetError) -> None:
        """Log an input that fails inference, with enough to identify it and without its text."""
        if self._poison.may_tell():
            log.error(
                "an input failed alone",
                model=entry.bundle,
                head=",".join(entry.heads),
                tokens=len(window),
                sha256=fingerprint(window),
                problem=str(error.__cause__ or error),
                request_id=entry.request_id,
                untold=self._poison.untold(),
            )

    def _run(
        self, width: int, model: str, windows: Sequence[Window], heads: Heads
    ) -> list[Outputs]:
        return self._runners[model].run(width, windows, heads)


@asynccontextmanager
async def open_device(settings: Settings, metrics: Metrics) -> AsyncIterator[LocalDevice]:
    """Open a device without bundles; drain it on exit.

    Raises ProviderError when the provider is not available, and MemoryLimitError when the bundles do not fit.
    """
    kind = usable_kinds(settings.provider)[0]
    if kind.on_host:
        keep_freed_memory()
        settings = fit_memory(settings)
    bundles = len(settings.bundles) + len(on_demand_folders(settings))
    slots = settings.slots(kind, usable_cores(), max(bundles, 1))
    device = LocalDevice(settings, slots, metrics, kind)
    await device.batcher.start()
    watching = asyncio.create_task(device.watch())
    try:
        yield device
    finally:
        watching.cancel()
        await device.batcher.stop(settings.drain_s)
