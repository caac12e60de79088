"""What a figure was measured on: it means nothing without."""

import re
from pathlib import Path

from service.settings import usable_cores

FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")


def describe() -> dict[str, object]:
    """The usable cores, the processor, and those of its extensions that matter to matrix products."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    flags = set(re.findall(r"\w+", first(r"flags\s*:(.*)", info)))
    return {
        "cores": usable_cores(),
        "processor": first(r"model name\s*: (.*)", info),
        "flags": [flag for flag in FLAGS if flag in flags],
    }


def first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found.group(1).strip() if found else ""
