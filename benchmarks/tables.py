"""What was wanted and what was found in runs of `make bench` or `make bench-goals`, side by side, as a Markdown table.

python -m benchmarks.tables "NAME=RESULTS.json" ...
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    if not sys.argv[1:] or any("=" not in given for given in sys.argv[1:]):
        sys.exit(__doc__)
    pairs = [given.split("=", 1) for given in sys.argv[1:]]
    print(beside({name: json.loads(Path(file).read_text()) for name, file in pairs}))


def beside(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each thing that was wanted in any of the runs, a column for each run; what was missed is bold."""
    found = {name: {one["what"]: one for one in checks_of(run)} for name, run in runs.items()}
    whats = dict.fromkeys(what for checks in found.values() for what in checks)
    lines = [row(["", "wanted", *runs]), row(["---"] * (2 + len(runs)))]
    for what in whats:
        checks = [checks.get(what) for checks in found.values()]
        limits = dict.fromkeys(wanted(check) for check in checks if check)
        lines.append(row([what, ", ".join(limits), *map(told, checks)]))
    return "\n".join(lines)


def checks_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of a benchmark, or of all parts of one; of a part that failed there are none."""
    parts = run["parts"].values() if "parts" in run else [run]
    return [check for part in parts for check in part.get("checks", ())]


def wanted(check: Mapping[str, Any]) -> str:
    sign, limit = ("≤", check["at_most"]) if "at_most" in check else ("≥", check["at_least"])
    return f"{sign} {limit:g} {check['unit']}".strip()


def told(check: Mapping[str, Any] | None) -> str:
    """The median, and the range of the rounds where there is one; endless where a server fell behind."""
    if not check or not check["rounds"]:
        return ""
    middle = figure(check["found"])
    said = middle if check["met"] else f"**{middle}**"
    return said if check["rounds"] == 1 else f"{said} ({'–'.join(map(figure, check['range']))})"


def figure(value: float | None) -> str:
    return "∞" if value is None else f"{value:.2f}".replace("-", "\N{MINUS SIGN}")


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
