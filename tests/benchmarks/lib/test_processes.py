"""All processes of a server are counted, stopped and resumed, in every process group."""

import subprocess
import sys
import time

import pytest

from benchmarks.lib import processes

# A process, its child in a group of its own, and that one's child with a second thread; the last says when all run.
TREE = """
import subprocess, sys, threading, time
depth = int(sys.argv[1])
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]], process_group=0)
else:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    print("running", flush=True)
time.sleep(600)
"""


@pytest.fixture
def root():
    """The id of the first of three processes."""
    command = [sys.executable, "-c", TREE, "2", TREE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"running\n"
        known = processes.started(process.pid)
        yield process.pid
        processes.kill(known)
        assert all(wait_for(pid, "", "Z") in ("", "Z") for pid, _ in known)


def states(root):
    return "".join(stat[0] for _, stat in processes.members(root))


def wait_for(root, *wanted):
    """The states of a tree's processes once they are one of the wanted, or after a minute."""
    end = time.monotonic() + 60
    while states(root) not in wanted and time.monotonic() < end:
        time.sleep(0.01)
    return states(root)


@pytest.mark.e2e
def test_tree(root):
    """All three are found, parents first, and what they take is summed."""
    found = [*processes.members(root)]
    pids = [pid for pid, _ in found]

    assert [root, *pids[:2]] == [pids[0], *(int(stat[processes.PARENT]) for _, stat in found[1:])]
    assert len({stat[2] for _, stat in found}) == 3  # each in a group of its own
    assert 0.2 <= processes.cpu_s(root) < 10
    assert 3 < processes.resident_mb(root) <= processes.peak_mb(root)
    assert processes.resident_mb(pids[2]) < processes.resident_mb(root)


@pytest.mark.e2e
def test_rest_and_wake(root):
    """All three stand still, and all three go on."""
    processes.rest(root)
    assert wait_for(root, "TTT") == "TTT"
    processes.wake(root)
    assert wait_for(root, "SSS") == "SSS"


def test_waiting_ends_when_a_tree_is_idle():
    """It takes as long as the load, and not the limit."""
    load = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", load]) as process:
        began = time.monotonic()
        processes.wait_until_idle(process.pid)
        assert 0.9 < time.monotonic() - began < processes.SETTLE_S
        process.kill()


def test_nobody():
    """A process that has ended has no memory, and signals to it do nothing."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    processes.rest(ended.pid)
    assert [] == [*processes.members(ended.pid)]
    assert processes.cpu_s(ended.pid) == processes.resident_mb(ended.pid) == 0
