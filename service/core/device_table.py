"""The kinds of device that the service can compute on.

A further kind is a file such as `service.core.cuda`, and a row of `KINDS`.
"""

from collections.abc import Sequence

from pydantic_core import PydanticCustomError

from service.core.cpu import CPU
from service.core.cuda import CUDA
from service.core.device_kind import DeviceKind
from service.core.openvino import OPENVINO

# The setting `auto` selects the first usable one up to the CPU.
KINDS: tuple[DeviceKind, ...] = (CUDA, CPU, OPENVINO)


def named_kinds(name: str) -> Sequence[DeviceKind]:
    """Return the kind of device with this name, or the kinds that `auto` tries in this order, up to the CPU."""
    if name == "auto":
        return KINDS[: KINDS.index(CPU) + 1]
    return [{kind.name: kind for kind in KINDS}[name]]


def preferred_kinds(kind: DeviceKind) -> Sequence[DeviceKind]:
    """Return the kinds of device that `auto` tries before this one."""
    return KINDS[: min(KINDS.index(kind), KINDS.index(CPU))]


def expected_kind(name: str) -> DeviceKind:
    """Return the kind of device that the setting `provider` will probably select, without loading the runtime."""
    return next((kind for kind in named_kinds(name) if kind.is_present()), CPU)


def check_name(value: str, other: str) -> str:
    """Return the name of a kind of device, or `other`. Raises PydanticCustomError for any other value."""
    known = sorted([other, *(kind.name for kind in KINDS)])
    if value in known:
        return value
    expected = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
    raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
