"""`quartet plan`: the replicas that a rate of requests needs, by the measured cost of a model and a simulation."""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from quartet.bench import TEXT, quantile, serving, timed
from quartet.cache import SourceError, resolve
from quartet.simulation import PAUSE_S, Predicted, Replica, predict
from service.core.bundle import BundleError
from service.core.manifest import Head
from service.scheduling.cost_model import Cost
from service.settings_sources import ConfigError, find_bundles

MOST = 1000  # replicas
REPEATS = 3  # measurements of a shape, of which the fastest counts
ALONE_S = 5.0  # for requests without others


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
    """Measure batches on all slots at once, as under load, and requests to the service.

    In the service, batches take longer than outside, because other processes share cores and caches with them.
    """
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
        ready, idle = measure_alone(port, head, costs)
    return Replica(
        model=f"{bundle.manifest.id} {runner.runs_on.precision}",
        costs={width: scale(cost, ready.slowdown) for width, cost in costs.items()},
        slots=slots.number,
        request_s=ready.http_s,
        hop_s=ready.hop_s,
        wake_s=max(idle.total_s - ready.total_s, 0.0),
        tokens=settings.batch_tokens(kind),
        size=settings.batch_size(kind),
        max_length=longest,
        unbatched=runner.unbatched,
    )


class Alone(NamedTuple):
    """The median times of a request without others, in seconds.

    http_s: in the HTTP process
    hop_s: outside this process and the batch
    slowdown: of the batch, relative to its cost outside the service
    total_s: from sending to the response
    """

    http_s: float
    hop_s: float
    slowdown: float
    total_s: float


def measure_alone(port: int, head: Head, costs: Mapping[int, Cost]) -> tuple[Alone, Alone]:
    """Send requests one after the other, every second one after a pause; return the times without and with a pause."""
    found: list[Alone] = []
    for took, headers in timed(port, head, itertools.repeat(TEXT), time.perf_counter() + ALONE_S):
        tokens = int(headers["X-Quartet-Batch"].rpartition("=")[2])
        expected_s = min(cost.seconds(tokens, 1, tokens) for cost in costs.values())
        parts = (part.split(";dur=") for part in headers["Server-Timing"].split(", "))
        part_s = {name: float(value) / 1000 for name, value in parts}
        batch_s = part_s["inference"]
        http_s = part_s["total"] - part_s["queue"] - batch_s - part_s["return"]
        found.append(Alone(http_s, took - http_s - batch_s, batch_s / expected_s, took))
        time.sleep(PAUSE_S * (len(found) % 2))
    # A slow model may answer once only.
    return medians(found[::2]), medians(found[1::2] or found)


def medians(found: Sequence[Alone]) -> Alone:
    return Alone(*(max(quantile(times, 0.5), 0.0) for times in zip(*found, strict=True)))


def scale(cost: Cost, factor: float) -> Cost:
    """Return the cost of batches that take `factor` times as long."""
    return replace(
        cost,
        per_run=factor * cost.per_run,
        per_token=factor * cost.per_token,
        per_slot=factor * cost.per_slot,
        per_mask=factor * cost.per_mask,
    )
