"""The `onnxruntime.InferenceSession` of a bundle's graph, on a provider and with a number of threads."""

import ctypes
import io
import os
from collections.abc import Collection, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.core import cuda
from service.core.bundle import Bundle, BundleError, Golden, Graph, Precision, check_goldens
from service.core.packing import (
    SLOT_MULTIPLE,
    Ints,
    Packed,
    each,
    make_layout,
    mask_positions,
    positions,
)

# ONNX Runtime reads this variable once, while it is loaded, and sends telemetry unless it is "1". Therefore no other
# module imports the library. A value that the user has set is kept.
TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"
if not os.environ.get(TELEMETRY_OFF):
    os.environ[TELEMETRY_OFF] = "1"

import onnxruntime  # noqa: E402

ort = onnxruntime

Provider = Literal["auto", "cpu", "cuda"]
BatchOutputs = dict[str, NDArray[np.float32]]
Feeds = dict[str, NDArray[Any]]

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
# TF32 keeps as few digits as fp16, so fp32 outputs would exceed the tolerance of the goldens. The fused norm of fp16
# graphs sums in fp32 in its strict mode only. Otherwise, large sums give a wrong norm without an error.
CUDA_OPTIONS = {"use_tf32": "0", "enable_skip_layer_norm_strict_mode": "1"}
FLOAT = "tensor(float)"  # float32, as the runtime calls it
# Parameters of the C library's `mallopt`, from its header malloc.h. It accepts a threshold of 32 MiB at most, so larger
# buffers are always returned to the system.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 << 20  # bytes
KEPT_BYTES = 64 << 20  # of a thread, at most
ERRORS = 3  # severity: the runtime logs to stderr, in lines of its own format
RUNTIME = f"onnxruntime {ort.__version__}"
# An ONNX model, serialized: y = exp(x @ x), float32 [1, 1]. It runs a kernel of cuBLAS and one of the runtime.
TRIAL = (
    b'\x08\t:M\n\x11\n\x01x\n\x01x\x12\x01p"\x06MatMul\n\x0b\n\x01p\x12\x01y"\x03Exp\x12\x01tZ\x13\n\x01x\x12\x0e\n\x0c'
    b"\x08\x01\x12\x08\n\x02\x08\x01\n\x02\x08\x01b\x13\n\x01y\x12\x0e\n\x0c\x08\x01\x12\x08\n\x02\x08\x01\n\x02\x08\x01B\x04\n\x00\x10\x11"
)


# Kernels log to this logger, not to their session's. CUDA's ScatterND warns of duplicate indices in each layer of an
# fp32 graph, where NonZero computes the indices, so that none is duplicated (`export.passes.mask_free_attention`).
onnxruntime.set_default_logger_severity(ERRORS)


class ProviderError(Exception):
    """A requested provider that is not available; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The options of a session.

    threads: intra-op threads of the session, which concurrent runs share
    spin: whether the threads spin for new work between runs
    arena: whether ONNX Runtime keeps the memory of a run for the next run on any thread. Otherwise the C library keeps
        it by thread. Where cores share no cache, memory that moves between them costs a fifth of the speed.
    """

    threads: int
    spin: bool = False
    arena: bool = False


