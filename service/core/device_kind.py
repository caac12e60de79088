"""The record that describes a kind of device: its rules, the graphs that it runs, and how it is found and opened."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class NoDeviceError(Exception):
    """No device of a kind that the runtime can use; the message contains the reason and what to do."""


class Slots(NamedTuple):
    """The number of batches that run at once, and the threads of a batch by the slots that it takes: one, or many."""

    number: int
    threads: Mapping[int, int]


class ReducedPrecision(NamedTuple):
    """A precision that a kind of device computes with the graphs of another one."""

    graphs: str  # the precision of these graphs
    min_cosine: float  # with the goldens, of each head
    problem: Callable[[], str | None]  # why this machine cannot compute it, or None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKind:
    """A kind of device that a runtime can compute on."""

    name: str  # in the setting `provider` and in the `provider` of a manifest's graphs
    provider: str  # the runtime's name
    label: str  # the device in a message
    graphs: tuple[str, ...]  # values of a graph's `provider` that the device can run
    batch_tokens: int  # most tokens of a batch, where `max_batch_tokens` is unset
    batch_size: int  # most sequences of a batch, where `max_batch_size` is unset
    # Rule from the settings `replicas` and `threads` and the number of bundles.
    slots: Callable[[int | None, int, int], Slots]
    http_workers: Callable[[int], int]  # rule from the number of usable cores
    # What the precision `auto` tries in this order before the bundle's default precision.
    precisions: tuple[str, ...] = ()
    # By the value of the setting `precision`, which must name it: `auto` never selects one.
    reduced: Mapping[str, ReducedPrecision] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)  # ONNX Runtime's options of the provider
    # The runs of a packed graph have a multiple of this many rows (tokens), so that the runtime compiles fewer kernels.
    row_multiple: int = 1
    package: str = "onnxruntime"  # the distribution of the runtime that has the provider
    # Returns the name of the device that the runtime, its argument, can use; raises NoDeviceError. None for a device
    # that every machine has.
    find: Callable[[ModuleType], str] | None = None
    # Opens a graph for this many threads of a run, runs at the same time, and precision, where the runtime is not ONNX
    # Runtime. Returns an object with the methods of its `InferenceSession`.
    open: Callable[[Path | bytes, int, int, str], Any] | None = None
    # Whether the device may be found; does not load the runtime.
    is_present: Callable[[], bool] = lambda: True
    # The devices of this kind that the process can see.
    number: Callable[[], int] = lambda: 1
    # Bytes of the device's own memory; None for a device that uses the machine's memory and cores.
    memory: Callable[[], int] | None = None

    @property
    def on_host(self) -> bool:
        """Whether the device uses the machine's memory and cores."""
        return self.memory is None


def shared_slots(replicas: int, threads: int) -> Slots:
    """Return `replicas` slots, each with all threads, or with one thread where there are at most as many threads."""
    return Slots(replicas, {1: threads if replicas < threads else 1})
