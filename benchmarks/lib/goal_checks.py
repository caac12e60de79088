"""Checks of performance goals: a figure of each round, or one of all, a limit, and whether it is met."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.rounds import CAPACITY_AT, Tested, Window


class Check(NamedTuple):
    """A goal and its figure in each round. limit: a minimum, or with `at_most` a maximum"""

    what: str
    found: Sequence[float]
    limit: float
    at_most: bool = False
    unit: str = ""

    def met(self, figure: float) -> bool:
        return bool(figure <= self.limit if self.at_most else figure >= self.limit)

    def as_json(self) -> dict[str, Any]:
        """Return the check as JSON: `met` for the median, `rounds_met` for single rounds; not met without figures."""
        middle = [float(np.median(self.found))] if self.found else []
        return {
            "what": self.what,
            "found": finite(middle[0]) if middle else None,
            "range": [finite(min(self.found)), finite(max(self.found))] if self.found else None,
            "at_most" if self.at_most else "at_least": self.limit,
            "unit": self.unit,
            "met": all(map(self.met, middle)) and bool(middle),
            "rounds_met": sum(map(self.met, self.found)),
            "rounds": len(self.found),
        }


def finite(figure: float) -> float | None:
    """Return None for infinity, which JSON does not have."""
    return float(figure) if np.isfinite(figure) else None


def show(checks: Sequence[Check]) -> None:
    """Print a line for each check: median, range of the rounds, limit, and whether it is met."""
    print(f"\n{'':<58}{'found':>8}  {'(range)':<18}{'wanted':<12}")
    for check in checks:
        result = check.as_json()
        unit = f" {check.unit}" if check.unit else ""
        wanted = f"{'<=' if check.at_most else '>='} {check.limit:g}{unit}"
        if not check.found:
            print(f"{check.what:<58}{'-':>8}  {'':<18}{wanted:<12}not measured")
            continue
        spread = f"({min(check.found):.2f}-{max(check.found):.2f})"
        verdict = "pass" if result["met"] else "MISS"
        print(
            f"{check.what:<58}{np.median(check.found):>8.2f}  {spread:<18}{wanted:<12}"
            f"{verdict}, {result['rounds_met']} of {result['rounds']}"
        )


# -- figures of the rounds --------------------------------------------------------------------------------------------


def by_name(tested: Sequence[Tested]) -> Callable[[str], Tested]:
    """Return a function from a name to a contender's windows, which are empty for an unknown name."""
    found = {one.name: one for one in tested}
    return lambda name: found.get(name, Tested(name))


def compared(
    one: Tested, other: Tested, load: int, compare: Callable[[Window, Window], float]
) -> list[float]:
    """Return a figure of two contenders' windows under one load, for each round."""
    pairs = zip(one.closed.get(load, ()), other.closed.get(load, ()), strict=False)
    return [compare(a, b) for a, b in pairs]


def ratios(one: Tested, other: Tested, load: int) -> list[float]:
    """Return the ratio of one's rate to the other's, for each round."""
    return compared(one, other, load, lambda a, b: a.rate / b.rate)


def added_ms(one: Tested, other: Tested) -> list[float]:
    """Return the difference of p50 in milliseconds at one connection, over the texts that both windows have."""

    def beyond(a: Window, b: Window) -> float:
        both = sorted(a.each.keys() & b.each.keys())
        p50s = [np.median([window.each[number] for number in both]) for window in (a, b)]
        return float(p50s[0] - p50s[1])

    return compared(one, other, 1, beyond)


def least_kept(one: Tested, bare: Tested, loads: Sequence[int]) -> list[float]:
    """Return the smallest share of the best throughput at fewer connections that remains: one figure, of medians.

    Throughput is relative to the baseline's in the same turn, because the loads of a round are minutes apart.
    """
    shares = np.array([np.median(ratios(one, bare, load) or [np.nan]) for load in loads])
    kept = (shares / np.maximum.accumulate(shares))[1:]
    return [float(kept.min())] if np.isfinite(kept).any() else []


def tail_growth(one: Tested, bare: Tested, loads: Sequence[int]) -> list[float]:
    """Return the largest growth of p99 from one load to the next by the growth in connections: one figure, of medians.

    p99 is measured in texts that the baseline answers in that time, as its speed may change between loads.
    """
    tails = np.array(
        [
            np.median(compared(one, bare, load, lambda a, b: a.p99_ms * b.rate) or [np.nan])
            for load in loads
        ]
    )
    growth = tails[1:] / tails[:-1] / np.divide(loads[1:], loads[:-1])
    return [float(growth.max())] if np.isfinite(growth).any() else []


def calm_tail(one: Tested, share: str) -> list[float]:
    """Return p99 by p50 in the open loop, for each round; infinite where p50 exceeds that under full load."""
    full = one.closed.get(CAPACITY_AT, ())
    return [
        found.p99_ms / found.p50_ms if found.p50_ms < busy.p50_ms else np.inf
        for found, busy in zip(one.open.get(share, ()), full, strict=False)
    ]
