"""The four tasks on one bundle with a head for each: each against the bare session, and all at once."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.lib import onnxruntime_baseline, rounds, servers
from benchmarks.lib.goal_checks import Check
from service.core import bundle

CONNECTIONS = 32
TASKS = ("classify", "ner", "qa", "embed")
OF_BARE = 0.85
OF_SLOWEST = 0.9
TEXTS, PAIRS = "bare, texts", "bare, questions"  # the turns of the bare session, by what it runs
BARE = {"classify": TEXTS, "ner": TEXTS, "qa": PAIRS}


def measure(
    model: Path, texts: Sequence[str], scratch: Path, *, rounds_: int, seconds: float
) -> tuple[list[Check], dict[str, list[float]]]:
    """Measure tokens per second of each task, of a mix of all, and of the bare session on the same encodings."""
    full = bundle.load(model)
    tokens = {
        task: np.array(
            [
                onnxruntime_baseline.tokens(windows)
                for windows in onnxruntime_baseline.encode(full, task, texts)
            ]
        )
        for task in TASKS
    }
    with ExitStack() as stack:
        quartet = servers.quartet("fp32")
        running = rounds.start(stack, quartet, model, scratch)
        requests = {task: rounds.encode_requests(quartet, task, texts) for task in TASKS}
        kinds = [TASKS[number % len(TASKS)] for number in range(len(texts))]
        requests["mix"] = [requests[task][number] for number, task in enumerate(kinds)]
        tokens["mix"] = np.array([tokens[task][number] for number, task in enumerate(kinds)])

        def through_http(name: str) -> Callable[[], float]:
            found = (running, requests[name], tokens[name], CONNECTIONS, seconds)
            return lambda: rounds.measure_closed(*found).rate

        def without(task: str) -> tuple[servers.Running, Callable[[], float]]:
            server = onnxruntime_baseline.server(task, "fp32", texts, scratch)
            baseline, mean = rounds.start(stack, server, model, scratch), tokens[task].mean()
            return (
                baseline,
                lambda: rounds.self_measured(baseline, CONNECTIONS, seconds).rate * mean,
            )

        turns = {TEXTS: without("classify"), PAIRS: without("qa")}
        turns |= {name: (running, through_http(name)) for name in requests}
        rates = rounds.take_turns(turns, rounds_)
    wanted = [
        Check(f"/{task}: of the bare session", ratios(rates[task], rates[baseline]), OF_BARE)
        for task, baseline in BARE.items()
    ]
    slowest = [min(one) for one in zip(*(rates[task] for task in TASKS), strict=True)]
    what = "all four at once: tokens/s, of the slowest alone"
    return [*wanted, Check(what, ratios(rates["mix"], slowest), OF_SLOWEST)], rates


def ratios(found: Sequence[float], base: Sequence[float]) -> list[float]:
    return [float(a / b) for a, b in zip(found, base, strict=True)]
