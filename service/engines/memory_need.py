"""The maximum memory that the service needs on a CPU, and the settings that follow the memory limit.

The need is an upper bound. It assumes that all slots run the largest batch of the longest texts at once, which the
planner rarely does.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from service.core.addresses import address
from service.core.bundle import MANIFEST, BundleError, read_manifest
from service.core.cpu import CPU
from service.core.device_kind import Slots
from service.core.device_places import core_groups
from service.core.device_table import named_kinds
from service.core.manifest import Graph, Manifest, Memory
from service.engines.memory_limit import MIB, ROOT, in_mib, memory_limit
from service.settings import Settings, usable_cores

# Memory of processes without sessions under a flood of requests, measured with Python 3.11 and onnxruntime 1.31.
# Library files count once, because all processes share them.
MAIN = 31 * MIB
HTTP = 84 * MIB  # of each
INFERENCE = 100 * MIB
SINGLE = 120 * MIB  # of the only process, with `http_workers` 0

# For bundles that do not state their memory.
OPENED_PER_BYTE = 1.2  # of a graph's files
BYTES_PER_TOKEN = 64 * 1024  # of a batch, as encoders with 384 hidden units need

STEP = 256  # `max_batch_tokens` is a multiple of this where it follows the limit

log = structlog.get_logger()


class MemoryLimitError(Exception):
    """A memory limit below the need; the message contains both, and settings that fit."""


@dataclass(frozen=True, slots=True)
class GraphNeed:
    """The graph of a bundle that will run. memory: the value that its manifest states, or an estimate

    on_demand: whether `memory_budget` includes its sessions
    """

    manifest: Manifest
    graph: Graph
    memory: Memory
    on_demand: bool = False

    @property
    def is_stated(self) -> bool:
        return self.graph.memory is not None


def fit_memory(settings: Settings, root: Path = ROOT) -> Settings:
    """Return settings in which `max_batch_tokens` and `replicas`, where unset, follow the memory limit on a CPU.

    Raises MemoryLimitError where the bundles need more than the limit with all such settings, and each bundle states
    its memory. Where a bundle does not state it, the need is an estimate, and is logged as a warning.

    root: the root of the file system
    """
    limit = memory_limit(root)
    needs = [need for folder in settings.bundles for need in graph_needs(settings, folder)]
    for folder in on_demand_folders(settings):
        needs += [replace(need, on_demand=True) for need in graph_needs(settings, folder)]
    if limit is None or not needs:
        return settings
    fitted = fit(settings, needs, limit.size)
    if fitted is not None:
        need = in_mib(needed_memory(fitted, needs))
        log.info("memory limit", limit=in_mib(limit.size), need=need, **chosen(fitted, needs))
        return fitted
    *_, fitted = choices(settings, needs)
    message = explain_need(settings, fitted, needs, limit.size)
    if all(need.is_stated for need in needs):
        raise MemoryLimitError(message)
    unstated = [need.manifest.id for need in needs if not need.is_stated]
    log.warning("the memory limit may be too small", problem=message, estimated_for=unstated)
    return fitted


def fit(settings: Settings, needs: Sequence[GraphNeed], limit: int) -> Settings | None:
    """Return the first choice of unset settings whose need is within the limit; None if there is none."""
    fitting = (c for c in choices(settings, needs) if needed_memory(c, needs) <= limit)
    return next(fitting, None)


def choices(settings: Settings, needs: Sequence[GraphNeed]) -> Iterator[Settings]:
    """Yield the settings, and then settings that need less memory: fewer tokens in a batch, then fewer batches."""
    replicas = [settings.replicas]
    if settings.replicas is None:
        number = settings.slots(CPU, usable_cores(), len(needs)).number
        replicas += [number >> shift for shift in range(number.bit_length())]
    tokens: Iterable[int] = [settings.batch_tokens(CPU)]
    if settings.max_batch_tokens is None:
        tokens = range(CPU.batch_tokens, 0, -STEP)
    for one in replicas:
        for most in tokens:
            yield settings.model_copy(update={"replicas": one, "max_batch_tokens": most})


def chosen(settings: Settings, needs: Sequence[GraphNeed]) -> Mapping[str, object]:
    """Return the settings that the need depends on, by name. replicas: the number of batches at once"""
    slots = settings.slots(CPU, usable_cores(), len(needs))
    return {
        "http_workers": settings.http_workers,
        "replicas": slots.number,
        "max_batch_tokens": settings.max_batch_tokens,
    }


def on_demand_folders(settings: Settings) -> list[Path]:
    """Return the bundles of `models_dir`, by name, if their models are opened at their first requests."""
    if settings.models_dir is None or settings.memory_budget is None:
        return []
    if address(settings.models_dir):
        return []  # the watcher lists them, once it has downloaded them
    found = sorted(path.parent for path in settings.models_dir.absolute().glob(f"*/{MANIFEST}"))
    return [path for path in found if not (path.name.startswith(".") or path.is_symlink())]


def graph_needs(settings: Settings, folder: Path) -> list[GraphNeed]:
    """Return the graph of a bundle that will run with its memory.

    Returns an empty list for a bundle that cannot be served; opening it reports the reason.
    """
    try:
        manifest = read_manifest(folder)
        kind = named_kinds(settings.provider)[-1]
        graphs = manifest.graphs_for(kind, settings.precision)[:1]
        memories = [graph.memory or estimate_memory(folder, manifest, graph) for graph in graphs]
        if kind.open is not None:
            # Manifests state ONNX Runtime's memory. OpenVINO copies the weights, of which ONNX Runtime maps a part.
            memories = [m.model_copy(update={"opened": 2 * m.opened}) for m in memories]
    except (BundleError, OSError):
        return []
    return [GraphNeed(manifest, *pair) for pair in zip(graphs, memories, strict=True)]


def estimate_memory(folder: Path, manifest: Manifest, graph: Graph) -> Memory:
    """Return a rough estimate from the sizes of a graph's files."""
    files = [graph.file, *([graph.weights.file] if graph.weights else [])]
    size = sum((folder / file).stat().st_size for file in files)
    tokens = manifest.max_length
    return Memory(opened=int(OPENED_PER_BYTE * size), batches={tokens: BYTES_PER_TOKEN * tokens})