class Session:
    """A loaded graph of a bundle. Several threads may call `run` at the same time."""

    def __init__(
        self, bundle: Bundle, graph: Graph, provider: str, options: SessionOptions
    ) -> None:
        self.graph = graph
        self.provider = provider
        self.gpu_problem: str | None = None
        self.heads = bundle.manifest.heads
        self._session = open_graph(bundle.file(graph.file), provider, options)
        self._outputs = [*self.heads]  # a graph may have more outputs
        self._only_fetched = onnxruntime.RunOptions()
        self._only_fetched.only_execute_path_to_fetches = True
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

    @property
    def stores_scores(self) -> bool:
        """Whether attention may store numbers for all `[B, S, S]` pairs of slots in the GPU's memory.

        Attention does not store them in a packed graph for CUDA without an attention bias. A graph may have a bias
        unless its manifest states otherwise.
        """
        fused = self.graph.provider == "cuda" and self.graph.attention_bias is False
        return self.provider == CUDA and not fused

    def run(self, packed: Packed, heads: Collection[str] = ()) -> BatchOutputs:
        """Compute the outputs of these heads, or of all if empty.

        Returns `[B, ...]` per sequence, `[T, ...]` per token, and `[M, V]` per mask token (`mask_positions`).
        """
        outputs = [name for name in self._outputs if name in heads] if heads else self._outputs
        if self.graph.layout == "packed":
            masks = self._masks(packed, outputs)
            return self._run(packed_feeds(packed, self._inputs), outputs, masks)
        if self.graph.layout == "alone":
            return self._run_each(packed, outputs)
        return self._run_padded(packed, outputs)

    def _run_each(self, packed: Packed, outputs: Sequence[str]) -> BatchOutputs:
        """Run each sequence by itself, because the graph's outputs depend on the batch composition."""
        parts = [self._run_padded(own, outputs) for own in each(packed)]
        return {name: np.concatenate([part[name] for part in parts]) for name in outputs}

    def _run_padded(self, packed: Packed, outputs: Sequence[str]) -> BatchOutputs:
        slots = packed.layout.unpack.size
        masks = packed.layout.pack[self._masks(packed, outputs)]
        return {
            name: value.reshape(slots, -1)[packed.layout.pack]
            if self.heads[name].per_token
            else value
            for name, value in self._run(padded_feeds(packed), outputs, masks).items()
        }

    def _masks(self, packed: Packed, outputs: Sequence[str]) -> Ints:
        """Return the packed indices of the mask tokens, `[M]`; none unless an output has a row for each."""
        if self._mask_token_id is None or not any(self.heads[name].per_mask for name in outputs):
            return np.zeros(0, np.int64)
        return mask_positions(packed, self._mask_token_id)

    def _run(self, feeds: Feeds, outputs: Sequence[str], masks: Ints) -> BatchOutputs:
        """Run the graph. masks: the indices of the mask tokens in the graph's own layout, `[M]`"""
        # A kernel may not run on no rows: without a mask token, the first token's row is computed and dropped.
        feeds["positions"] = masks if len(masks) else np.zeros(1, np.int64)
        # A graph has only the inputs that it needs: a model without segments has no `token_type_ids`.
        needed = {name: value for name, value in feeds.items() if name in self._inputs}
        options = self._only_fetched if len(outputs) < len(self._outputs) else None
        values = self._session.run(outputs, needed, options)
        return {
            name: value[: len(masks)] if self.heads[name].per_mask else value
            for name, value in zip(outputs, values, strict=True)
        }

    def check(self, bundle: Bundle) -> None:
        """Recompute the goldens on this machine. Raises BundleError when the outputs disagree."""
        check_goldens(bundle, self.graph.precision, self._recompute(bundle.golden), RUNTIME)

    def _recompute(self, golden: Golden) -> BatchOutputs:
        """Return the outputs of the goldens, with the longest sequence in a batch of its own.

        In one batch, all sequences would be padded to the longest, and the process would keep that memory.
        """
        lengths = golden.lengths
        sequence = np.repeat(np.arange(len(lengths)), lengths)  # [T]
        longest = np.arange(len(lengths)) == lengths.argmax()
        whole = make_layout(lengths)
        every = Packed(golden.input_ids, golden.token_type_ids, positions(whole), whole)
        masks = self._masks(every, self._outputs)  # [M]
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
                outputs.setdefault(name, np.zeros((len(places), *value.shape[1:]), value.dtype))
                outputs[name][places] = value
        return outputs


def packed_feeds(packed: Packed, inputs: Collection[str]) -> Feeds:
    """Return the possible inputs of a packed graph; `token_offset` is computed only for a graph that has this input.

    inputs: the names of the graph's inputs
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
    return feeds


def padded_feeds(packed: Packed) -> Feeds:
    """Return the possible inputs, `[B, S]`, of a graph with the layout `portable`, `padded` or `alone`.

    A padding slot contains its own sequence's first token.
    """
    layout = packed.layout
    batch, longest = layout.unpack.shape
    mask = np.arange(longest) < layout.attended[:, None]  # [B, S]
    return {
        "input_ids": packed.input_ids[layout.unpack],
        "attention_mask": mask.astype(np.int64),
        "token_type_ids": packed.token_type_ids[layout.unpack],
        "position_ids": np.tile(np.arange(longest), (batch, 1)),
    }


def open_session(
    bundle: Bundle,
    *,
    precision: Literal["auto"] | Precision = "auto",
    provider: Provider = "auto",
    options: SessionOptions,
) -> Session:
    """Open the best graph that runs on the provider, and check the goldens with it.

    With the provider `auto`, a bundle without a graph for the GPU runs on the CPU. Raises ProviderError when the
    requested provider is not available, and BundleError when the bundle lacks the precision or its goldens disagree on
    this machine.
    """
    name = find_provider(provider)
    graphs = _candidates(bundle, name, precision)
    if not graphs and provider == "auto":
        name, graphs = CPU, _candidates(bundle, CPU, precision)
    if not graphs:
        problem = cuda_problem() if provider == "auto" else None
        raise BundleError(bundle.path, _unfit(bundle, name, precision, problem))
    try:
        session = _open_best(bundle, graphs, name, options)
        if provider == "cpu":
            session.gpu_problem = "provider is cpu"
        return session
    except BundleError:
        raise
    except Exception as error:  # a visible GPU may not work; the runtime's errors have no type
        fallback = _candidates(bundle, CPU, precision)
        if provider != "auto" or name == CPU or not fallback:
            raise
        session = _open_best(bundle, fallback, CPU, options)
        session.gpu_problem = " ".join(str(error).split())
        return session


def _open_best(
    bundle: Bundle, graphs: Sequence[Graph], provider: str, options: SessionOptions
) -> Session:
    for graph in graphs[:-1]:
        try:
            return _checked(bundle, graph, provider, options)
        except BundleError:
            raise
        except Exception:  # the provider may lack an operator; the next graph needs less
            continue
    return _checked(bundle, graphs[-1], provider, options)


def _checked(bundle: Bundle, graph: Graph, provider: str, options: SessionOptions) -> Session:
    session = Session(bundle, graph, provider, options)
    session.check(bundle)
    return session


def _candidates(bundle: Bundle, provider: str, precision: str) -> list[Graph]:
    """Return the graphs that may run on a provider, see `Manifest.graphs_for`.

    Raises BundleError for a precision that the bundle lacks.
    """
    manifest = bundle.manifest
    if precision not in ("auto", *manifest.precisions):
        has = ", ".join(manifest.precisions)
        raise BundleError(bundle.path, f"it has no {precision} graph, only {has}")
    return manifest.graphs_for("cuda" if provider == CUDA else "cpu", precision)


def _unfit(bundle: Bundle, provider: str, precision: str, problem: str | None) -> str:
    """Return why no graph can run: the providers of the precision's graphs, and the problem with CUDA if known."""
    if precision == "auto":
        precision = bundle.manifest.default_precision
    devices = {g.provider for g in bundle.manifest.graphs if g.precision == precision}
    reason = f"it has no {precision} graph for {provider}, only for {', '.join(sorted(devices))}"
    return f"{reason}: {problem}" if problem else reason


