"""`quartet doctor`: check this machine and this installation, one line for each check."""

import argparse
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from quartet.command import DISTRIBUTION
from service import __version__
from service.core import bundle_cache
from service.core.cpu import vector_features
from service.engines.memory_limit import memory_limit
from service.settings import affinity_cores, cgroup_cores, usable_cores

DESCRIPTION = """\
Check this machine and this installation, one line for each check. A line with !! names what to do; the exit status is
then 1.
"""
LEAST_FILES = 1100  # max_connections and the service's own
LEAST_BYTES = 300 * 1024**2  # that the default bundle needs
LEAST_DISK = 2 * 10**9
TIMEOUT_S = 3.0
PORT = 8000

# What was found, and what to do; "" where all is well.
Finding = tuple[str, str]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    return argparse.ArgumentParser("quartet doctor", description=DESCRIPTION)


def main() -> int:
    """Print the result of each check. Returns 1 where there is something to do."""
    parser().parse_args()
    width = max(map(len, CHECKS))
    to_do = 0
    for name, check in CHECKS.items():
        for found, advice in check():
            to_do += bool(advice)
            print(f"{name:<{width}}  {'!!' if advice else 'ok'}  {found}{advice and f': {advice}'}")
    return 1 if to_do else 0


def check_versions() -> Iterator[Finding]:
    yield f"{__version__}, Python {platform.python_version()}", ""


def check_processor() -> Iterator[Finding]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    present = vector_features()
    found = (
        f"{model[1] if model else platform.machine()}: {' '.join(present) or 'no vector features'}"
    )
    slow = platform.machine() == "x86_64" and "avx2" not in present
    yield (
        found,
        "without AVX2 the runtime is several times slower: use another machine" if slow else "",
    )


def check_cores() -> Iterator[Finding]:
    quota = cgroup_cores()
    limit = f", quota of {quota:g}" if quota is not None else ""
    found = f"{usable_cores()} of {os.cpu_count()} usable (affinity of {affinity_cores()}{limit})"
    small = quota is not None and quota < 1
    yield found, "less than one core delays each answer: raise the CPU limit" if small else ""


def check_memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    size = min(total, limit.size) if limit else total
    found = f"{size / 1024**2:,.0f} MiB{', a limit of the cgroup' if limit and limit.size < total else ''}"
    yield (
        found,
        "" if size >= LEAST_BYTES else "the default bundle may not fit: raise the memory limit",
    )


def check_device() -> Iterator[Finding]:
    from service.core.device_table import KINDS
    from service.core.session import device_problem, runtime_of

    for kind in KINDS:
        problem = device_problem(kind)
        found = problem or f"usable, {runtime_of(kind)}"
        for precision, reduced in kind.reduced.items():
            if not reduced.problem():
                found += f"; for speed: --provider {kind.name} --precision {precision}"
        yield f"{kind.name}: {found}", ""
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        run = subprocess.run(query, capture_output=True, text=True, check=False)
        lost = device_problem(KINDS[0]) is not None
        advice = 'pip install "quartet-serving[gpu]" in place of the extra cpu' if lost else ""
        yield f"GPU {' '.join(run.stdout.split())}", advice


def check_port() -> Iterator[Finding]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", PORT))
        except OSError as error:
            yield f"{PORT}: {error.strerror}", "end the other program, or use --port"
        else:
            yield f"{PORT} is free", ""


def check_limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield (
        f"{files} open files",
        "" if files >= LEAST_FILES else f"ulimit -n {LEAST_FILES}, or lower max_connections",
    )


def check_dependencies() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield "a checkout: constraints.txt has the versions", ""
        return
    outside = []
    for requirement in map(Requirement, lines):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = "missing"
        if version == "missing" or not requirement.specifier.contains(version, prereleases=True):
            outside.append(f"{requirement.name} {version}, tried {requirement.specifier}")
    advice = f'pip install --upgrade "{DISTRIBUTION}[cpu]"' if outside else ""
    yield "; ".join(outside) or "all in the tried ranges", advice


def check_training() -> Iterator[Finding]:
    needed = ("torch", "onnx", "transformers")
    missing = [name for name in needed if not is_installed(name)]
    found = (
        "train and export from checkpoints"
        if not missing
        else f"{', '.join(missing)} not installed"
    )
    yield (
        found + (f' (pip install "{DISTRIBUTION}[train]" to train and export)' if missing else ""),
        "",
    )


def is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_hub() -> Iterator[Finding]:
    url = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        yield "off: HF_HUB_OFFLINE is set; models come from the caches", ""
        return
    try:
        urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S
        ).close()
    except urllib.error.HTTPError as error:
        yield f"{url} answers {error.code}", ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        yield (
            f"{url} not reachable: {reason}",
            "quartet pull NAME --to FILE.tar on a machine with a network, or HF_ENDPOINT",
        )
    else:
        yield f"{url} is reachable", ""


def check_cache() -> Iterator[Finding]:
    folder = bundle_cache.root()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{folder}: {len(bundle_cache.entries())} models, {free / 1e9:.1f} GB free"
    if not os.access(place, os.W_OK):
        yield found, f"{place} cannot be written: set XDG_CACHE_HOME"
    else:
        yield found, "" if free > LEAST_DISK else "free some space, or set XDG_CACHE_HOME"


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "quartet": check_versions,
    "processor": check_processor,
    "cores": check_cores,
    "memory": check_memory,
    "device": check_device,
    "port": check_port,
    "files": check_limits,
    "packages": check_dependencies,
    "training": check_training,
    "hub": check_hub,
    "cache": check_cache,
}
