"""The goals of a fleet on one machine: repeated texts, cold models, and fair shares of several devices.

    python -m benchmarks.fleet BUNDLE [repeats] [hits] [cold] [crash] [shares] [heads]

- `repeats`: a trace with 37 % repeated texts, with `cache_mb` per without it, per processor second, without HTTP.
- `hits`: the latency of a remembered result over HTTP, less that of the liveness check.
- `cold`: 100 copies of BUNDLE within a budget for ten, under Zipf traffic, relative to ten resident ones.
- `crash`: from the end of the inference process to an answer of the busiest of 30 open models, and of a model alone.
- `shares`: the ratio of two API keys' throughputs on one device, and that on two devices per that on one.
- `heads`: 200 heads on one encoder per one head: throughput and memory.
"""

import argparse
import asyncio
import http.client
import itertools
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.heads import heads, memory_bytes
from benchmarks.lib import machine, processes, servers, traffic
from service.core.bundle import hash_file, read_manifest
from service.embedded import EmbeddedService
from service.engines import proofs
from service.keys import make_key, record
from service.rollout.model_manager import USE_S
from service.tasks.embedding import Embedding

Figures = dict[str, float]
PART, PARTS = 300, 10  # requests of a round, and rounds
MODELS, BUDGET, REQUESTS, WARM, PAIRS = 100, 10, 200, 50, 9
CRASHING, CRASHES = 30, 5  # open models, and ends of their process
KEYS = {name: make_key() for name in ("many", "few", "bulk")}


def trace(draw: np.random.Generator) -> list[str]:
    """Return texts of which a share repeats an earlier one, the popular ones more often, by a Zipf law."""
    found: list[str] = []
    for text in traffic.texts(traffic.MIXES["news"], PART * PARTS):
        repeats = found and draw.random() < 0.37
        found.append(found[(draw.zipf(1.2) - 1) % len(found)] if repeats else text)
    return found


async def repeats(bundle: Path, _: Path) -> Figures:
    async def rate(service: EmbeddedService, texts: Sequence[str]) -> float:
        left, began = iter(texts), time.process_time()

        async def call() -> None:
            for text in left:
                await service.answer(Embedding(inputs=[text]))

        await asyncio.gather(*(call() for _ in range(16)))
        return len(texts) / (time.process_time() - began)

    texts, ratios = trace(np.random.default_rng(0)), []
    async with EmbeddedService(bundle) as plain, EmbeddedService(bundle, cache_mb=64) as cached:
        for start in range(0, len(texts), PART):
            part = texts[start : start + PART]
            ratios.append(await rate(cached, part) / await rate(plain, part))
    return {"repeated": 1 - len({*texts}) / len(texts), "cached_per_plain": median(ratios)}


async def hits(bundle: Path, _: Path) -> Figures:
    with service(bundle, "--cache-mb", 16) as (_, port):
        client = http.client.HTTPConnection("127.0.0.1", port)
        body = {"inputs": "Ada drew a comet."}
        pairs = [
            (call(client, "/embed", body)[0], call(client, "/health/live")[0]) for _ in range(2000)
        ]
    return {"hit_minus_live_ms": median(hit - live for hit, live in pairs[100:])}


service = partial(servers.running_module, "service", "--log-level", "error")


