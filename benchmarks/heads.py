"""Many heads on one encoder relative to one head: throughput, memory of a head, and times to load and unload.

The heads have random weights. The rounds with requests for one head and for all heads alternate in one process, without
HTTP. The throughput per processor second changes less than the one by time while the machine does other work.
"""

import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
HEADS, ROUNDS, ROUND_S = 200, 5, 3.0
ENCODER = Path("encoders/quartet-base")  # where the bundle has no hidden states
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
    service: EmbeddedService, names: list[str], texts: list[str]
) -> NDArray[np.float64]:
    """Return the requests per processor second and per second of concurrent callers that wait for their answers."""
    began, used = time.perf_counter(), time.process_time()
    done, end = 0, began + ROUND_S
    requests = zip(itertools.cycle(names), itertools.cycle(texts), strict=False)

    async def call() -> None:
        nonlocal done
        while time.perf_counter() < end:
            name, text = next(requests)
            await service.answer(Classification(inputs=[text]), model=name)
            done += 1

    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return done / np.array([time.process_time() - used, time.perf_counter() - began])


async def heads(encoder: Path, root: Path) -> dict[str, float]:
    if bundle.read_manifest(encoder).states is None:
        encoder = root / ".encoder"
        options = ["--states", "--precision", "fp32"]
        subprocess.run([sys.executable, "-m", "export", ENCODER, encoder, *options], check=True)
    weights = save_heads(encoder, root, HEADS)
    names = [f"head-{index}" for index in range(HEADS)]
    texts = traffic.texts(traffic.MIXES["news"])
    async with EmbeddedService(encoder, models_dir=root, precision="fp32") as service:
        loads, rates, unloads = [], [], []
        await service.load_model(names[0])
        await throughput(service, names[:1], texts)  # warms up
        trim()
        before = memory_bytes()
        for name in names[1:]:
            began = time.perf_counter()
            await service.load_model(name)
            loads.append(1000 * (time.perf_counter() - began))
        each = (memory_bytes() - before) / (HEADS - 1)
        for number in range(ROUNDS):
            kinds = [names[:1], names][:: 1 if number % 2 else -1]
            found = {len(kind): await throughput(service, kind, texts) for kind in kinds}
            rates.append(found[HEADS] / found[1])
        for name in names[1:]:
            began = time.perf_counter()
            await service.unload_model(f"{name}@1")
            unloads.append(1000 * (time.perf_counter() - began))
    processor, wall = np.median(rates, axis=0)
    return {
        f"of_{HEADS}_heads_per_one": processor,
        f"of_{HEADS}_heads_per_one_by_time": wall,
        "head_bytes_per_weights": each / weights,
        "head_load_ms": statistics.median(loads),
        "head_unload_ms": statistics.median(unloads),
    }
