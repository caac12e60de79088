from collections.abc import Mapping
from pathlib import Path

import pytest

from service.engines.memory_limit import explain_kill, memory_limit, oom_kills

V2 = {
    "proc/self/cgroup": "0::/pod/app\n",
    "sys/fs/cgroup/pod/memory.max": "536870912\n",
    "sys/fs/cgroup/pod/memory.peak": "536000000\n",
    "sys/fs/cgroup/pod/memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 0\n",
    "sys/fs/cgroup/pod/app/memory.max": "max\n",
    "sys/fs/cgroup/pod/app/memory.events": "oom 0\noom_kill 0\n",
}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "268435456\n",
    "sys/fs/cgroup/memory/docker/x/memory.max_usage_in_bytes": "268435456\n",
    "sys/fs/cgroup/memory/docker/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
}
# A container that sees its own cgroup as the root, under the path that it has outside.
INSIDE = {
    "proc/self/cgroup": "4:memory:/docker/x\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "104857600\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}
NONE = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/memory.events": "oom_kill 2\n",
}


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "size", "peak"),
    [
        (V2, 512 * 2**20, 536_000_000),
        (V1, 256 * 2**20, 256 * 2**20),
        (INSIDE, 100 * 2**20, None),
        (V2 | {"sys/fs/cgroup/pod/app/memory.max": "1048576\n"}, 2**20, None),
        (NONE, None, None),
        ({}, None, None),
    ],
)
def test_the_tightest_limit_counts(tmp_path, files, size, peak):
    """It is that of the process's cgroup or of an ancestor, and the peak is counted where the limit is set."""
    found = memory_limit(tree(tmp_path, files))
    assert (size, peak) == ((None, None) if found is None else (found.size, found.peak))


@pytest.mark.parametrize(
    ("files", "change", "reason"),
    [
        (V2, {"sys/fs/cgroup/pod/memory.events": "oom_kill 2\n"}, "out of memory: limit 512 MiB, peak 511 MiB; "),
        (
            V1,
            {"sys/fs/cgroup/memory/docker/x/memory.oom_control": "under_oom 0\noom_kill 4\n"},
            "out of memory: limit 256 MiB, peak 256 MiB; ",
        ),
        (
            INSIDE,
            {"sys/fs/cgroup/memory/memory.oom_control": "oom_kill 3\n"},
            "out of memory: limit 100 MiB, peak unknown; ",
        ),
        (NONE, {"sys/fs/cgroup/memory.events": "oom_kill 3\n"}, "out of memory: the machine has"),
    ],
)  # fmt: skip
def test_a_kill_is_explained_by_a_counter(tmp_path, files, change, reason):
    """Only a counter that has grown since the process was started explains its end."""
    before = oom_kills(tree(tmp_path, files))
    assert explain_kill(before, tmp_path) is None
    tree(tmp_path, change)
    explained = explain_kill(before, tmp_path)
    assert explained is not None
    assert explained.startswith(reason)
    assert "max_batch_tokens" in explained


def test_without_cgroups_nothing_is_explained(tmp_path):
    """No file, no counter."""
    assert explain_kill({}, tmp_path) is None
