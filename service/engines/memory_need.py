"""The maximum memory that the service needs on a CPU, and the check of the memory limit at the start.

The need is an upper bound. It assumes that all slots run the largest batch of the longest texts at once, which the
planner rarely does.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from service.core.bundle import Bundle, Graph, Manifest, Memory
from service.core.cpu import CPU
from service.memory_limit import MIB, ROOT, in_mib, memory_limit
from service.scheduling.cost_model import SHAPES
from service.settings import Settings, usable_cores

# Memory of processes without sessions and requests, measured with Python 3.11 and onnxruntime 1.31. Library files count
# once, because all processes share them.
MAIN = 28 * MIB
HTTP = 66 * MIB  # of each
INFERENCE = 90 * MIB
SINGLE = 130 * MIB  # of the only process, with `http_workers` 0

# For bundles that do not state their memory.
OPENED_PER_BYTE = 1.2  # of a graph's files
BYTES_PER_TOKEN = 64 * 1024  # of a batch, as encoders with 384 hidden units need

STEP = 256  # a message suggests multiples of this for `max_batch_tokens`

log = structlog.get_logger()


class MemoryLimitError(Exception):
    """A memory limit below the need; the message contains both, and settings that fit."""


@dataclass(frozen=True, slots=True)
class GraphNeed:
    """The graph of a bundle that will run. memory: the value that its manifest states, or an estimate"""

    manifest: Manifest
    graph: Graph
    memory: Memory

    @property
    def is_stated(self) -> bool:
        return self.graph.memory is not None


def check_memory(settings: Settings, bundles: Sequence[Bundle], root: Path = ROOT) -> None:
    """Compare the need of bundles on a CPU with the memory limit.

    Raises MemoryLimitError where the need is above the limit and each bundle states its memory. Where a bundle does not
    state it, the need is an estimate, and is logged as a warning.

    root: the root of the file system
    """
    limit = memory_limit(root)
    needs = [need for bundle in bundles for need in graph_needs(settings, bundle)]
    if limit is None or needed_memory(settings, needs) <= limit.size:
        return
    message = explain_need(settings, needs, limit.size)
    if all(need.is_stated for need in needs):
        raise MemoryLimitError(message)
    unstated = [need.manifest.id for need in needs if not need.is_stated]
    log.warning("the memory limit may be too small", problem=message, estimated_for=unstated)


def graph_needs(settings: Settings, bundle: Bundle) -> list[GraphNeed]:
    """Return the graph that will run with its memory; an empty list where the bundle lacks the precision."""
    manifest = bundle.manifest
    graph = next(iter(manifest.graphs_for(CPU, settings.precision)), None)
    if graph is None:
        return []  # opening the bundle reports that
    return [GraphNeed(manifest, graph, graph.memory or estimate_memory(bundle, graph))]


def estimate_memory(bundle: Bundle, graph: Graph) -> Memory:
    """Return a rough estimate from the sizes of a graph's files."""
    files = [graph.file, *([graph.weights.file] if graph.weights else [])]
    size = sum(bundle.file(file).stat().st_size for file in files)
    tokens = bundle.manifest.max_length
    return Memory(opened=int(OPENED_PER_BYTE * size), batches={tokens: BYTES_PER_TOKEN * tokens})


def needed_memory(settings: Settings, needs: Sequence[GraphNeed]) -> int:
    """Return the bytes that all processes need while each slot runs the largest batch of any bundle."""
    slots = settings.slots(CPU, usable_cores(), max(len(needs), 1))
    sessions = len(slots.threads) * sum(need.memory.opened for need in needs)
    largest = max((need.memory.of_batch(batch_tokens(settings, need)) for need in needs), default=0)
    # The C library keeps the bytes of the largest warm-up batch for the thread that opened the bundle.
    warm_up = max((need.memory.of_batch(warm_up_tokens(need)) for need in needs), default=0)
    return process_memory(settings) + sessions + warm_up + slots.number * largest


def process_memory(settings: Settings) -> int:
    """Return the bytes of all processes without sessions and batches."""
    workers = 1 if settings.http_workers is None else settings.http_workers
    return MAIN + workers * HTTP + INFERENCE if workers else SINGLE


def batch_tokens(settings: Settings, need: GraphNeed) -> int:
    """Return the tokens of the largest batch; a single text may exceed `max_batch_tokens`."""
    longest = need.manifest.max_length
    if need.graph.layout == "alone":
        return longest
    most = min(settings.max_batch_tokens, settings.batch_size(CPU) * longest)
    return max(most, longest)


def warm_up_tokens(need: GraphNeed) -> int:
    """Return the tokens of the largest batch of the warm-up, which ignores `max_batch_tokens`."""
    unbatched = need.graph.layout == "alone"
    longest = need.manifest.max_length
    return max((1 if unbatched else size) * min(length, longest) for size, length in SHAPES)


def explain_need(settings: Settings, needs: Sequence[GraphNeed], limit: int) -> str:
    """Return a line with the limit, the need and its parts, and the settings to change."""
    need = needed_memory(settings, needs)
    slots = settings.slots(CPU, usable_cores(), max(len(needs), 1))
    sessions = len(slots.threads) * sum(one.memory.opened for one in needs)
    processes = process_memory(settings)
    parts = (
        f"processes {in_mib(processes)}, sessions {in_mib(sessions)},"
        f" warm-up and {slots.number} batches at once {in_mib(need - processes - sessions)}"
    )
    changes = [f"raise the memory limit to {math.ceil(need / MIB)} MiB"]
    if fitting := fitting_tokens(settings, needs, limit):
        changes.insert(0, f"set max_batch_tokens {fitting} (now {settings.max_batch_tokens})")
    elif slots.number > 1:
        changes.insert(0, f"set threads and replicas below {slots.number}")
    if smaller := fitting_precision(settings, needs, limit):
        changes.insert(0, f"set precision {smaller}")
    return (
        f"the memory limit is {in_mib(limit)}, but the service may need {in_mib(need)} ({parts}):"
        f" {', or '.join(changes)}"
    )


def fitting_tokens(settings: Settings, needs: Sequence[GraphNeed], limit: int) -> int | None:
    """Return the largest `max_batch_tokens` below the current one with which the need fits; None if none does."""
    longest = max(need.manifest.max_length for need in needs)
    top = min(settings.max_batch_tokens, max(batch_tokens(settings, need) for need in needs))
    for tokens in range((top - 1) // STEP * STEP, 0, -STEP):
        changed = settings.model_copy(update={"max_batch_tokens": tokens})
        if needed_memory(changed, needs) <= limit:
            return tokens
        if tokens < longest:
            break
    return None


def fitting_precision(settings: Settings, needs: Iterable[GraphNeed], limit: int) -> str | None:
    """Return "int8" where each bundle states the memory of an int8 graph and the need then fits; None otherwise."""
    changed = settings.model_copy(update={"precision": "int8"})
    quantized = []
    for need in needs:
        graph = next(iter(need.manifest.graphs_for(CPU, "int8")), None)
        if graph is None or graph.memory is None or graph.file == need.graph.file:
            return None
        quantized.append(GraphNeed(need.manifest, graph, graph.memory))
    return "int8" if needed_memory(changed, quantized) <= limit else None
