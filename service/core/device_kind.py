"""The record that describes a kind of device: its rules, the graphs that it runs, and how it is found and opened."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple


class NoDeviceError(Exception):
    """No device of a kind that the runtime can use; the message contains the reason and what to do."""


class Slots(NamedTuple):
    """The number of batches that run at once, and the threads of a batch by the slots that it takes: one, or many."""

    number: int
    threads: Mapping[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKind:
    """A kind of device that ONNX Runtime can compute on."""

    name: str  # in the setting `provider` and in the `provider` of a manifest's graphs
    provider: str  # ONNX Runtime's name
    label: str  # the device in a message
    graphs: tuple[str, ...]  # values of a graph's `provider` that the device can run
    batch_tokens: int  # most tokens of a batch, where `max_batch_tokens` is unset
    batch_size: int  # most sequences of a batch, where `max_batch_size` is unset
    # Rule from the settings `replicas` and `threads` and the number of bundles.
    slots: Callable[[int | None, int, int], Slots]
    http_workers: Callable[[int], int]  # rule from the number of usable cores
    # What the precision `auto` tries in this order before the bundle's default precision.
    precisions: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)  # ONNX Runtime's options of the provider
    package: str = "onnxruntime"  # the distribution of the runtime that has the provider
    # Returns the name of the device that the runtime, its argument, can use; raises NoDeviceError. None for a device
    # that every machine has.
    find: Callable[[ModuleType], str] | None = None
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
