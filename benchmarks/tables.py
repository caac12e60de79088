"""Compare the checks of several runs of `make bench` or `make bench-goals` in a Markdown table.

python -m benchmarks.tables "NAME=RESULTS.json" ...
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    if not sys.argv[1:] or any("=" not in argument for argument in sys.argv[1:]):
        sys.exit(__doc__)
    pairs = [argument.split("=", 1) for argument in sys.argv[1:]]
    print(side_by_side({name: json.loads(Path(file).read_text()) for name, file in pairs}))


def side_by_side(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with a row for each check of any run and a column for each run; a missed limit is bold."""
    by_run = {name: {each["what"]: each for each in checks_of(run)} for name, run in runs.items()}
    names = dict.fromkeys(name for checks in by_run.values() for name in checks)
    lines = [row(["", "wanted", *runs]), row(["---"] * (2 + len(runs)))]
    for name in names:
        checks = [checks.get(name) for checks in by_run.values()]
        limits = dict.fromkeys(wanted(check) for check in checks if check)
        lines.append(row([name, ", ".join(limits), *map(cell, checks)]))
    return "\n".join(lines)


def checks_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the checks of a run or of all its parts; a failed part has none."""
    parts = run["parts"].values() if "parts" in run else [run]
    return [check for part in parts for check in part.get("checks", ())]


def wanted(check: Mapping[str, Any]) -> str:
    sign, limit = ("≤", check["at_most"]) if "at_most" in check else ("≥", check["at_least"])
    return f"{sign} {limit:g} {check['unit']}".strip()


def cell(check: Mapping[str, Any] | None) -> str:
    """Return the median and the range of the rounds, if there are several; infinite where a server fell behind."""
    if not check or not check["rounds"]:
        return ""
    middle = figure(check["found"])
    text = middle if check["met"] else f"**{middle}**"
    return text if check["rounds"] == 1 else f"{text} ({'–'.join(map(figure, check['range']))})"


def figure(value: float | None) -> str:
    return "∞" if value is None else f"{value:.2f}".replace("-", "\N{MINUS SIGN}")


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