def needed_memory(settings: Settings, needs: Sequence[GraphNeed]) -> int:
    """Return the bytes that all processes need while each slot runs the largest batch of any bundle.

    Groups of cores have their own sessions and batches, so the memory is that of one group times their number.
    """
    slots = settings.slots(CPU, usable_cores(), len(needs))
    sessions = needed_sessions(settings, slots, needs)
    largest = max(need.memory.of_batch(batch_tokens(settings, need)) for need in needs)
    of_device = sessions + slots.number * largest
    return process_memory(settings) + core_groups(settings.devices) * of_device


def needed_sessions(settings: Settings, slots: Slots, needs: Sequence[GraphNeed]) -> int:
    """Return the bytes of all open sessions; on-demand models together take `memory_budget`."""
    opened = sum(need.memory.opened for need in needs if not need.on_demand)
    return len(slots.threads) * opened + (settings.memory_budget or 0)


def process_memory(settings: Settings) -> int:
    """Return the bytes of all processes without sessions and batches."""
    workers = 1 if settings.http_workers is None else settings.http_workers
    if not workers:
        return SINGLE
    return MAIN + workers * HTTP + core_groups(settings.devices) * INFERENCE


def batch_tokens(settings: Settings, need: GraphNeed) -> int:
    """Return the tokens of the largest batch; a single text may exceed `max_batch_tokens`."""
    longest = need.manifest.max_length
    if need.graph.layout == "alone":
        return longest
    most = min(settings.batch_tokens(CPU), settings.batch_size(CPU) * longest)
    return max(most, longest)


def explain_need(
    settings: Settings, least: Settings, needs: Sequence[GraphNeed], limit: int
) -> str:
    """Return a line with the limit, the need and its parts, and the settings to change.

    least: the choice of unset settings that needs least
    """
    need = needed_memory(least, needs)
    slots = least.slots(CPU, usable_cores(), len(needs))
    sessions = needed_sessions(least, slots, needs) * core_groups(least.devices)
    processes = process_memory(least)
    parts = (
        f"processes {in_mib(processes)}, sessions {in_mib(sessions)},"
        f" batches {in_mib(need - processes - sessions)}, {slots.number} at once"
    )
    changes = [*fitting_precision(least, needs, limit), *fitting_changes(settings, needs, limit)]
    changes.append(f"raise the memory limit to {math.ceil(need / MIB)} MiB")
    return (
        f"the memory limit is {in_mib(limit)}, but the service may need {in_mib(need)} ({parts}):"
        f" {', or '.join(changes)}"
    )


def fitting_changes(settings: Settings, needs: Sequence[GraphNeed], limit: int) -> Iterator[str]:
    """Yield values of explicit settings with which the need fits: of one setting or, if none fits, of all of them."""
    free = {"max_batch_tokens": None, "replicas": None, "http_workers": 0}
    explicit = [name for name in free if getattr(settings, name)]
    fits = False
    for names in [*([name] for name in explicit), explicit]:
        fitted = fit(settings.model_copy(update={n: free[n] for n in names}), needs, limit)
        if fitted is not None and not (fits and names is explicit):
            fits = True
            values = chosen(fitted, needs)
            parts = (f"{n} {values[n]} (now {getattr(settings, n)})" for n in names)
            yield f"set {' and '.join(parts)}"


def fitting_precision(settings: Settings, needs: Iterable[GraphNeed], limit: int) -> Iterator[str]:
    """Yield a change to int8 where each bundle states the memory of an int8 graph and the need then fits."""
    quantized = []
    for need in needs:
        graph = next(iter(need.manifest.graphs_for(CPU, "int8")), None)
        if graph is None or graph.memory is None or graph.file == need.graph.file:
            return
        quantized.append(GraphNeed(need.manifest, graph, graph.memory))
    if needed_memory(settings, quantized) <= limit:
        yield "set precision int8"
