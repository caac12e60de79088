"""Measure the service behind Ray Serve, and by itself: processor time per request, all processes included.

.venv-ray/bin/python -m benchmarks.ray_serve BUNDLE    with the variables of docs/how-to/ray.md

One replica with all cores (`one`) and a replica for each core (`each`) run in one local cluster of Ray. `plain` is the
service by itself, and `devices` the service with a device for each core, whose batches are as small as those of `each`.
The loads take turns, so that other work on the machine slows all of them, and the servers without load are stopped.
Ray's processes also work without requests: that time is stated, and it counts. So do the replicas of the other
application, unless `--applications` leaves it out.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.lib import processes, traffic
from benchmarks.lib.environments import ROOT
from benchmarks.lib.load_generator import closed_loop, request_bytes
from benchmarks.lib.servers import running_module
from service.settings import usable_cores

APPLICATIONS = ("one", "each")
IDLE_S = 5.0
SETTLE_S = 1.0  # after a server was stopped


def main() -> None:
    """Measure, and print a table; with --port, serve instead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--path", default="embed", help="route that takes inputs")
    parser.add_argument("--texts", type=int, default=1, help="of each request")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--applications", nargs="+", default=APPLICATIONS, choices=APPLICATIONS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.port:
        serve_on_ray(own.bundle.resolve(), own.precision, own.port, own.applications)
        return
    served = [str(own.bundle.resolve()), "--precision", own.precision]
    texts = traffic.texts(traffic.MIXES["news"])
    inputs = [texts[i : i + own.texts] for i in range(0, len(texts) - own.texts + 1, own.texts)]
    plain = ["service", *served, "--log-level", "error"]
    ray = ["benchmarks.ray_serve", *served, "--applications", *own.applications]
    devices = f"cpu*{usable_cores()}"
    with (
        running_module(*plain) as first,
        running_module(*plain, "--devices", devices) as second,
        running_module(*ray, ready=f"/{own.applications[-1]}/health/ready") as third,
    ):
        contenders = {"plain": (first, ""), "devices": (second, "")}
        contenders |= {name: (third, f"/{name}") for name in own.applications}
        idle = {name: processes.cores(pid, IDLE_S) for name, ((pid, _), _) in contenders.items()}
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
        for (pid, _), _ in contenders.values():
            processes.rest(pid)
        for number in range(own.rounds + 1):
            for name, ((pid, port), prefix) in contenders.items():
                path = f"{prefix}/{own.path}"
                requests = [
                    request_bytes(path, json.dumps({"inputs": part}).encode()) for part in inputs
                ]
                processes.wake(pid)
                time.sleep(SETTLE_S)
                before = processes.cpu_s(pid)
                load = uvloop.run(closed_loop(port, requests, own.connections, own.seconds))
                cpu_s = (processes.cpu_s(pid) - before) * load.seconds / load.lasted
                processes.wait_until_idle(pid)
                processes.rest(pid)
                if number:  # the first round is slower
                    figures = 1000 * cpu_s / load.requests, load.rate, load.percentile(50)
                    found[name].append(figures)
        for (pid, _), _ in contenders.values():
            processes.wake(pid)
    print(
        "          CPU ms   ratio  (range)      req/s   ratio  (range)     p50 ms   cores without requests"
    )
    plain_rounds = np.array(found["plain"])
    for name, rounds in found.items():
        ratios = (np.array(rounds) / plain_rounds).T
        cpu_ms, per_s, p50_ms = np.median(rounds, axis=0)
        cpu, rate = [f"{np.median(r):>8.2f}  ({r.min():.2f}-{r.max():.2f})" for r in ratios[:2]]
        print(f"{name:<8}{cpu_ms:>8.2f}{cpu}{per_s:>9.0f}{rate}{p50_ms:>9.1f}{idle[name]:>10.2f}")


def serve_on_ray(bundle: Path, precision: str, port: int, applications: Sequence[str]) -> None:
    """Serve applications on a local cluster, until the process ends."""
    import ray
    from ray import serve

    from quartet.ray_serve import Options, build

    cores = usable_cores()
    # Ray counts cores for placement only: both applications together get twice the machine's.
    ray.init(
        address="local",
        num_cpus=2 * cores,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        log_to_driver=False,
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    for name in applications:
        replicas = 1 if name == "one" else cores
        options = Options(
            bundles=(str(bundle),),
            settings={"precision": precision},
            cpus=cores // replicas,
            min_replicas=replicas,
            max_replicas=replicas,
        )
        serve.run(build(options), name=name, route_prefix=f"/{name}")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
