"""What was wanted beside what was found: a figure of each round, or one of all, a limit, and whether it was met."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.rounds import CAPACITY_AT, Tested, Window


class Check(NamedTuple):
    """A wish, and its figure in each round; the limit is the least that will do, or with `at_most` the most."""

    what: str
    found: Sequence[float]
    limit: float
    at_most: bool = False
    unit: str = ""

    def met(self, figure: float) -> bool:
        return bool(figure <= self.limit if self.at_most else figure >= self.limit)

    def as_json(self) -> dict[str, Any]:
        """Met is what the median does; `rounds_met` of `rounds` did it alone. Without a figure nothing is met."""
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
    """JSON has no word for infinity."""
    return float(figure) if np.isfinite(figure) else None


def show(checks: Sequence[Check]) -> None:
    """A line for each: the median, the range of the rounds, the limit, whether it was met, and in how many rounds."""
    print(f"\n{'':<58}{'found':>8}  {'(range)':<18}{'wanted':<12}")
    for check in checks:
        told = check.as_json()
        unit = f" {check.unit}" if check.unit else ""
        wanted = f"{'<=' if check.at_most else '>='} {check.limit:g}{unit}"
        if not check.found:
            print(f"{check.what:<58}{'-':>8}  {'':<18}{wanted:<12}not measured")
            continue
        spread = f"({min(check.found):.2f}-{max(check.found):.2f})"
        verdict = "pass" if told["met"] else "MISS"
        print(
            f"{check.what:<58}{np.median(check.found):>8.2f}  {spread:<18}{wanted:<12}"
            f"{verdict}, {told['rounds_met']} of {told['rounds']}"
        )


# -- figures of the rounds --------------------------------------------------------------------------------------------


def by_name(tested: Sequence[Tested]) -> Callable[[str], Tested]:
    """A contender's windows by its name; none for one that was not there."""
    found = {one.name: one for one in tested}
    return lambda name: found.get(name, Tested(name))


def compared(
    one: Tested, other: Tested, load: int, compare: Callable[[Window, Window], float]
) -> list[float]:
    """A figure of two contenders' windows under one load, for each round."""
    pairs = zip(one.closed.get(load, ()), other.closed.get(load, ()), strict=False)
    return [compare(a, b) for a, b in pairs]


def ratios(one: Tested, other: Tested, load: int) -> list[float]:
    """How many times as much one answered as the other, for each round."""
    return compared(one, other, load, lambda a, b: a.rate / b.rate)


def added_ms(one: Tested, other: Tested) -> list[float]:
    """By how many milliseconds one's p50 was above the other's at one connection, on the texts that both were asked."""

    def beyond(a: Window, b: Window) -> float:
        both = sorted(a.each.keys() & b.each.keys())
        p50s = [np.median([window.each[number] for number in both]) for window in (a, b)]
        return float(p50s[0] - p50s[1])

    return compared(one, other, 1, beyond)


def least_kept(one: Tested, bare: Tested, loads: Sequence[int]) -> list[float]:
    """The least part of its best throughput so far that was left at any more connections: one figure, of medians.

    Throughput is taken as a part of the bare session's beside it, for the loads of a round are minutes apart.
    """
    shares = np.array([np.median(ratios(one, bare, load) or [np.nan]) for load in loads])
    kept = (shares / np.maximum.accumulate(shares))[1:]
    return [float(kept.min())] if np.isfinite(kept).any() else []


def tail_growth(one: Tested, bare: Tested, loads: Sequence[int]) -> list[float]:
    """The most by which p99 grew from one load to the next, against the growth in connections: one figure, of medians.

    p99 is counted in texts that the bare session beside it could have answered in that time, as above.
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
    """p99 by p50 in the open loop, for each round; endless where half waited longer than under full load."""
    full = one.closed.get(CAPACITY_AT, ())
    return [
        found.p99_ms / found.p50_ms if found.p50_ms < busy.p50_ms else np.inf
        for found, busy in zip(one.open.get(share, ()), full, strict=False)
    ]
