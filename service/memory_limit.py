"""The memory that the system lets the service have, by cgroup v1 and v2, and what ended for want of it.

Each function takes the root of the file system, so that tests pass a directory in its place.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from service.settings import cgroup_directories, read_text

ROOT = Path("/")
NO_LIMIT = 2**60  # v1 has a number near 2 ** 63 where there is no limit
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit of a cgroup or its ancestors; directory: of the cgroup that sets it."""

    size: int  # bytes
    directory: Path

    @property
    def peak(self) -> int | None:
        """The largest use of that cgroup in bytes, where the system counts it."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            if (text := read_text(self.directory / name).strip()).isdigit():
                return int(text)
        return None


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """The tightest memory limit of this process's cgroup and its ancestors; None where there is none."""
    found = []
    for directory in cgroup_directories(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_text(directory / name).strip()
            if text.isdigit() and int(text) < NO_LIMIT:
                found.append(MemoryLimit(int(text), directory))
    return min(found, key=lambda limit: limit.size, default=None)


def oom_kills(root: Path = ROOT) -> Mapping[Path, int]:
    """How many processes each of this process's cgroups has lost for want of memory, by directory."""
    return {
        directory: count
        for directory in cgroup_directories(root, "memory")
        for count in read_kills(directory)
    }


def read_kills(directory: Path) -> Iterator[int]:
    """The counter of one directory: in `memory.events` (v2) or `memory.oom_control` (v1)."""
    for name in ("memory.events", "memory.oom_control"):
        for line in read_text(directory / name).splitlines():
            match line.split():
                case ["oom_kill", count] if count.isdigit():
                    yield int(count)


def explain_kill(before: Mapping[Path, int], root: Path = ROOT) -> str | None:
    """Why a process was killed, if a counter has grown since `before`: the limit, the peak, and what to set."""
    if all(count <= before.get(directory, count) for directory, count in oom_kills(root).items()):
        return None
    limit = memory_limit(root)
    if limit is None:
        return "out of memory: the machine has no more; set a smaller max_batch_tokens, or precision int8"
    peak = "unknown" if limit.peak is None else in_mib(limit.peak)
    return (
        f"out of memory: limit {in_mib(limit.size)}, peak {peak}; raise the memory limit, or set a smaller"
        " max_batch_tokens, or precision int8"
    )


def in_mib(size: int) -> str:
    return f"{size // MIB} MiB"
