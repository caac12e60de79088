"""Embeddings through the APIs of other servers next to the native route, and what these APIs add to a start.

    python -m benchmarks.dialects [--mix news] [--rounds N] [--seconds N] [--out FILE]

is `python -m benchmarks.goals --only dialects`. One server answers the same texts on each route in turn. The native
route takes part twice: the ratio of its two turns is the noise of the ratios.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib import onnxruntime_baseline, rounds, servers
from benchmarks.lib.environments import ROOT
from benchmarks.lib.goal_checks import Check
from benchmarks.lib.load_generator import closed_loop, request_bytes
from benchmarks.lib.servers import Call, Running, inputs_body, quartet_body
from benchmarks.tasks import ratios
from service.core import bundle

CONNECTIONS = 32
OF_NATIVE = 0.95  # of the tokens per second
CPU_OF_NATIVE = 1.05
IMPORT_S, IMPORT_MB = 0.2, 10.0
NATIVE, AGAIN = "/embed", "/embed again"
COMPARED = 8  # texts whose vectors are compared

# A new interpreter imports what the service imports without its dialects, then the dialects.
IMPORT = """
import json, time
import service.api.admin, service.api.native_routes, service.api.token_routes
def resident_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
mb, began = resident_mb(), time.perf_counter()
import service.api.dialects.registry
print(json.dumps({"seconds": time.perf_counter() - began, "mb": resident_mb() - mb}))
"""


def openai_vector(document: Any) -> Any:
    found = document["data"][0]["embedding"]
    return np.frombuffer(base64.b64decode(found), "<f4") if isinstance(found, str) else found


def calls(model: str, head: str) -> dict[str, Call]:
    """Return the calls by route. model, head: the names of a model and of its head for embeddings"""

    def cohere_body(text: str) -> dict[str, Any]:
        kinds = {"input_type": "search_document", "embedding_types": ["float"]}
        return {"model": model, "texts": [text], **kinds}

    def infer_body(text: str) -> dict[str, Any]:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
        return {"inputs": [tensor], "outputs": [{"name": head}]}

    native = Call("/embed", quartet_body, lambda document: document["embeddings"][0])
    return {
        NATIVE: native,
        AGAIN: native,
        "/v1/embeddings": Call("/v1/embeddings", lambda text: {"input": text}, openai_vector),
        "/v1/embeddings, base64": Call(
            "/v1/embeddings",
            lambda text: {"input": text, "encoding_format": "base64"},
            openai_vector,
        ),
        "/tei/embed": Call("/tei/embed", inputs_body, lambda document: document[0]),
        "/cohere/v2/embed": Call(
            "/cohere/v2/embed", cohere_body, lambda document: document["embeddings"]["float"][0]
        ),
        "/infinity/embeddings": Call(
            "/infinity/embeddings", lambda text: {"input": text}, openai_vector
        ),
        "/hf/pipeline/feature-extraction": Call(
            "/hf/pipeline/feature-extraction", inputs_body, lambda document: document[0]
        ),
        "/v2/models/MODEL/infer": Call(
            f"/v2/models/{model}/infer",
            infer_body,
            lambda document: document["outputs"][0]["data"],
        ),
    }


def measure(
    model: Path, texts: Sequence[str], scratch: Path, *, rounds_: int, seconds: float
) -> tuple[list[Check], dict[str, Any]]:
    """Measure tokens per second and processor time of each route, and the import of all dialects.

    model: a bundle with a head for embeddings
    """
    full = bundle.load(model)
    heads = full.manifest.heads.items()
    head = next(name for name, head in heads if head.task == "embedding")
    routes = calls(full.manifest.name, head)
    encodings = onnxruntime_baseline.encode(full, "embed", texts)
    sizes = np.array([onnxruntime_baseline.tokens(windows) for windows in encodings])
    with ExitStack() as stack:
        running = rounds.start(stack, servers.quartet("fp32"), model, scratch)
        with rounds.working(running):
            for call in routes.values():
                check_vectors(running, call, routes[NATIVE], texts[:COMPARED])
        turns: dict[str, tuple[Running, Callable[[], Speed]]] = {
            route: (running, partial(speed, running, call, texts, sizes, seconds))
            for route, call in routes.items()
        }
        found = rounds.take_turns(turns, rounds_)
    rates = {route: [one.rate for one in speeds] for route, speeds in found.items()}
    cpu_us = {route: [one.cpu_us for one in speeds] for route, speeds in found.items()}
    imports = [import_dialects() for _ in range(rounds_)]
    seconds_, mb = ([one[key] for one in imports] for key in ("seconds", "mb"))
    checks = [
        check
        for route in found
        if route != NATIVE
        for check in (
            Check(f"{route}: tokens/s of /embed", ratios(rates[route], rates[NATIVE]), OF_NATIVE),
            Check(
                f"{route}: processor time of /embed",
                ratios(cpu_us[route], cpu_us[NATIVE]),
                CPU_OF_NATIVE,
                at_most=True,
            ),
        )
    ]
    checks += [
        Check("all dialects: import", seconds_, IMPORT_S, at_most=True, unit="s"),
        Check("all dialects: memory of a process", mb, IMPORT_MB, at_most=True, unit="MB"),
    ]
    return checks, {"rates": rates, "cpu_us": cpu_us, "import_s": seconds_, "import_mb": mb}


class Speed(NamedTuple):
    """rate: tokens per second; cpu_us: microseconds of the server's processor time per token"""

    rate: float
    cpu_us: float


def speed(
    running: Running, call: Call, texts: Sequence[str], sizes: np.ndarray, seconds: float
) -> Speed:
    """Measure a closed loop. sizes: tokens of each text, since windows contain different texts"""
    requests = [request_bytes(call.path, json.dumps(call.body(text)).encode()) for text in texts]
    load = closed_loop(running.port, requests, CONNECTIONS, seconds, warm_s=rounds.WARM_S)
    found, spent = rounds.run_load(running, load)
    assert found.numbers is not None
    tokens = float(sizes[found.numbers].sum())
    return Speed(tokens / seconds, 1e6 * spent / tokens)


def check_vectors(running: Running, call: Call, native: Call, texts: Sequence[str]) -> None:
    """Raise RuntimeError unless a route answers with the native vectors."""
    for text in texts:
        found, expected = (servers.ask(running.port, one, text) for one in (call, native))
        if not np.allclose(np.ravel(found), expected, rtol=0, atol=1e-5):
            raise RuntimeError(f"{call.path}: the vector of {text!r} is not that of {native.path}")


def import_dialects() -> dict[str, float]:
    """Return the seconds and the megabytes of resident memory that the import of all dialects takes."""
    command = [sys.executable, "-c", IMPORT]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(ended.stdout)
    return found


if __name__ == "__main__":
    from benchmarks import goals

    sys.argv[1:1] = ["--only", "dialects"]
    goals.main()
