"""A wish is met or missed by the median of what was found, and no figure is no success."""

import json
import math

import pytest

from benchmarks.lib import goal_checks, rounds
from benchmarks.lib.goal_checks import Check
from benchmarks.lib.rounds import Window


def windows(name, rates, tails=None, opened=()):
    """A contender's windows: by load, the rate in each round."""
    one = rounds.Tested(name)
    for load, found in rates.items():
        p99 = (tails or {}).get(load, [1.0] * len(found))
        one.closed[load] = [
            Window(load, rate, 0.5, tail, 1.0, 0.0) for rate, tail in zip(found, p99, strict=True)
        ]
    one.open["80%"] = [Window(1, 1.0, p50, p99, 1.0, 0.0) for p50, p99 in opened]
    return one


@pytest.mark.parametrize(
    ("check", "met", "rounds_met"),
    [
        (Check("rate", [0.8, 0.91, 0.95], 0.9), True, 2),
        (Check("rate", [0.8, 0.89, 0.95], 0.9), False, 1),
        (Check("wait", [1.4, 1.5, 9.0], 1.5, at_most=True), True, 2),
        (Check("wait", [math.inf], 1.5, at_most=True), False, 0),
        (Check("rate", [], 0.9), False, 0),
    ],
)
def test_verdict(check, met, rounds_met, capsys):
    """The table and the JSON have the same verdict."""
    told = json.loads(json.dumps(check.as_json(), allow_nan=False))
    assert (met, rounds_met) == (told["met"], told["rounds_met"])

    goal_checks.show([check])
    line = capsys.readouterr().out.splitlines()[-1]
    verdict = f"{'pass' if met else 'MISS'}, {rounds_met} of {len(check.found)}"
    assert line.endswith(verdict if check.found else "not measured")


def test_ratios():
    """They are of windows of one round; a contender that was not there has none."""
    named = goal_checks.by_name([windows("a", {8: [10, 30]}), windows("b", {8: [20, 20]})])
    assert [0.5, 1.5] == goal_checks.ratios(named("a"), named("b"), 8)
    assert [] == goal_checks.ratios(named("a"), named("nobody"), 8)
    assert [] == goal_checks.ratios(named("a"), named("b"), 32)


def test_what_is_added_on_the_same_texts():
    """Which texts a window held does not matter: those that the other had not do not count."""
    one, bare = rounds.Tested("one"), rounds.Tested("bare")
    for tested, each in (
        (one, {1: 5.0, 2: 9.0, 3: 6.0, 4: 90.0}),
        (bare, {0: 0.1, 1: 4, 2: 4, 3: 8}),
    ):
        tested.closed[1] = [Window(1, 1.0, 0.5, 1.0, 1.0, 0.0, each)]
    assert [2.0] == goal_checks.added_ms(one, bare)
    assert [] == goal_checks.added_ms(one, rounds.Tested("nobody"))


def test_what_is_kept_with_more_connections():
    """A fall counts from the best so far; what the whole machine lost meanwhile does not."""
    bare = windows("bare", {8: [100] * 3, 32: [100] * 3, 128: [50] * 3})
    one = windows("one", {8: [80] * 3, 32: [90] * 3, 128: [40] * 3})
    assert [pytest.approx(0.8 / 0.9)] == goal_checks.least_kept(one, bare, [8, 32, 128])
    assert [] == goal_checks.least_kept(one, windows("bare", {}), [8, 32, 128])


def test_growth_of_the_tail():
    """Of p99 against connections, the worst step, at the speed that the machine had."""
    bare = windows("bare", {8: [100], 32: [100], 128: [50]})
    tails = {8: [10.0], 32: [20.0], 128: [320.0]}
    one = windows("one", {8: [1], 32: [1], 128: [1]}, tails)
    assert [pytest.approx(2)] == goal_checks.tail_growth(one, bare, [8, 32, 128])


def test_calm_tail():
    """A round in which a queue grew is no success, however even the latencies were."""
    one = windows("one", {32: [10, 10]}, opened=[(0.1, 0.3), (600.0, 700.0)])
    assert [pytest.approx(3), math.inf] == goal_checks.calm_tail(one, "80%")
