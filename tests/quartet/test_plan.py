"""The plan of replicas: the simulation against queueing theory, the search, and the files that it reads."""

import json
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

from quartet import plan, simulation
from quartet.plan import PlanError, read_requests, search
from quartet.simulation import Arrival, Predicted, Replica, Simulation, predict
from service.core.manifest import Head
from service.scheduling.cost_model import Cost

SECOND = Replica(
    model="a@1 int8",
    costs={1: Cost(per_run=1.0, per_token=0.0, per_slot=0.0)},
    slots=1,
    request_s=0.0,
    hop_s=0.0,
    wake_s=0.0,
    tokens=1000,
    size=1,
    max_length=100,
    unbatched=False,
)


def test_each_request_waits_for_those_before_it():
    """A batch holds as many entries as its limit; the HTTP process delays each request, and the next ones."""
    arrivals = [Arrival(0.0, 10)] * 3
    assert [1, 2, 3] == [*Simulation(SECOND, 0.1).latencies(arrivals)]
    pairs = replace(SECOND, size=2)
    assert [1, 2, 2] == [*Simulation(pairs, 0.1).latencies(arrivals)]
    two = replace(SECOND, slots=2)
    assert [1, 1, 2] == [*Simulation(two, 0.1).latencies(arrivals)]
    slow = replace(two, request_s=0.25, wake_s=0.5)
    assert [1.25, 1.5, 2.25] == pytest.approx([*Simulation(slow, 0.0).latencies(arrivals)])
    assert [1.75] == pytest.approx([*Simulation(slow, 0.0).latencies([Arrival(9.0, 10)])])
    far = replace(two, hop_s=0.25)
    assert [1.25, 1.25, 2.25] == pytest.approx([*Simulation(far, 0.0).latencies(arrivals)])


def test_the_mean_wait_is_that_of_queueing_theory():
    """Batches of one text at a constant cost are an M/D/1 queue (Pollaczek and Khinchine)."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / 0.7, 20_000))
    found = [*Simulation(SECOND, 0.7).latencies(Arrival(at, 10) for at in times)]
    wait = 0.7 / (2 * (1 - 0.7))
    assert 1 + wait == pytest.approx(np.mean(found), rel=0.05)


def test_replicas_share_a_rate():
    """Twice the replicas at twice the rate are equal; a trace keeps its bursts, and its rate is the given one."""
    one, two = predict(SECOND, 1, 0.5, [10]), predict(SECOND, 2, 1.0, [10])
    assert one[1:] == pytest.approx(two[1:])
    assert 0.5 == pytest.approx(one.busy, rel=0.05)
    burst = predict(SECOND, 2, 1.0, [10] * 100, [0.0] * 99 + [99.0])
    assert 40_000 < burst.p99 < 60_000
    steady = predict(SECOND, 1, 0.5, [10] * 100, [*range(100)])
    assert (1000, 1000) == pytest.approx((steady.p50, steady.p99))


def test_long_texts_are_truncated():
    per_token = replace(SECOND, costs={1: Cost(0.0, 0.01, 0.0)})
    assert [1.0] == pytest.approx([*Simulation(per_token, 0.1).latencies([Arrival(0.0, 500)])])


def test_a_cost_is_scaled():
    """In all its terms, so that a batch of any shape takes as many times as long."""
    cost = Cost(1.0, 2.0, 3.0, 4.0, padded=True)
    assert 2 * cost.seconds(5, 2, 4, 1) == plan.scale(cost, 2).seconds(5, 2, 4, 1)


def test_a_slow_model_may_answer_once(monkeypatch):
    """Its request without a pause then counts as the one after a pause."""
    parts = {"total": 7000, "queue": 1, "inference": 6000, "return": 1}
    timing = ", ".join(f"{name};dur={ms}" for name, ms in parts.items())
    headers = {"X-Quartet-Batch": "size=1;tokens=8", "Server-Timing": timing}
    monkeypatch.setattr(plan, "timed", lambda *_: iter([(7.0, headers)]))
    ready, idle = plan.measure_alone(0, Head(task="qa"), SECOND.costs)
    assert (7.0, 6.0) == (idle.total_s, idle.slowdown)
    assert ready == idle


def test_the_search_finds_the_least_number():
    for least in (1, 2, 3, 37, 1000):
        assert least == search(lambda n, goal=least: Predicted(n, 0.0, 1e3 * (n < goal), 0.0), 5)
    with pytest.raises(PlanError, match=r"1000 replicas have a p99 of 9\.0 ms: raise --p99"):
        search(lambda number: Predicted(number, 0.0, 9.0, 0.0), 5)


def test_lines_of_tokens_and_traces(tmp_path):
    file = tmp_path / "requests"
    file.write_text("12\n9\n")
    assert ([], [12, 9]) == read_requests(file)
    file.write_text("2026-01-01T00:00:01.5Z 12\n2026-01-01T00:00:01Z,9\n")
    moments, lengths = read_requests(file)
    assert (0.5, [9, 12]) == (moments[1] - moments[0], lengths)
    for text, line in (("12\n\n", 2), ("12\n0\n", 2), ("0.5 12\n9\n", 2), ("a text\n", 1)):
        file.write_text(text)
        with pytest.raises(PlanError, match=f"line {line}: .*TIME TOKENS"):
            read_requests(file)
    file.write_text("")
    with pytest.raises(PlanError, match="has no line"):
        read_requests(file)


def run(monkeypatch, tmp_path, *options):
    monkeypatch.setattr(simulation, "DRAWN", 2000)
    (tmp_path / "tokens").write_text("10\n")
    files = ["--lengths", str(tmp_path / "tokens"), "--cost", str(tmp_path / "cost")]
    monkeypatch.setattr(sys, "argv", ["quartet plan", *files, *options])
    return plan.main()


def test_the_command_states_replicas_and_machines(monkeypatch, tmp_path, capsys):
    (tmp_path / "cost").write_text(json.dumps(asdict(replace(SECOND, slots=2))))
    assert 0 == run(monkeypatch, tmp_path, "--rate", "5", "--p99", "2500", "--cores", "8")
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "5 replicas of 2 cores, 2 machines, for 5 requests/s with p99 <= 2500 ms"
    assert 2 == run(monkeypatch, tmp_path, "--rate", "5", "--p99", "900")
    (tmp_path / "cost").write_text("{}")
    assert 2 == run(monkeypatch, tmp_path, "--rate", "5", "--p99", "900")
    assert "is no file that quartet plan --cost wrote" in capsys.readouterr().err


@pytest.mark.slow
def test_a_measurement_is_kept(monkeypatch, tmp_path, capsys):
    """The default model is measured once, and its plan is the same from the file."""
    options = ("--rate", "20", "--p99", "10000")
    assert 0 == run(monkeypatch, tmp_path, *options)
    measured = capsys.readouterr().out
    assert "quartet-mini" in measured
    assert 0 == run(monkeypatch, tmp_path, *options)
    assert measured == capsys.readouterr().out
