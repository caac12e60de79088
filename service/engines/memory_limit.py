"""The memory limit of the service by cgroup v1 and v2, and the processes that the system killed for lack of memory.

Each function takes the root of the file system, so that tests can pass another directory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from service.settings import cgroup_directories, read_text

ROOT = Path("/")
NO_LIMIT = 2**60  # v1 contains a number near 2 ** 63 where there is no limit
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The smallest limit of a cgroup and its ancestors; directory: of the cgroup that has it."""

    size: int  # bytes
    directory: Path

    @property
    def peak(self) -> int | None:
        """The peak memory of that cgroup in bytes; None where the system does not record it."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            if (text := read_text(self.directory / name).strip()).isdigit():
                return int(text)
        return None


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """Return the smallest memory limit of this process's cgroup and its ancestors; None where there is none."""
    found = []
    for directory in cgroup_directories(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_text(directory / name).strip()
            if text.isdigit() and int(text) < NO_LIMIT:
                found.append(MemoryLimit(int(text), directory))
    return min(found, key=lambda limit: limit.size, default=None)


def oom_kills(root: Path = ROOT) -> Mapping[Path, int]:
    """Return the number of processes killed for lack of memory in each of this process's cgroups, by directory."""
    return {
        directory: count
        for directory in cgroup_directories(root, "memory")
        for count in read_kills(directory)
    }


def read_kills(directory: Path) -> Iterator[int]:
    """Yield the counter of one directory, from `memory.events` (v2) or `memory.oom_control` (v1)."""
    for name in ("memory.events", "memory.oom_control"):
        for line in read_text(directory / name).splitlines():
            match line.split():
                case ["oom_kill", count] if count.isdigit():
                    yield int(count)


def explain_kill(before: Mapping[Path, int], root: Path = ROOT) -> str | None:
    """Return the limit, the peak and what to set, if a counter has grown since `before`; None otherwise."""
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
