"""Everything at once: all tasks and lengths, clients that leave, processes that die, models that are swapped."""

import itertools
import statistics
import time
from collections.abc import Iterator

import pytest

from benchmarks.lib.processes import resident_mb
from tests.e2e.clients import asking, lone_answers, seen_by, wrong_of
from tests.e2e.conftest import Server, kill_inference, serving, until
from tests.e2e.test_models import Desk, desk

pytestmark = [pytest.mark.e2e, pytest.mark.exclusive, pytest.mark.nightly]

CLIENTS = 6
KILL_EVERY_S = 4.0
# Codes while no inference process runs. TEI's code is Unhealthy; errors without a code count by their status.
REFUSALS = {"replica_lost", "not_ready", "Unhealthy", "503"}

LOAD = 0.8  # of what the clients get when they wait for nothing
LONG_S, MINUTE_S = 240.0, 60.0
MEMORY = 0.05


def replace_inference(server: Server) -> None:
    """Kill the process that computes, and wait until there is another."""
    kill_inference(server)
    until(lambda: server.get("/health/ready").status == 200, 60)


@pytest.mark.promise("No accepted request is lost, and no answer depends on other requests.")
def test_answers_are_right_while_processes_die(tiny_bundle, seconds):
    """The inference process is killed again and again: what comes while there is none is refused, all else right."""
    with serving(tiny_bundle) as server:
        expected = {"tiny@1": lone_answers(server, "tiny@1")}
        end = time.monotonic() + max(seconds, 2 * KILL_EVERY_S)
        with asking(server, expected, CLIENTS) as clients:
            kills = 0
            while time.monotonic() + KILL_EVERY_S / 2 < end:
                time.sleep(KILL_EVERY_S / 2)
                replace_inference(server)
                kills += 1
                time.sleep(KILL_EVERY_S / 2)
        seen = seen_by(clients)
        assert not wrong_of(clients)
        assert set(seen) <= {"tiny@1", "left", *REFUSALS}
        assert seen["tiny@1"] > 10 * kills
        assert kills
        assert expected["tiny@1"] == lone_answers(server, "tiny@1")


def swaps(at: Desk) -> Iterator[str]:
    """The version that does not answer is dropped and loaded again, and so answers; its name, each time."""
    for version in itertools.cycle("12"):
        dropped = at.order("DELETE", f"/admin/models/tiny@{version}")
        assert 200 == dropped.status, dropped.body
        yield at.load(version)["model"]["id"]


@pytest.mark.promise(
    "After hours of load, swaps, lost clients and lost processes, answers are right and memory has not grown."
)
def test_a_soak(tiny_bundle, tmp_path, seconds):
    """Answers are right, each as its version gives it alone, and memory is where it was after the first minute."""
    with desk(tiny_bundle, tmp_path) as at:
        at.save("1")
        at.load(at.save("2"))
        expected = {f"tiny@{n}": lone_answers(at.server, f"tiny@{n}", at.client) for n in "12"}
        with asking(at.server, expected, CLIENTS, headers=at.client) as clients:
            time.sleep(2.0)
        rate = LOAD * sum(seen_by(clients).values()) / 2.0
        resident = []  # when, and how many MB
        swapping = swaps(at)
        began = time.monotonic()
        with asking(at.server, expected, CLIENTS, headers=at.client, rate=rate) as clients:
            while (past_s := time.monotonic() - began) < max(seconds, KILL_EVERY_S):
                if len(resident) % 8 == 7:
                    replace_inference(at.server)
                answering = next(swapping)
                assert answering == at.vector("tiny")[0]
                resident.append((past_s, resident_mb(at.server.process.pid)))
                time.sleep(min(MINUTE_S / 12, seconds / 8))
        seen = seen_by(clients)
        print(f"{rate:.0f} requests/s, {dict(seen)}, {resident[0]} to {resident[-1]} MB")
        assert not wrong_of(clients)
        assert set(seen) <= {*expected, "left", *REFUSALS}
        assert min(seen[model] for model in expected) > 0
        if seconds >= LONG_S:
            early = [mb for past_s, mb in resident if MINUTE_S <= past_s < 2 * MINUTE_S]
            late = [mb for past_s, mb in resident if past_s > seconds - MINUTE_S]
            assert abs(statistics.median(late) / statistics.median(early) - 1) <= MEMORY
