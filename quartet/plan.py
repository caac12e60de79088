"""`quartet plan`: the replicas that a rate of requests needs, by the measured cost of a model and a simulation."""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from quartet.bench import TEXT, quantile, serving, timed
from quartet.cache import SourceError, resolve
from quartet.simulation import PAUSE_S, Predicted, Replica, predict
from service.core.bundle import BundleError
from service.core.manifest import Head
from service.scheduling.cost_model import Cost
from service.settings_sources import ConfigError, find_bundles

MOST = 1000  # replicas
REPEATS = 3  # measurements of a shape, of which the fastest counts
OUTSIDE_S = 2.0  # for a measurement of requests


class PlanError(ValueError):
    """A file or a goal that cannot be planned; the message has the reason."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        "quartet plan",
        description="Measure a model on this machine, simulate replicas of it under a load, and state how many keep "
        "a p99 latency. A replica is a service on the cores of this machine. Requests have one text.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a model as quartet serve takes it; default: the model that it serves without a name",
    )
    parser.add_argument(
        "--rate",
        type=float,
        required=True,
        metavar="R",
        help="requests per second, of all replicas",
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        required=True,
        metavar="FILE",
        help="a line for each request: its tokens; or its time (ISO 8601 or seconds) and its tokens, a trace that is "
        "replayed at --rate",
    )
    parser.add_argument("--p99", type=float, required=True, metavar="MS", help="milliseconds")
    parser.add_argument("--precision", default="auto", help="default: that of the model")
    parser.add_argument(
        "--cores", type=int, metavar="N", help="cores of a machine; default: the cores of a replica"
    )
    parser.add_argument(
        "--cost",
        type=Path,
        metavar="FILE",
        help="use the measurement in this file, or write it there if the file does not exist",
    )
    return parser


def main() -> int:
    """Plan, and print a table. Returns the exit status."""
    arguments = parser().parse_args()
    if arguments.rate <= 0 or arguments.p99 <= 0:
        parser().error("--rate and --p99 must be above 0")
    from service.core.session import ProviderError  # here, so that `--help` is quick

    try:
        moments, lengths = read_requests(arguments.lengths)
        replica = find_replica(arguments.name, arguments.precision, arguments.cost)
        outside_ms = 1000 * (replica.request_s + replica.hop_s + replica.wake_s)
        print(f"{replica.model}, {replica.slots} cores, {outside_ms:.1f} ms outside the model")
        print("  replicas   busy    p50 ms    p99 ms")

        def show(number: int) -> Predicted:
            found = predict(replica, number, arguments.rate, lengths, moments)
            print(f"  {number:>8} {found.busy:>5.0%} {found.p50:>9.1f} {found.p99:>9.1f}")
            return found

        number = search(show, arguments.p99)
    except (SourceError, ConfigError, BundleError, ProviderError) as error:
        print(f"quartet: plan: {error}", file=sys.stderr)
        return 3
    except (OSError, ValueError) as error:
        print(f"quartet: plan: {error}", file=sys.stderr)
        return 2
    machines = math.ceil(number / max((arguments.cores or replica.slots) // replica.slots, 1))
    print(
        f"{number} replicas of {replica.slots} cores, {machines} machines, for {arguments.rate:g} requests/s "
        f"with p99 <= {arguments.p99:g} ms"
    )
    return 0


def search(show: Callable[[int], Predicted], goal_ms: float) -> int:
    """Return the least number of replicas whose p99 is within the goal. Raises PlanError if `MOST` do not suffice."""
    low, high = 0, 1
    while (found := show(high)).p99 > goal_ms:
        if high == MOST:
            raise PlanError(f"{MOST} replicas have a p99 of {found.p99:.1f} ms: raise --p99")
        low, high = high, min(2 * high, MOST)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if show(middle).p99 <= goal_ms else (middle, high)
    return high


def read_requests(file: Path) -> tuple[list[float], list[int]]:
    """Return the times in seconds, if the file has them, and the tokens of its requests. Raises PlanError."""
    moments: list[float] = []
    lengths: list[int] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        *moment, tokens = line.replace(",", " ").split() or ["0"]
        try:
            moments += map(seconds, moment)
            lengths.append(int(tokens))
        except ValueError:
            lengths.append(0)
        if lengths[-1] < 1 or len(moments) not in (0, number):
            reason = "must be TOKENS in every line, or TIME TOKENS in every line"
            raise PlanError(f"{file}: line {number}: {line[:50]!r}: {reason}")
    if not lengths:
        raise PlanError(f"{file}: has no line")
    if moments:
        ordered = sorted(zip(moments, lengths, strict=True))
        return [moment for moment, _ in ordered], [tokens for _, tokens in ordered]
    return [], lengths


def seconds(moment: str) -> float:
    return float(moment) if "-" not in moment else datetime.fromisoformat(moment).timestamp()


def find_replica(name: str | None, precision: str, cost: Path | None) -> Replica:
    """Return the measurement in a file, or a new one."""
    if cost is not None and cost.exists():
        try:
            return Replica.read(json.loads(cost.read_bytes()))
        except (TypeError, LookupError, AttributeError, ValueError):
            raise PlanError(f"{cost}: is no file that quartet plan --cost wrote") from None
    replica = measure(resolve(name) if name else find_bundles()[0], precision)
    if cost is not None:
        cost.write_text(json.dumps(asdict(replica), indent=1))
    return replica


def measure(folder: Path, precision: str) -> Replica:
    """Measure batches on all slots at once, as under load, and a request's time outside the model."""
    from service.core.bundle import load
    from service.core.session import usable_kinds
    from service.engines.local_device import LocalDevice
    from service.observability.metrics import Metrics
    from service.scheduling.cost_model import SHAPES, Estimator, Sample
    from service.settings import Settings, usable_cores

    settings = Settings(bundles=(folder,), precision=precision)
    kind = usable_kinds(settings.provider)[0]
    slots = settings.slots(kind, usable_cores())
    device = LocalDevice(settings, slots, Metrics(), kind)
    bundle = load(folder)
    opened = device.open(bundle)
    runner, longest = opened.runner, bundle.manifest.max_length
    samples: dict[int, Sequence[Sample]] = {**opened.proof.samples}
    shapes = {(1 if runner.unbatched else size, min(length, longest)) for size, length in SHAPES}
    samples[1] = [
        min(
            (runner.run_at_once(*shape, slots.number) for _ in range(REPEATS)),
            key=lambda sample: sample.seconds,
        )
        for shape in sorted(shapes)
    ]
    costs = {width: Estimator(own, padded=runner.padded).cost for width, own in samples.items()}
    del opened, device
    head = next(iter(bundle.manifest.heads.values()))
    with serving(folder, "--precision", precision) as (port, _):
        request_s, hop_s = measure_outside(port, head, costs, 0.0)
        idle_s = sum(measure_outside(port, head, costs, PAUSE_S))
    return Replica(
        model=f"{bundle.manifest.id} {runner.runs_on.precision}",
        costs=costs,
        slots=slots.number,
        request_s=request_s,
        hop_s=hop_s,
        wake_s=max(idle_s - request_s - hop_s, 0.0),
        tokens=settings.batch_tokens(kind),
        size=settings.batch_size(kind),
        max_length=longest,
        unbatched=runner.unbatched,
    )


def measure_outside(
    port: int, head: Head, costs: Mapping[int, Cost], pause_s: float
) -> tuple[float, float]:
    """Return the median seconds of a request, after a pause: in the HTTP process, and elsewhere outside its batch."""
    http_s, elsewhere_s = [], []
    for took, headers in timed(port, head, itertools.repeat(TEXT), time.perf_counter() + OUTSIDE_S):
        tokens = int(headers["X-Quartet-Batch"].rpartition("=")[2])
        batch_s = min(cost.seconds(tokens, 1, tokens) for cost in costs.values())
        parts = (part.split(";dur=") for part in headers["Server-Timing"].split(", "))
        ms = {name: float(value) for name, value in parts}
        http_s.append((ms["total"] - ms["queue"] - ms["inference"] - ms["return"]) / 1000)
        elsewhere_s.append(took - batch_s - http_s[-1])
        time.sleep(pause_s)
    return max(quantile(http_s, 0.5), 0.0), max(quantile(elsewhere_s, 0.5), 0.0)
