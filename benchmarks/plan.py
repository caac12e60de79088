"""Compare what `quartet plan` predicts with local replicas, to which requests of random times are sent.

.venv/bin/python -m benchmarks.plan BUNDLE --rates 40 80 120
QUARTET_THREADS=1 .venv/bin/python -m benchmarks.plan BUNDLE --replicas 3 --rates 30 60
"""

import argparse
import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.lib import traffic
from benchmarks.lib.load_generator import Measured, open_loop, request_bytes
from quartet.bench import serving
from quartet.plan import measure
from quartet.simulation import predict
from service.core.encode import Encoder


def main() -> None:
    """Predict the latency at each rate and measure it, in rounds, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--path", default="/embed", help="route of one text")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[40, 80, 120], help="of all replicas"
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    own = parser.parse_args()
    texts = traffic.texts(traffic.MIXES["news"])
    requests = [request_bytes(own.path, json.dumps({"inputs": text}).encode()) for text in texts]
    found: dict[float, list[list[float]]] = {rate: [] for rate in own.rates}
    with ExitStack() as stack:
        options = ("--precision", own.precision)
        served = [stack.enter_context(serving(own.bundle, *options)) for _ in range(own.replicas)]
        ports = [port for port, _ in served]
        for number in range(own.rounds):
            # In each round, because the speed of a shared machine changes.
            replica = measure(own.bundle, own.precision)
            encoder = Encoder.from_file(own.bundle / "tokenizer.json", replica.max_length)
            lengths = [len(cut.windows[0]) for cut in encoder.texts(texts)]
            for rate in own.rates:
                _, p50, p99, busy = predict(replica, own.replicas, rate, lengths)
                loads = uvloop.run(send(ports, requests, rate, own.seconds, number))
                times = 1000 * np.concatenate([load.latencies for load in loads])
                at50, at99 = np.quantile(times, (0.5, 0.99))
                found[rate].append([busy, p50, at50, p50 / at50, p99, at99, p99 / at99])
    print("   rate   busy   p50 ms: predicted measured ratio   p99 ms: predicted measured ratio")
    for rate, rows in found.items():
        busy, p50, at50, ratio50, p99, at99, ratio99 = np.median(rows, axis=0)
        print(
            f"{rate:>7g} {busy:>6.0%} {p50:>18.1f} {at50:>8.1f} {ratio50:>5.2f}"
            f" {p99:>19.1f} {at99:>8.1f} {ratio99:>5.2f}"
        )


async def send(
    ports: list[int], requests: list[bytes], rate: float, seconds: float, seed: int
) -> list[Measured]:
    """Send each replica its share of the rate."""
    share = rate / len(ports)
    loads = [
        open_loop(port, requests, share, seconds, seed=100 * seed + number)
        for number, port in enumerate(ports)
    ]
    return await asyncio.gather(*loads)


if __name__ == "__main__":
    main()
