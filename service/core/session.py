"""The `onnxruntime.InferenceSession` of a bundle's graph, on a provider and with a number of threads."""

import ctypes
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from service.core.bundle import Bundle, BundleError, check_goldens
from service.core.cpu import CPU
from service.core.device_kind import DeviceKind, NoDeviceError
from service.core.device_table import KINDS, named_kinds, preferred_kinds
from service.core.encode import Window
from service.core.goldens import Golden
from service.core.manifest import ATTENTION, Graph, Manifest, Tolerance
from service.core.packing import (
    SLOT_MULTIPLE,
    Ints,
    Packed,
    Pairs,
    each,
    make_layout,
    mask_positions,
    pack,
    positions,
    round_up,
    word_label_pairs,
)

# ONNX Runtime reads this variable once, while it is loaded, and sends telemetry unless it is "1". Therefore no other
# module imports the library. A value that the user has set is kept.
TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"
if not os.environ.get(TELEMETRY_OFF):
    os.environ[TELEMETRY_OFF] = "1"

import onnxruntime  # noqa: E402

ort = onnxruntime

BatchOutputs = dict[str, NDArray[np.float32]]
Feeds = dict[str, NDArray[Any]]
Attend = Callable[[Window], NDArray[np.float32]]

PER_ROW = ("input_ids", "token_type_ids", "position_ids", "pack")  # inputs of a packed graph
FLOAT = "tensor(float)"  # float32, as the runtime calls it
# Parameters of the C library's `mallopt`, from its header malloc.h. It accepts a threshold of 32 MiB at most, so larger
# buffers are always returned to the system.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 << 20  # bytes
KEPT_BYTES = 64 << 20  # of a thread, at most
ERRORS = 3  # severity: the runtime logs to stderr, in lines of its own format
RUNTIME = f"onnxruntime {ort.__version__}"
# An ONNX model, serialized: y = exp(x @ x), float32 [1, 1]. On CUDA it runs a kernel of cuBLAS and one of the runtime.
TRIAL = (
    b'\x08\t:M\n\x11\n\x01x\n\x01x\x12\x01p"\x06MatMul\n\x0b\n\x01p\x12\x01y"\x03Exp\x12\x01tZ\x13\n\x01x\x12\x0e\n\x0c'
    b"\x08\x01\x12\x08\n\x02\x08\x01\n\x02\x08\x01b\x13\n\x01y\x12\x0e\n\x0c\x08\x01\x12\x08\n\x02\x08\x01\n\x02\x08\x01B\x04\n\x00\x10\x11"
)


# Kernels log to this logger, not to their session's. CUDA's ScatterND warns of duplicate indices in each layer of an
# fp32 graph, where NonZero computes the indices, so that none is duplicated (`export.passes.mask_free_attention`).
onnxruntime.set_default_logger_severity(ERRORS)


class ProviderError(Exception):
    """A requested provider that is not available; the message names what is missing."""


# Errors of opening and running a graph. The runtime's own errors have no class in common.
RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    *(ProviderError, RuntimeError, ValueError, MemoryError),
    *(
        kind
        for kind in vars(ort.capi.onnxruntime_pybind11_state).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ),
)


