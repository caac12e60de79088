"""Several bundles in one server: what those cost that nobody asks, and load that is spread over all."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import bare, processes, rounds, servers
from benchmarks.checks import Check
from benchmarks.load import request_bytes
from service import bundle

CONNECTIONS = 32
KEPT = 0.9
ALONE = "one bundle alone"


def measure(
    model: Path,
    texts: Sequence[str],
    scratch: Path,
    *,
    rounds_: int,
    seconds: float,
    loaded: Sequence[int] = (1, 2, 8),
) -> tuple[list[Check], dict[str, object]]:
    """The most of `loaded` are served, and so many asked, beside a server of one; texts per second, and threads."""
    copies = [copy(model, scratch, f"copy{number + 1}") for number in range(max(loaded))]
    ids = [bundle.load(path).manifest.id for path in copies]
    sizes = [*map(bare.tokens, bare.encode(bundle.load(model), "embed", texts))]
    weights = np.asarray(sizes) / np.mean(sizes)
    with ExitStack() as stack:
        one = replace(servers.quartet("fp32"), name="one bundle")
        alone = rounds.start(stack, one, copies[0], scratch)
        many = replace(servers.quartet("fp32", copies[1:]), name="many bundles")
        running = rounds.start(stack, many, copies[0], scratch)

        def turn(
            served: servers.Running, asked: int
        ) -> tuple[servers.Running, Callable[[], float]]:
            found = (served, encoded(texts, ids[:asked]), weights, CONNECTIONS, seconds)
            return served, lambda: rounds.closed(*found).rate

        turns = {ALONE: turn(alone, 1)}
        turns |= {f"{asked} of {len(copies)} asked": turn(running, asked) for asked in loaded}
        rates = rounds.take_turns(turns, rounds_)
        threads = {
            "one": processes.threads(alone.process.pid),
            "many": processes.threads(running.process.pid),
        }
    wanted = [
        Check(
            f"bundles, {name}: of one alone",
            [float(a / b) for a, b in zip(found, rates[ALONE], strict=True)],
            KEPT,
        )
        for name, found in rates.items()
        if name != ALONE
    ]
    what = f"threads of {len(copies)} bundles, beyond those of one"
    wanted.append(Check(what, [threads["many"] - threads["one"]], 0, at_most=True))
    return wanted, {"texts_per_second": rates, "threads": threads}


def copy(model: Path, scratch: Path, version: str) -> Path:
    """The same bundle under another version."""
    full = bundle.load(model)
    out = scratch / "copies" / version
    out.mkdir(parents=True)
    for name in full.manifest.files():
        shutil.copyfile(full.file(name), out / name)
    manifest = json.loads((model / bundle.MANIFEST).read_text())
    (out / bundle.MANIFEST).write_text(json.dumps({**manifest, "version": version}))
    return out


def encoded(texts: Sequence[str], ids: Sequence[str]) -> list[bytes]:
    """Requests that ask the bundles in turn."""
    bodies = (
        {**servers.quartet_body(text), "model": ids[number % len(ids)]}
        for number, text in enumerate(texts)
    )
    return [request_bytes("/embed", json.dumps(body).encode()) for body in bodies]
