"""The description of the machine that a figure was measured on."""

import platform
import re
import timeit
from functools import cache
from pathlib import Path

from service.settings import usable_cores

FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")


def describe() -> dict[str, object]:
    """Return the usable cores, the processor with its extensions for matrix products, and the interpreter."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    flags = set(re.findall(r"\w+", first(r"flags\s*:(.*)", info)))
    return {
        "cores": usable_cores(),
        "processor": first(r"model name\s*: (.*)", info),
        "flags": [flag for flag in FLAGS if flag in flags],
        "python": platform.python_version(),
        "python_call_ns": round(python_call_ns()),
    }


@cache
def python_call_ns() -> float:
    """Return the nanoseconds of a nested Python call, which differ between builds of Python. Measured once."""

    def inner(one: int, two: int) -> int:
        return one + two

    def outer() -> int:
        return inner(1, two=2)

    number = 100_000
    return min(timeit.repeat(outer, number=number, repeat=5)) / number * 1e9


def first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found.group(1).strip() if found else ""
