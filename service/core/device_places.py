"""The devices of a machine, each for an inference process of its own: GPUs, or groups of cores.

A text names them: `auto`, `cpu`, `cpu*2` (two groups of cores), or `cuda:0,cuda:1`.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from service.core.device_table import expected_kind

NODES = Path("/sys/devices/system/node")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """A device. cores: the cores of its process, empty for all; environment: makes only this GPU visible"""

    name: str
    cores: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def enter(self) -> None:
        """Use only this device in this process; before the process imports the runtime."""
        os.environ.update(self.environment)
        if self.cores:
            os.sched_setaffinity(0, self.cores)


def check_devices(text: str) -> str:
    """Return the text without blanks. Raises ValueError unless it names devices."""
    text = re.sub(r"\s", "", text.lower())
    gpus = text.split(",")
    named = all(re.fullmatch(r"cuda:\d{1,3}", gpu) for gpu in gpus) and len({*gpus}) == len(gpus)
    if not named and not re.fullmatch(r"auto|cpu(\*[1-9]\d?)?", text):
        raise ValueError(
            f"{text!r} names no devices: use auto, cpu, cpu*2 for two groups of cores, or GPUs such as cuda:0,cuda:1"
        )
    return text


def device_places(text: str, provider: str) -> list[Place]:
    """Return the devices that a checked text names; one for `auto` on a CPU.

    Raises ValueError for more groups than cores. provider: the setting of this name
    """
    if text == "auto":
        kind = expected_kind(provider)
        if kind.number() == 1:
            return [Place(kind.name)]
        text = ",".join(f"{kind.name}:{number}" for number in range(kind.number()))
    if text.startswith("cuda"):
        visible = [gpu for gpu in os.environ.get(VISIBLE, "").split(",") if gpu]
        numbers = [int(gpu.partition(":")[2]) for gpu in text.split(",")]
        if visible and max(numbers) >= len(visible):
            raise ValueError(f"{text}: only {len(visible)} GPUs are visible, by {VISIBLE}")
        return [
            Place(f"cuda:{n}", environment={VISIBLE: visible[n] if visible else str(n)})
            for n in numbers
        ]
    groups = core_groups(text)
    if groups == 1:
        return [Place("cpu")]
    cores = by_node(os.sched_getaffinity(0))
    if groups > len(cores):
        raise ValueError(f"{text}: there are only {len(cores)} cores")
    return [Place(f"cpu:{group}", own) for group, own in enumerate(split(cores, groups))]


def core_groups(text: str) -> int:
    """Return the number of groups of cores that a checked text names; 1 for GPUs."""
    return int(text.partition("*")[2] or 1)


def by_node(cores: Iterable[int], nodes: Path = NODES) -> list[int]:
    """Return cores in the order of their NUMA nodes, so that a group shares a node where it can."""
    node_of = {
        core: int(node.name[4:])
        for node in nodes.glob("node[0-9]*")
        for core in read_cores((node / "cpulist").read_text())
    }
    return sorted(cores, key=lambda core: (node_of.get(core, 0), core))


def read_cores(text: str) -> list[int]:
    """Return the numbers of a list such as `0-3,8`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [core for low, _, high in ranges for core in range(int(low), int(high or low) + 1)]


def split(cores: Sequence[int], groups: int) -> list[tuple[int, ...]]:
    """Divide cores into groups of equal size, or of sizes that differ by one."""
    rest = iter(cores)
    sizes = [(len(cores) + group) // groups for group in range(groups)]
    return [tuple(islice(rest, size)) for size in sizes]