def find_provider(wanted: Provider) -> str:
    """Return the provider to run on. Raises ProviderError when `wanted` is "cuda" and CUDA cannot be used."""
    if wanted == "cpu":
        return CPU
    problem = cuda_problem()
    if problem is None:
        return CUDA
    if wanted == "cuda":
        raise ProviderError(f"provider is cuda, but {problem}")
    return CPU


@cache
def cuda_problem() -> str | None:
    """Return why CUDA cannot be used, or None when it can; tests libraries, driver and device once per process."""
    if CUDA not in ort.get_available_providers():
        return "this onnxruntime has no CUDA provider: install onnxruntime-gpu"
    if hasattr(ort, "preload_dlls"):
        with redirect_stdout(
            io.StringIO()
        ):  # the function prints; the loader below names what is missing
            ort.preload_dlls()
    library = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    built_for = getattr(ort, "cuda_version", "").partition(".")[0]
    try:
        ctypes.CDLL(str(library))
        gpu = cuda.find_gpu()
        cuda.check_gpu(gpu, ort.__version__, int(built_for or cuda.CUDA_MAJOR))
    except OSError as error:
        return f"a library is missing: {error}"
    except cuda.NoGpuError as error:
        return str(error)
    try:
        open_graph(TRIAL, CUDA, SessionOptions(threads=1)).run(None, {"x": np.eye(1, dtype="f4")})
    except Exception as error:  # the runtime's errors have no type
        return f"{gpu.name} failed a trial run: {' '.join(str(error).split())}"
    return None


def unused_gpu(session: Session) -> str | None:
    """Return why a session runs on the CPU although the runtime is a GPU build; None if neither holds."""
    if session.provider != CPU or CUDA not in ort.get_available_providers():
        return None
    return session.gpu_problem or cuda_problem() or "the bundle has no graph for the GPU"


def open_graph(graph: Path | bytes, provider: str, options: SessionOptions) -> Any:
    """Open the runtime's session with the settings that serving needs.

    Raises ProviderError if the session runs on another provider, and any error of the runtime.

    graph: the path of a model, or its serialized bytes
    """
    settings = ort.SessionOptions()
    # With a GPU, the only nodes on the CPU compute shapes.
    settings.intra_op_num_threads = 1 if provider == CUDA else options.threads
    settings.inter_op_num_threads = 1
    # During a run, threads that wait for each other spin, because waking them would take longer. After it they sleep.
    settings.add_session_config_entry("session.force_spinning_stop", str(int(not options.spin)))
    settings.enable_cpu_mem_arena = options.arena or provider != CPU
    settings.enable_mem_pattern = (
        False  # shapes differ from batch to batch: patterns would accumulate
    )
    settings.log_severity_level = ERRORS
    providers = [provider] if provider == CPU else [(provider, CUDA_OPTIONS), CPU]
    source = graph if isinstance(graph, bytes) else str(graph)
    # A session that fails on the GPU, at its creation or later, raises an error and does not move to the CPU.
    session = ort.InferenceSession(source, settings, providers=providers, enable_fallback=0)
    if session.get_providers()[0] != provider:
        raise ProviderError(
            f"{provider} was asked for, but the session runs on {session.get_providers()[0]}"
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
    """Return freed memory to the system.

    Otherwise the C library keeps most of it, in fragments that are too small for another bundle.
    """
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
