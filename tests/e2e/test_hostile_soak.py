"""All attacks at once next to ordinary traffic, compared with the same attacks on a server that does nothing."""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.lib.processes import resident_mb
from service.keys import make_key, record
from tests.conftest import ROOT
from tests.e2e.clients import Client, Expected, asking, lone_answers, seen_by, wrong_of
from tests.e2e.conftest import Server, children, serving

pytestmark = [pytest.mark.e2e, pytest.mark.exclusive, pytest.mark.nightly]

CLIENTS = 6
SHARE = 0.05  # of one core, for all attacks together
HALF = 0.5  # of what the clients get when they wait for nothing
LONG_S = 600.0  # from here on, five rounds; the promised ratio holds for these
SLOWER, SLOWER_IN_SHORT = 1.2, 1.5  # p99 next to attacks, in multiples of the control's
GROWTH_MB = 256.0  # what the service may take in addition while it is attacked
FILES = 4096


class TimedClient(Client):
    """A client that records the seconds of its requests."""

    def run(self) -> None:
        self.lasted: list[float] = []
        super().run()

    def ask(self, number: int) -> None:
        began = time.monotonic()
        super().ask(number)
        self.lasted.append(time.monotonic() - began)


class Round(NamedTuple):
    """What ordinary clients saw for some seconds, and what the attackers report of themselves."""

    p99_s: float
    requests: int
    seen: Counter[str]
    wrong: Sequence[object]
    most_mb: float
    attacks: dict[str, float]


@contextmanager
def sink() -> Iterator[int]:
    """The port of a server that reads and drops everything."""
    command = [sys.executable, "-m", "tests.e2e.sink"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def next_to_attacks(
    server: Server, expected: Expected, headers: dict[str, str], rate: float, command: list[str]
) -> Round:
    """Send ordinary requests at a rate for as long as the attackers run."""
    most = 0.0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as attackers:
        with asking(
            server, expected, CLIENTS, headers=headers, rate=rate, kind=TimedClient
        ) as clients:
            while attackers.poll() is None:
                most = max(most, resident_mb(server.process.pid))
                time.sleep(0.5)
        assert attackers.stdout is not None
        told = json.loads(attackers.stdout.read())
    lasted = [seconds for client in clients for seconds in client.lasted]
    p99_s = float(np.percentile(lasted, 99))
    return Round(p99_s, len(lasted), seen_by(clients), wrong_of(clients), most, told)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let the processes that this test starts open enough files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        if hard != resource.RLIM_INFINITY and hard < FILES:
            pytest.skip(f"the system allows {hard} open files, and the attackers need {FILES}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.promise(
    "All attacks at once, with a twentieth of a core, cause no lost answer and no restart, and add little latency."
)
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("many_files")
def test_a_hostile_soak(tasks_bundle, tmp_path, seconds, pytestconfig, capsys):
    """No wrong answer, no restart, little memory, and a p99 near the control's.

    `--seconds 1200` for five rounds of two minutes, each with its control.
    """
    pytest.importorskip("grpc")
    rounds = 5 if seconds >= LONG_S else 3
    each_s = max(seconds / (2 * rounds), 3.0)
    tenants = {name: make_key() for name in ("ordinary", "hostile")}
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(record(name, key) for name, key in tenants.items()))
    headers = {"Authorization": f"Bearer {tenants['ordinary']}"}
    options = ("--api-keys", keys, "--metrics-port", "0", "--grpc-port", "0")
    with serving(tasks_bundle, *options) as server, sink() as port:
        expected = {"tasks@1": lone_answers(server, "tasks@1", headers)}
        with asking(server, expected, CLIENTS, headers=headers) as clients:
            time.sleep(3.0)
        rate = HALF * sum(seen_by(clients).values()) / 3.0
        started = children(server)

        def attack(target, grpc_target):
            options = [str(target), str(grpc_target), str(each_s), str(SHARE), tenants["hostile"]]
            command = [sys.executable, "-m", "tests.e2e.attackers", *options]
            return next_to_attacks(server, expected, headers, rate, command)

        ports = server.port, int(server.grpc_address.rpartition(":")[2])
        pairs = [(attack(port, port), attack(*ports)) for _ in range(rounds)]
        time.sleep(1.0)
        assert started == children(server)
        assert 200 == server.get("/health/ready").status
        assert expected["tasks@1"] == lone_answers(server, "tasks@1", headers)
    ratios = [attacked.p99_s / control.p99_s for control, attacked in pairs]
    grown_mb = max(attacked.most_mb for _, attacked in pairs) - pairs[0][0].most_mb
    with capsys.disabled():
        print(f"\n{rate:.0f} requests/s; p99 in ms without and with attacks:")
        for control, attacked in pairs:
            print(f"  {1000 * control.p99_s:.0f} {1000 * attacked.p99_s:.0f}", attacked.seen)
        print(
            f"ratio {statistics.median(ratios):.2f}; {grown_mb:.0f} MB more;", pairs[-1][1].attacks
        )
    every = [one for pair in pairs for one in pair]
    assert not [wrong for one in every for wrong in one.wrong]
    assert all(set(one.seen) <= {"tasks@1", "left"} for one in every)
    assert all(one.attacks["core"] < 1.5 * SHARE for one in every)
    assert grown_mb < GROWTH_MB
    if pytestconfig.getoption("--chaos"):
        most = SLOWER if seconds >= LONG_S else SLOWER_IN_SHORT
        assert statistics.median(ratios) <= most