class TimeLimit:
    """A time after which the runtime ends the opening of sessions and their runs, with an error.

    It applies from `with` to the end of the block, which it ends without the runtime's error.
    over: whether the time was exceeded
    """

    def __init__(self, seconds: float) -> None:
        self.over = False
        self._limited: list[Any] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> bool:
        self._timer.cancel()
        self._limited.clear()
        return self.over

    def apply(self, options: Any) -> None:
        """Limit what uses these options of the runtime, of a session or of its runs."""
        self._limited.append(options)
        if self.over:
            self._end()

    def _end(self) -> None:
        self.over = True
        for options in [*self._limited]:
            if isinstance(options, ort.RunOptions):
                options.terminate = True
            else:
                options.set_load_cancellation_flag(True)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The options of a session."""

    threads: int  # intra-op threads of the session, which concurrent runs share
    runs: int = 1  # concurrent runs, where the runtime must know their number
    spin: bool = False  # whether the threads spin for new work between runs
    # Whether ONNX Runtime keeps the memory of a run for the next run on any thread. Otherwise the C library keeps it by
    # thread. Where cores share no cache, memory that moves between them costs a fifth of the speed.
    arena: bool = False
    limit: TimeLimit | None = (
        None  # of opening the session, and of its runs until the limit's block ends
    )
    # Whether the runtime copies weights into the layout of its kernels. Otherwise it maps them from their file.
    copies_weights: bool = True


class Session:
    """A loaded graph of a bundle. Several threads may call `run` at the same time.

    precision: of the computation; the graph's own unless the kind of device computes another one with the graph
    tolerance: of the goldens
    provider_note: the reason why a preferred device, which the runtime supports, is not used; None for no such reason
    """

    def __init__(
        self,
        bundle: Bundle,
        graph: Graph,
        kind: DeviceKind,
        options: SessionOptions,
        precision: str = "auto",
    ) -> None:
        self.graph = graph
        self.kind = kind
        self.provider = kind.provider
        self.runtime = runtime_of(kind)
        self.provider_note: str | None = None
        self.heads = bundle.manifest.heads
        self._reduced = kind.reduced.get(precision)
        self.precision: str = precision if self._reduced else graph.precision
        self.tolerance = self.tolerance_of(bundle.manifest)
        self._session = open_graph(bundle.file(graph.file), kind, options, self.precision)
        self._outputs = [*self.heads]  # a graph may have more outputs
        self._all, self._only_fetched = ort.RunOptions(), ort.RunOptions()
        self._only_fetched.only_execute_path_to_fetches = True
        if options.limit:
            self.limit_runs(options.limit)
        types = {output.name: output.type for output in self._session.get_outputs()}
        missing = self.heads.keys() - types.keys()
        if missing:
            raise BundleError(
                bundle.path, f"{graph.file} has no output for {', '.join(sorted(missing))}"
            )
        for name in self._outputs:
            if types[name] != FLOAT:
                raise BundleError(
                    bundle.path, f"{graph.file} gives {name} as {types[name]}, not as {FLOAT}"
                )
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._mask_token_id = bundle.manifest.mask_token_id
        if self._mask_token_id is not None and "positions" not in self._inputs:
            raise BundleError(bundle.path, f"{graph.file} has a fill-mask head without `positions`")
        if any(head.per_pair for head in self.heads.values()) and "pairs" not in self._inputs:
            raise BundleError(bundle.path, f"{graph.file} has a head with labels without `pairs`")

    def tolerance_of(self, manifest: Manifest) -> Tolerance:
        """Return the tolerance of a bundle's goldens where this session computes its heads or their states."""
        if self._reduced:
            return Tolerance(min_cosine=dict.fromkeys(manifest.heads, self._reduced.min_cosine))
        return manifest.goldens.tolerance[self.graph.precision]

    def limit_runs(self, limit: TimeLimit) -> None:
        """Let a limit end the runs of this session."""
        limit.apply(self._all)
        limit.apply(self._only_fetched)

    @property
    def stores_scores(self) -> bool:
        """Whether attention may store numbers for all `[B, S, S]` pairs of slots in the device's own memory.

        It does not in a graph for this kind of device alone, if the manifest states that it has no attention bias.
        """
        fused = self.graph.provider == self.kind.name and self.graph.attention_bias is False
        return not (self.kind.on_host or fused)

    def run(self, packed: Packed, heads: Collection[str] = ()) -> BatchOutputs:
        """Compute the outputs of these heads, or of all if empty.

        Returns `[B, ...]` per sequence, `[T, ...]` per token, `[M, V]` per mask token (`mask_positions`), and
        `[P, ...]` per word and label (`word_label_pairs`).
        """
        outputs = [name for name in self._outputs if name in heads] if heads else self._outputs
        if self.graph.layout == "packed":
            masks = self._masks(packed, outputs)
            feeds = packed_feeds(packed, self._inputs, self.kind.row_multiple)
            values = self._run(feeds, outputs, masks, self._pairs(packed))
            return {
                name: value[: len(packed.input_ids)] if self.heads[name].per_token else value
                for name, value in values.items()
            }
        if self.graph.layout == "alone":
            return self._run_each(packed, outputs)
        return self._run_padded(packed, outputs)

    def _run_each(self, packed: Packed, outputs: Sequence[str]) -> BatchOutputs:
        """Run each sequence by itself, because the graph's outputs depend on the batch composition."""
        parts = [self._run_padded(own, outputs) for own in each(packed)]
        return {name: np.concatenate([part[name] for part in parts]) for name in outputs}

    def _run_padded(self, packed: Packed, outputs: Sequence[str]) -> BatchOutputs:
        slots = packed.layout.unpack.size
        to_slot = packed.layout.pack
        masks, pairs = to_slot[self._masks(packed, outputs)], self._pairs(packed)
        if pairs is not None:
            pairs = pairs._replace(words=to_slot[pairs.words], labels=to_slot[pairs.labels])
        return {
            name: value.reshape(slots, -1)[to_slot] if self.heads[name].per_token else value
            for name, value in self._run(padded_feeds(packed), outputs, masks, pairs).items()
        }

    def _masks(self, packed: Packed, outputs: Sequence[str]) -> Ints:
        """Return the packed indices of the mask tokens, `[M]`; none unless an output has a row for each."""
        if self._mask_token_id is None or not any(self.heads[name].per_mask for name in outputs):
            return np.zeros(0, np.int64)
        return mask_positions(packed, self._mask_token_id)

    def _pairs(self, packed: Packed) -> Pairs | None:
        """Return the pairs of words and labels; None for a graph without a head for labels of a request."""
        return word_label_pairs(packed) if "pairs" in self._inputs else None

    def _run(
        self, feeds: Feeds, outputs: Sequence[str], masks: Ints, pairs: Pairs | None
    ) -> BatchOutputs:
        """Run the graph. masks: the indices of the mask tokens in the graph's own layout, `[M]`; pairs: likewise"""
        # A kernel may not run on no rows: without a mask token, the first token's row is computed and dropped.
        feeds["positions"] = masks if len(masks) else np.zeros(1, np.int64)
        if pairs is not None:
            feeds |= pair_feeds(pairs)
        # A graph has only the inputs that it needs: a model without segments has no `token_type_ids`.
        needed = {name: value for name, value in feeds.items() if name in self._inputs}
        options = self._only_fetched if len(outputs) < len(self._outputs) else self._all
        values = self._session.run(outputs, needed, options)
        by_name = dict(zip(outputs, values, strict=True))
        for name in outputs:
            if self.heads[name].per_mask:
                by_name[name] = by_name[name][: len(masks)]
            elif pairs is not None and self.heads[name].per_pair:
                by_name[name] = by_name[name][: len(pairs.pairs)]
        return by_name

    def check(self, bundle: Bundle) -> None:
        """Recompute the goldens on this machine. Raises BundleError when the outputs disagree."""
        outputs = self._recompute(bundle.golden)
        check_goldens(bundle, self.precision, self.tolerance, outputs, self.runtime)

    def _recompute(self, golden: Golden) -> BatchOutputs:
        """Return the outputs of the goldens; the longest has its own batch, so that the others need less memory."""
        lengths = golden.lengths
        sequence = np.repeat(np.arange(len(lengths)), lengths)  # [T]
        longest = np.arange(len(lengths)) == lengths.argmax()
        whole = make_layout(lengths)
        every = Packed(golden.input_ids, golden.token_type_ids, positions(whole), whole)
        masks = self._masks(every, self._outputs)  # [M]
        pairs = self._pairs(every)
        of_pair = (
            sequence if pairs is None else np.repeat(np.arange(len(lengths)), np.diff(pairs.starts))
        )
        outputs: BatchOutputs = {}
        for rows in (longest, ~longest):
            if not rows.any():
                continue
            tokens = rows[sequence]
            layout = make_layout(lengths[rows])
            ids, types = golden.input_ids[tokens], golden.token_type_ids[tokens]
            for name, value in self.run(Packed(ids, types, positions(layout), layout)).items():
                head = self.heads[name]
                places = tokens if head.per_token else tokens[masks] if head.per_mask else rows
                places = rows[of_pair] if head.per_pair else places
                outputs.setdefault(name, np.zeros((len(places), *value.shape[1:]), value.dtype))
                outputs[name][places] = value
        return outputs


