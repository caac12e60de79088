"""The start time of a server, and the growth of its memory with answered requests."""

import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.lib import models, processes, rounds, servers
from benchmarks.lib.environments import ROOT
from benchmarks.lib.goal_checks import Check
from benchmarks.lib.load_generator import closed_loop

DEFAULT = ROOT / "bundles" / "quartet-mini"
BASE = ROOT / "build" / "bundles" / "bert-base"  # exported again if it is removed
CONNECTIONS = 32
START_S = {"quartet-mini": 2.0, "bert-base": 10.0}
EARLY, LATE = 1_000, 10_000  # requests
GROWN = 1.05


def measure(
    model: Path, texts: Sequence[str], scratch: Path, *, rounds_: int, seconds: float
) -> tuple[list[Check], dict[str, object]]:
    """Measure the start of the default bundle and of BERT-base at fp32, and memory after few and many requests."""
    starts = {
        DEFAULT.name: starting(DEFAULT, "auto", scratch, rounds_),
        BASE.name: starting(bert_base(scratch), "fp32", scratch, rounds_),
    }
    early, late = growing(model, texts, scratch, seconds=seconds)
    wanted = [
        Check(f"{name}: ready after", found, START_S[name], at_most=True, unit="s")
        for name, found in starts.items()
    ]
    what = f"memory after {LATE:,} requests, by that after {EARLY:,}"
    return (
        [*wanted, Check(what, [late / early], GROWN, at_most=True)],
        {"start_s": starts, "resident_mb": {"early": early, "late": late}},
    )


def starting(model: Path, precision: str, scratch: Path, times: int) -> list[float]:
    found = []
    for _ in range(times):
        with servers.serving(servers.quartet(precision), model, scratch) as running:
            found.append(running.start_s)
    return found


def bert_base(scratch: Path) -> Path:
    """BERT-base as a bundle, exported once for this checkout: that takes minutes."""
    if not BASE.is_dir():
        BASE.parent.mkdir(parents=True, exist_ok=True)
        print(f"exporting {BASE.name} to {BASE.relative_to(ROOT)}")
        checkpoint = models.bert_base(scratch / BASE.name)
        to_fp32 = ["-m", "export", str(checkpoint), str(BASE), "--precision", "fp32"]
        servers.run_once([sys.executable, *to_fp32], scratch / "base-export.log")
    return BASE


def growing(
    model: Path,
    texts: Sequence[str],
    scratch: Path,
    *,
    seconds: float,
    after: Sequence[int] = (EARLY, LATE),
) -> list[float]:
    """Return the resident MB of all processes of a server after each number of answered requests in `after`."""
    server = servers.quartet("fp32")
    requests = rounds.encode_requests(server, "embed", texts)
    found = []
    with servers.serving(server, model, scratch) as running:
        answered = 0
        for count in after:
            while answered < count:
                load = closed_loop(running.port, requests, CONNECTIONS, seconds, warm_s=0)
                answered += uvloop.run(load).requests
            rounds.wait_until_idle(running)
            found.append(processes.resident_mb(running.process.pid))
    return found