def call(
    client: http.client.HTTPConnection, path: str, body: object = None, key: str = ""
) -> tuple[float, Any]:
    """Send a request, and return its milliseconds and the response."""
    began, headers = time.perf_counter(), {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {KEYS[key]}"} if key else {}
    client.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
    with client.getresponse() as reply:
        text = reply.read()
        ms = 1000 * (time.perf_counter() - began)
        assert reply.status == 200, reply.status
    return ms, json.loads(text or "null")


def copy_models(bundle: Path, root: Path, number: int) -> list[str]:
    """Make proven copies of a bundle in `models_dir`, and return their names."""
    names = [f"m{n}" for n in range(number)]
    manifest = json.loads((bundle / "manifest.json").read_text())
    for name in names:
        (root / name).mkdir()
        for file in {*bundle.iterdir()} - {bundle / "manifest.json"}:
            os.link(file, root / name / file.name)
        (root / name / "manifest.json").write_text(json.dumps({**manifest, "name": name}))
    with service(*on_demand(bundle, root, 1)) as (_, port):
        ask(port, names[0])
    # The copies have the graph of the first, so its proof is theirs.
    (proof,) = json.loads((root / proofs.FILE).read_text()).values()
    copies = {
        hash_file(root / name / "manifest.json"): {**proof, "files": proofs.identify(root / name)}
        for name in names
    }
    (root / proofs.FILE).write_text(json.dumps(copies))
    return names


def on_demand(bundle: Path, root: Path, number: int) -> tuple[object, ...]:
    """Return the flags of a service with the memory of this many copies of a bundle."""
    opened = max(graph.memory.opened for graph in read_manifest(bundle).graphs if graph.memory)
    return "--models-dir", root, "--memory-budget", number * opened


def ask(port: int, name: str) -> float:
    """Send a request for a model, and return its milliseconds."""
    client = http.client.HTTPConnection("127.0.0.1", port)
    ms, reply = call(client, "/embed", {"inputs": "Ada", "model": name})
    assert reply["model"].startswith(f"{name}@"), (name, reply["model"])
    return ms


async def cold(bundle: Path, root: Path) -> Figures:
    names = copy_models(bundle, root, MODELS)
    draw, waits = np.random.default_rng(7), list[tuple[bool, float]]()
    popular = 1 / np.arange(1, MODELS + 1)  # Zipf's law

    def ask_fleet(name: str) -> None:
        client = http.client.HTTPConnection("127.0.0.1", fleet_port)
        models = call(client, "/models")[1]["models"]
        is_cold = any(name == model["name"] and model["state"] == "cold" for model in models)
        waits.append((is_cold, ask(fleet_port, name)))

    def ratio() -> float:
        """Return the processor time of warm requests of the control per that of the fleet, in alternating turns."""
        own, others = processes.cpu_s(pid), processes.cpu_s(fleet_pid)
        for _, to in itertools.product(range(WARM), (port, fleet_port)):
            for name in names[:BUDGET]:
                ask(to, name)
        return (processes.cpu_s(pid) - own) / (processes.cpu_s(fleet_pid) - others)

    def memory(root_pid: int) -> int:
        return sum(memory_bytes(pid) for pid, _ in processes.members(root_pid))

    with (
        service(*(root / name for name in names[:BUDGET])) as (pid, port),
        service(*on_demand(bundle, root, BUDGET)) as (fleet_pid, fleet_port),
    ):
        with ThreadPoolExecutor(32) as clients:
            asking = []
            for _ in range(REQUESTS):
                name = draw.choice(names, p=popular / popular.sum())
                asking.append(clients.submit(ask_fleet, name))
                time.sleep(draw.exponential(0.25))
            for one in asking:
                one.result()
        cold_ms = [ms for is_cold, ms in waits if is_cold]
        for name in names[:BUDGET]:
            ask(port, name), ask(fleet_port, name)
        ratios = [ratio() for _ in range(PAIRS)]
        return {
            "cold_answers": len(cold_ms),
            "cold_p50_ms": median(cold_ms),
            "cold_p99_ms": float(np.percentile(cold_ms, 99)),
            "warm_p50_ms": median(ms for is_cold, ms in waits if not is_cold),
            "warm_throughput_per_resident": median(ratios),
            "warm_throughput_least": min(ratios),
            "warm_throughput_most": max(ratios),
            "memory_per_resident": memory(fleet_pid) / memory(pid),
        }


async def crash(bundle: Path, root: Path) -> Figures:
    *others, busiest = copy_models(bundle, root, CRASHING)

    def recovery_ms(port: int, pid: int, name: str) -> float:
        inference = max(processes.members(pid), key=lambda own: memory_bytes(own[0]))[0]
        os.kill(inference, signal.SIGKILL)
        began = time.perf_counter()
        while True:
            with suppress(AssertionError):
                ask(port, name)
                return 1000 * (time.perf_counter() - began)

    one, many = list[float](), list[float]()
    # New services each time, because a process that ends again soon is restarted after a pause.
    for _ in range(CRASHES):
        with service(root / busiest) as (pid, port):
            ask(port, busiest)
            one.append(recovery_ms(port, pid, busiest))
        with service(*on_demand(bundle, root, CRASHING)) as (pid, port):
            for name in [*others, *[busiest] * 20]:
                ask(port, name)
            time.sleep(2 * USE_S)  # until the main process knows which models are in use
            many.append(recovery_ms(port, pid, busiest))
    return {
        "recovery_of_one_ms": median(one),
        f"recovery_of_{CRASHING}_ms": median(many),
        f"recovery_of_{CRASHING}_most_ms": max(many),
    }


async def shares(bundle: Path, root: Path) -> Figures:
    keys = "".join(record(name, key) for name, key in KEYS.items())
    (root / "keys.toml").write_text(keys + 'priority = "bulk"\n')
    body = {"inputs": traffic.texts(traffic.MIXES["news"], 32)}

    def ratio(devices: str, rival: str) -> float:
        answered = Counter[str]()

        def run(name: str) -> None:
            client = http.client.HTTPConnection("127.0.0.1", port)
            while time.monotonic() < end:
                call(client, "/embed", body, name)
                answered[name] += 1

        flags = ("--devices", devices, "--api-keys", root / "keys.toml", "--deadline-ms", 60_000)
        with service(bundle, *flags) as (_, port), ThreadPoolExecutor(18) as clients:
            end = time.monotonic() + 20.0
            list(clients.map(run, ["many"] * 12 + [rival] * 6))
        return answered["many"] / answered[rival]

    found = {}
    for rival in ("few", "bulk"):
        pairs = [(ratio("cpu*2", rival), ratio("cpu", rival)) for _ in range(3)]
        found[f"many_per_{rival}"] = median(one for _, one in pairs)
        found[f"many_per_{rival}_on_two_per_one"] = median(two / one for two, one in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parts = {part.__name__: part for part in (repeats, hits, cold, crash, shares, heads)}
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    options = parser.parse_args()
    found: dict[str, object] = {"machine": machine.describe()}
    for name in options.parts or parts:
        with tempfile.TemporaryDirectory(dir=options.bundle.parent) as folder:
            found |= asyncio.run(parts[name](options.bundle, Path(folder)))
    for name, value in found.items():
        print(f"{name:<32} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