def packed_feeds(packed: Packed, inputs: Collection[str], row_multiple: int = 1) -> Feeds:
    """Return the possible inputs of a packed graph; `token_offset` only if it is among the graph's `inputs`.

    row_multiple: the inputs have a multiple of this many rows. Added rows repeat the first tokens, and are not read.
    """
    layout = packed.layout.widen(SLOT_MULTIPLE)
    feeds: Feeds = {
        "input_ids": packed.input_ids,
        "token_type_ids": packed.token_type_ids,
        "position_ids": packed.position_ids,
        "lengths": layout.attended,
        "unpack": layout.unpack,
        "pack": layout.pack,
        "cu_seqlens": layout.cu_seqlens,
    }
    if "token_offset" in inputs:
        feeds["token_offset"] = layout.token_offset()
    tokens = len(packed.input_ids)
    if tokens % row_multiple:
        rows = round_up(tokens, row_multiple)
        feeds |= {name: np.resize(feeds[name], rows) for name in PER_ROW}
    return feeds


def pair_feeds(pairs: Pairs) -> Feeds:
    """Return the inputs of a graph for labels of a request, of which the first pair is dropped if it has none."""
    one = pairs.pairs if len(pairs.pairs) else np.zeros(1, np.int64)
    return {"words": pairs.words, "labels": pairs.labels, "pairs": one}


