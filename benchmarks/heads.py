"""Many heads on one encoder relative to one head: throughput, memory of a head, and times to load and unload.

    python -m benchmarks.heads ENCODER [--heads 200] [--rounds 5] [--seconds 3]

ENCODER is a bundle with hidden states. The heads have random weights. The rounds with requests for one head and for all
heads alternate in one process, without HTTP. Throughput counts the processor's seconds of this process, which the
machine's other work changes less than the time of day.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.lib import traffic
from export import head_bundle
from model.frozen import FrozenEncoder, TrainedHead, make_head
from service.core import bundle
from service.core.manifest import Head
from service.core.session import trim
from service.core.state_heads import StateHead
from service.embedded import EmbeddedService
from service.tasks.classification import Classification

CALLERS = 64  # requests at once
DESCRIBED = Head(task="classification", labels=("a", "b", "c", "d", "e", "f"))


def memory_bytes(pid: int | str = "self") -> int:
    """Return the private memory of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def save_heads(encoder: Path, folder: Path, number: int) -> int:
    """Write head bundles with random weights, and return the bytes of the weights of one."""
    frozen = FrozenEncoder(bundle.load(encoder))
    frozen.golden_states = cache(frozen.golden_states)  # type: ignore[method-assign]
    layers = make_head(DESCRIBED, frozen.hidden_size).export()
    draw = np.random.default_rng(0)
    size = sum(array.nbytes for dense in layers.dense for array in dense)
    for index in range(number):
        dense = [
            tuple(draw.normal(scale=0.05, size=a.shape).astype(np.float32) for a in own)
            for own in layers.dense
        ]
        head = StateHead(layers.layers, dense)  # type: ignore[arg-type]
        trained = TrainedHead("classification", DESCRIBED, head, {}, "", 0)
        head_bundle.write(frozen, trained, folder / f"head-{index}", "no data")
    return size


async def throughput(
    service: EmbeddedService, names: list[str], texts: list[str], seconds: float
) -> float:
    """Return the requests per processor second of concurrent callers, each of which waits for its answers."""
    end, done = time.perf_counter() + seconds, 0
    requests = zip(itertools.cycle(names), itertools.cycle(texts), strict=False)

    async def call() -> None:
        nonlocal done
        while time.perf_counter() < end:
            name, text = next(requests)
            await service.answer(Classification(inputs=[text]), model=name)
            done += 1

    began = time.process_time()
    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return done / (time.process_time() - began)


async def measure(options: argparse.Namespace, root: Path) -> dict[str, float]:
    weights = save_heads(options.encoder, root, options.heads)
    names = [f"head-{index}" for index in range(options.heads)]
    texts = traffic.texts(traffic.MIXES[options.mix])
    async with EmbeddedService(options.encoder, models_dir=root, precision="fp32") as service:
        loads, ratios, unloads = [], [], []
        await service.load_model(names[0])
        await throughput(service, names[:1], texts, options.seconds)  # warms up
        trim()
        before = memory_bytes()
        for name in names[1:]:
            began = time.perf_counter()
            await service.load_model(name)
            loads.append(1000 * (time.perf_counter() - began))
        each = (memory_bytes() - before) / (len(names) - 1)
        for number in range(options.rounds):
            kinds = [names[:1], names] if number % 2 else [names, names[:1]]
            rates = {len(k): await throughput(service, k, texts, options.seconds) for k in kinds}
            ratios.append(rates[len(names)] / rates[1])
        for name in names[1:]:
            began = time.perf_counter()
            await service.unload_model(f"{name}@1")
            unloads.append(1000 * (time.perf_counter() - began))
    return {
        "heads": len(names),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "requests_per_processor_second_of_one": rates[1],
        "weights_bytes": weights,
        "memory_bytes": each,
        "memory_per_weights": each / weights,
        "load_ms": statistics.median(loads),
        "unload_ms": statistics.median(unloads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--heads", type=int, default=200)
    parser.add_argument("--mix", choices=traffic.MIXES, default="news", help="lengths of texts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(parser.parse_args(), Path(folder)))
    for name, value in found.items():
        print(f"{name:<38} {value:,.3f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
