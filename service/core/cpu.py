"""The CPU as a kind of device, which every machine has."""

import re
from functools import cache
from pathlib import Path

from service.core.device_kind import DeviceKind, Slots, shared_slots

FEATURES = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16"),
    *("asimd", "i8mm", "bf16"),
)


def slots(replicas: int | None, threads: int, bundles: int) -> Slots:
    """Return a slot per thread, and one on many threads for single requests; or the given number of slots.

    The threads for single requests belong to a bundle. They are divided among the bundles, so that their number does
    not grow with the bundles.
    """
    if replicas is not None:
        return shared_slots(replicas, threads)
    wide = max(threads // bundles, 1)
    return Slots(threads, {1: 1, wide: wide})


@cache
def vector_features() -> tuple[str, ...]:
    """Return the features of this processor by which kernels are chosen, which round differently."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return tuple(name for name in FEATURES if name in present)


CPU = DeviceKind(
    name="cpu",
    provider="CPUExecutionProvider",
    label="the CPU",
    graphs=("cpu", "any"),
    batch_tokens=768,  # more needs more memory and gains no speed
    batch_size=64,
    slots=slots,
    http_workers=lambda cores: 1,
)