def padded_feeds(packed: Packed) -> Feeds:
    """Return the inputs, `[B, S]`, of a graph that is not packed; padding has its sequence's first token."""
    layout = packed.layout
    batch, longest = layout.unpack.shape
    mask = np.arange(longest) < layout.attended[:, None]  # [B, S]
    return {
        "input_ids": packed.input_ids[layout.unpack],
        "attention_mask": mask.astype(np.int64),
        "token_type_ids": packed.token_type_ids[layout.unpack],
        "position_ids": np.tile(np.arange(longest), (batch, 1)),
    }


def open_attention(bundle: Bundle, limit: TimeLimit | None = None) -> Attend | None:
    """Open a bundle's attention graph on the CPU; None for a bundle without one.

    Returns a function: a window of n tokens -> the attention weights of L layers with N heads, `[L, N, n, n]`.
    """
    graph = bundle.manifest.attention
    if graph is None:
        return None
    options = SessionOptions(threads=1, limit=limit, copies_weights=False)
    session = open_graph(bundle.file(graph.file), CPU, options)
    inputs = {value.name for value in session.get_inputs()}

    def attend(window: Window) -> NDArray[np.float32]:
        feeds = padded_feeds(pack([window]))
        needed = {name: value for name, value in feeds.items() if name in inputs}
        [weights] = session.run([ATTENTION], needed)
        found: NDArray[np.float32] = weights[0]
        return found

    return attend


def open_session(
    bundle: Bundle,
    *,
    precision: str = "auto",
    provider: str = "auto",
    options: SessionOptions,
    proven: Callable[[Session], bool] = lambda _: False,
) -> Session:
    """Open the best graph that runs on the device, for `auto` also on the CPU, and check the goldens with it.

    proven: whether an open session is known to compute the goldens
    Raises ProviderError without the requested provider or where it cannot compute the precision on this machine, and
    BundleError without the precision or for other goldens.
    """
    kinds = usable_kinds(provider)
    for reduced in filter(None, (kind.reduced.get(precision) for kind in kinds)):
        if problem := reduced.problem():
            raise ProviderError(f"precision is {precision}, but {problem}")
    graphs_for = bundle.manifest.graphs_for
    tried = [(kind, graph) for kind in kinds for graph in graphs_for(kind, precision)]
    problems: dict[DeviceKind, str] = {}
    for number, (kind, graph) in enumerate(tried, 1):
        try:
            session = Session(bundle, graph, kind, options, precision)
            if not proven(session):
                session.check(bundle)
        except RUNTIME_ERRORS as error:  # a missing operator, or a visible GPU that does not work
            if number == len(tried):
                raise
            problems[kind] = " ".join(str(error).split())
        else:
            session.provider_note = _explain(kind, provider, problems)
            return session
    raise BundleError(bundle.path, _unfit(bundle, kinds[-1], precision, provider))


def _unfit(bundle: Bundle, kind: DeviceKind, precision: str, provider: str) -> str:
    """Return why no graph can run: the other precisions, or the precision's providers and unusable devices."""
    manifest = bundle.manifest
    if precision == "auto":
        precision = manifest.default_precision
    if reduced := kind.reduced.get(precision):
        precision = reduced.graphs
    elif owners := [one.name for one in KINDS if precision in one.reduced]:
        return f"precision {precision} needs provider {' or '.join(owners)}, not {provider}"
    if precision not in manifest.precisions:
        return f"it has no {precision} graph, only {', '.join(manifest.precisions)}"
    devices = {g.provider for g in manifest.graphs if g.precision == precision}
    reason = (
        f"it has no {precision} graph for {kind.provider}, only for {', '.join(sorted(devices))}"
    )
    problems = map(device_problem, preferred_kinds(kind) if provider == "auto" else ())
    return ": ".join([reason, *filter(None, problems)])


