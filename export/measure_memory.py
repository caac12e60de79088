"""Measure the memory of a bundle's graph in a fresh process: `python -m export.measure_memory BUNDLE GRAPH`.

BUNDLE is a directory, GRAPH the file of one of its graphs. The process prints the graph's `memory` record as JSON. It
opens the session as serving does, on one thread, and then runs batches of the longest texts.
"""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from service.core import bundle
from service.core.bundle import Bundle
from service.core.cpu import CPU
from service.core.encode import Window
from service.core.manifest import Graph, Memory
from service.core.packing import Packed, fill_rows, pack, round_up
from service.core.session import TRIAL, Session, SessionOptions, TimeLimit, open_graph, trim

TOKENS = (1024, 4096, 16384)  # of the measured batches, rounded down to whole texts
RUNS = 3  # of the smallest batch; larger ones run once
# What the heap of the C library cannot reuse grows in later runs of a batch, by a quarter of the first peak at most.
LATER_RUNS = 1.25
BATCHES_S = (
    10.0  # of the processor: no batch begins that is expected to end later, but for the first
)
# Of the expected time of the largest batch, after which its run is ended. Layers are equal, and so are their peaks.
PART = 0.5
LEAST_S = 0.5  # a batch that is expected to end earlier is run to its end
TIMEOUT_S = 120
STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")  # "5" resets VmHWM, see proc(5)
ROUNDING = 2**16  # bytes; the last digits differ from run to run


class UnmeasuredError(Exception):
    """The memory of a graph could not be measured; the message is the reason, in a line."""


def measure_memory(folder: Path, graph: Graph) -> Memory:
    """Measure a graph of a bundle in a process of its own. Raises UnmeasuredError.

    folder: of the bundle
    """
    command = [sys.executable, "-m", "export.measure_memory", str(folder), graph.file]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnmeasuredError(" ".join(str(error).split())) from error
    if run.returncode:
        lines = run.stderr.strip().splitlines()
        raise UnmeasuredError(lines[-1] if lines else f"exit status {run.returncode}")
    return Memory.model_validate_json(run.stdout)


def measure_here(opened: Bundle, graph: Graph) -> Memory:
    """Measure a graph in this process, which has opened no session before. Raises UnmeasuredError."""
    open_graph(TRIAL, CPU, SessionOptions(threads=1)).run(None, {"x": np.eye(1, dtype="f4")})
    trim()
    bare = read_status("VmRSS")
    session = Session(opened, graph, CPU, SessionOptions(threads=1))
    session.check(opened)
    trim()
    with_session = read_status("VmRSS")
    with suppress(OSError):
        RESET.write_text("5")
    # The C library's heap of a thread is not that of the main thread.
    with ThreadPoolExecutor(1) as thread:
        batches = thread.submit(measure_batches, opened, session, with_session).result()
    return Memory(opened=round_up(max(with_session - bare, 0), ROUNDING), batches=batches)


def measure_batches(opened: Bundle, session: Session, with_session: int) -> dict[int, int]:
    """Run batches of the longest texts, small ones first; return the peaks above `with_session` in bytes, by tokens.

    The largest batch needs less for each token than the others, since the C library maps blocks above 32 MB separately.
    An extrapolation from 4,096 to 16,384 tokens has been 1.8 times the measured value.
    """
    golden, length = opened.golden, opened.manifest.max_length
    first = np.zeros(length, dtype=np.intp)
    window = Window(golden.input_ids[first], golden.token_type_ids[first])
    window = fill_rows(window, opened.manifest.heads)
    batches: dict[int, int] = {}
    wall = processor = 0.0  # seconds of a token in the batch before
    end = time.thread_time() + BATCHES_S
    smallest, *larger = batch_sizes(length, session.graph.layout == "alone")
    for size in (*RUNS * [smallest], *larger):
        tokens, part = size * length, PART if size == max(larger, default=0) else 1
        if batches and time.thread_time() + part * processor * tokens > end:
            break
        began = time.perf_counter(), time.thread_time()
        limit = max(part * wall * tokens, LEAST_S) if part < 1 else TIMEOUT_S
        run_for(limit, session, pack([window] * size))
        wall = (time.perf_counter() - began[0]) / tokens
        processor = (time.thread_time() - began[1]) / tokens
        peak = max(read_status("VmHWM") - with_session, 0)
        grown = 1 if size == smallest else LATER_RUNS
        batches[tokens] = round_up(int(grown * peak), ROUNDING)
    return batches


def run_for(seconds: float, session: Session, batch: Packed) -> None:
    """Run a batch, and end the run after this time; the session cannot run another batch then."""
    with TimeLimit(seconds) as limit:
        session.limit_runs(limit)
        session.run(batch)


def batch_sizes(max_length: int, unbatched: bool) -> list[int]:
    """Return the sizes of the batches to measure, in texts of `max_length` tokens."""
    return [1] if unbatched else sorted({max(tokens // max_length, 1) for tokens in TOKENS})


def read_status(name: str) -> int:
    """Return a size of this process in bytes: `VmRSS` or `VmHWM`. Raises UnmeasuredError where it is not known."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    except OSError as error:
        raise UnmeasuredError(f"{STATUS} cannot be read: {error.strerror}") from error
    if found is None:
        raise UnmeasuredError(f"{STATUS} has no {name}")
    return int(found[1]) * 1024


def main() -> None:
    folder, file = sys.argv[1:]
    opened = bundle.load(folder)
    graph = next(graph for graph in opened.manifest.graphs if graph.file == file)
    try:
        print(measure_here(opened, graph).model_dump_json())
    except UnmeasuredError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