def _explain(kind: DeviceKind, provider: str, problems: Mapping[DeviceKind, str]) -> str | None:
    """Return why a preferred device that the runtime supports is not used, or None. problems: by kind, of opening it"""
    for preferred in preferred_kinds(kind):
        if preferred.provider in ort.get_available_providers():
            if provider != "auto":
                return f"provider is {provider}"
            reason = problems.get(preferred) or device_problem(preferred)
            return reason or f"the bundle has no graph for {preferred.label}"
    return None


def usable_kinds(provider: str) -> list[DeviceKind]:
    """Return the kinds of device to try for the setting `provider`, in order. Raises ProviderError for none."""
    problems = {kind: device_problem(kind) for kind in named_kinds(provider)}
    usable = [kind for kind, problem in problems.items() if problem is None]
    if not usable:
        raise ProviderError(
            f"provider is {provider}, but {', '.join(filter(None, problems.values()))}"
        )
    return usable


@cache
def device_problem(kind: DeviceKind) -> str | None:
    """Return why a kind of device cannot be used, or None when it can; tests a device once per process."""
    if kind.find is None:
        return None
    if kind.open is None and kind.provider not in ort.get_available_providers():
        name = kind.provider.removesuffix("ExecutionProvider")
        return f"this onnxruntime has no {name} provider: install {kind.package}"
    try:
        device = kind.find(ort)
    except NoDeviceError as error:
        return str(error)
    try:
        open_graph(TRIAL, kind, SessionOptions(threads=1)).run(None, {"x": np.eye(1, dtype="f4")})
    except RUNTIME_ERRORS as error:
        return f"{device} failed a trial run: {' '.join(str(error).split())}"
    return None


def runtime_of(kind: DeviceKind) -> str:
    """Return the name and version of the runtime that computes on a kind of device."""
    return RUNTIME if kind.open is None else f"{kind.package} {metadata.version(kind.package)}"


def open_graph(
    graph: Path | bytes, kind: DeviceKind, options: SessionOptions, precision: str = "fp32"
) -> Any:
    """Open the runtime's session of a model, a path or bytes, with the settings that serving needs.

    precision: of the computation, where the graph does not determine it
    Raises ProviderError if the session runs on another provider, and any error of the runtime.
    """
    if kind.open is not None:
        return kind.open(graph, options.threads, options.runs, precision)
    settings = ort.SessionOptions()
    # On a device of its own memory, the only nodes on the CPU compute shapes.
    settings.intra_op_num_threads = options.threads if kind.on_host else 1
    settings.inter_op_num_threads = 1
    # During a run, threads that wait for each other spin, because waking them would take longer. After it they sleep.
    settings.add_session_config_entry("session.force_spinning_stop", str(int(not options.spin)))
    settings.enable_cpu_mem_arena = options.arena or not kind.on_host
    # Shapes differ from batch to batch, so memory patterns would accumulate.
    settings.enable_mem_pattern = False
    # A plan of which buffers share memory takes two thirds of an opening, because the runtime compares each output with
    # all free buffers. Without the plan, freed buffers return to the C library, which reuses them.
    settings.enable_mem_reuse = not kind.on_host
    settings.log_severity_level = ERRORS
    settings.add_session_config_entry(
        "session.disable_prepacking", str(int(not options.copies_weights))
    )
    # Another format, which the runtime takes by the name of the file, may name files that `graph_files` does not find.
    settings.add_session_config_entry("session.load_model_format", "ONNX")
    if options.limit:
        options.limit.apply(settings)
    others = [] if kind is CPU else [CPU.provider]
    providers = [(kind.provider, kind.options), *others]
    source = graph if isinstance(graph, bytes) else str(graph)
    # A session that fails on the GPU, at its creation or later, raises an error and does not move to the CPU.
    session = ort.InferenceSession(source, settings, providers=providers, enable_fallback=0)
    if session.get_providers()[0] != kind.provider:
        raise ProviderError(
            f"{kind.provider} was asked for, but the session runs on {session.get_providers()[0]}"
        )
    return session


def keep_freed_memory() -> None:
    """Let the C library of this process keep the memory that a run frees for the next run, until `trim` is called.

    By default it returns large buffers to the system. The next run then gets new pages, which the system clears: 1,600
    pages in a run of MiniLM on 256 tokens, a fourteenth of its time.
    """
    with suppress(AttributeError):  # only glibc has it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def trim() -> None:
    """Return freed memory to the system, which the C library otherwise keeps in fragments."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
