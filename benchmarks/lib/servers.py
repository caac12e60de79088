"""The servers under test: how to start each, its requests, and how to read its answers.

A `Server` is a value; `serving` runs one. All get the same weights (`benchmarks.lib.models`), the machine's usable
cores, one text per request and at most 256 tokens. Other settings are those that their documentation recommends for
speed. `prepare` converts the checkpoint to a server's format (a bundle, an ONNX graph) once, before any measurement.
"""

import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib import environments, models, processes
from benchmarks.lib.environments import PEERS, ROOT
from service.core import bundle
from service.settings import usable_cores

TAIL = 3000  # characters of a log in an error
WINDOW = "/window"  # the path of a load for a contender that measures itself
END_S = 20.0  # for a server to end by itself


class StartError(RuntimeError):
    """A server that could not be prepared or did not become ready, with the end of its log."""


@dataclass(frozen=True)
class Call:
    """One task over HTTP: the path, the body for a text, and the result in an answer."""

    path: str
    body: Callable[[str], dict[str, Any]]
    answer: Callable[[Any], Any]


def unchanged(python: Path, model: Path, scratch: Path) -> Path:
    return model


@dataclass(frozen=True)
class Server:
    """command: argv for an interpreter, the prepared model and a port; it listens on 127.0.0.1.

    calls: by task, `embed`, `classify` or `ner`; `note` is for readers of a table.
    environment: the peer under `benchmarks/peers` whose interpreter it gets; Quartet's own when None.
    prepare: from interpreter, checkpoint and scratch folder to the model in this server's format.
    measures_itself: it gets a load, measures itself and returns the figures
    (`benchmarks.lib.onnxruntime_baseline`).
    folder: its working directory, which has the code of a Python server.
    """

    name: str
    command: Callable[[Path, Path, int], list[str]]
    calls: Mapping[str, Call]
    ready: str = "/health"
    environment: str | None = None
    prepare: Callable[[Path, Path, Path], Path] = unchanged
    env: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    measures_itself: bool = False
    folder: Path = ROOT

    def python(self) -> Path:
        """Return the interpreter that runs it. Raises Unavailable when its environment is not built."""
        if self.environment is None:
            return Path(sys.executable)
        return environments.of_peer(self.environment).python()


class Running(NamedTuple):
    """A running server. start_s: from the start of the process until it was ready"""

    port: int
    process: subprocess.Popen[bytes]
    start_s: float


@contextmanager
def serving(
    server: Server, model: Path, scratch: Path, timeout_s: float = 180
) -> Iterator[Running]:
    """Run a server of a checkpoint on a free port, and end it and its child processes after the block.

    Its output goes to a file in `scratch`. Raises Unavailable, and StartError with the end of that file.
    """
    python = server.python()
    form = server.prepare(python, model, scratch)
    port = free_port()
    log = scratch / f"{server.name.replace(' ', '-')}.log"
    with log.open("wb") as words:
        began = time.perf_counter()
        process = subprocess.Popen(
            server.command(python, form, port),
            cwd=server.folder,
            env={**os.environ, **shared_env(), **server.env},
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until_ready(process, port, server.ready, timeout_s)
            yield Running(port, process, time.perf_counter() - began)
        except NotReady as error:
            raise StartError(f"{server.name} {error}: {tail(log)}") from None
        finally:
            end(process)


@contextmanager
def running_module(
    *arguments: object, ready: str = "/health/ready", timeout_s: float = 180
) -> Iterator[tuple[int, int]]:
    """Run a module of this checkout that serves on `--port`; yields the id of its process and its port."""
    port = free_port()
    command = [sys.executable, "-m", *map(str, arguments), "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        wait_until_ready(process, port, ready, timeout_s)
        yield process.pid, port
    finally:
        end(process)


class NotReady(Exception):
    pass


def shared_env() -> dict[str, str]:
    """Return the environment of every server: the same cores, no telemetry, no downloads."""
    cores = str(usable_cores())
    return {
        "OMP_NUM_THREADS": cores,
        "MKL_NUM_THREADS": cores,
        "RAYON_NUM_THREADS": cores,
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "ORT_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(
    process: subprocess.Popen[bytes], port: int, path: str, timeout_s: float
) -> None:
    end = time.monotonic() + timeout_s
    while process.poll() is None:
        if answers(port, path):
            return
        if time.monotonic() > end:
            raise NotReady(f"was not ready within {timeout_s:g} s")
        time.sleep(0.05)
    raise NotReady(f"ended at start with status {process.returncode}")


def answers(port: int, path: str) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server and its child processes: by SIGTERM, then by SIGKILL."""
    known = processes.started(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    processes.kill(known | processes.started(process.pid))
    process.wait()


def ask(port: int, call: Call, text: str) -> Any:
    """Send one request, and return its result. Raises RuntimeError for an answer that is not 200."""
    return call.answer(json.loads(post(port, call.path, call.body(text))[1]))


def post(
    port: int, path: str, body: object, timeout_s: float = 60
) -> tuple[http.client.HTTPMessage, bytes]:
    """Send a request, and return headers and body of the answer. Raises RuntimeError for one that is not 200."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        content = reply.read()
    if reply.status != 200:
        raise RuntimeError(f"{path} answered {reply.status}: {content.decode()[:TAIL]}")
    return reply.headers, content


def tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip() or "no output"


# -- formats of the model -------------------------------------------------------------------------


def place(scratch: Path, form: str, model: Path) -> Path:
    """Return the path of a model in a server's format, which differs for checkpoints of the same name."""
    mark = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:8]
    return scratch / form / f"{model.name}-{mark}"


def run_once(command: list[str], log: Path) -> None:
    """Run a step of a preparation. Raises StartError with the end of its log."""
    with log.open("ab") as words:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **shared_env()},
            stdout=words,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode:
        raise StartError(f"{' '.join(command)} failed: {tail(log)}")


def to_bundle(python: Path, model: Path, scratch: Path) -> Path:
    """Return a full Quartet bundle of a checkpoint; a bundle is returned unchanged."""
    if (model / bundle.MANIFEST).is_file():
        return model
    out = place(scratch, "quartet", model)
    if not out.is_dir():
        out.parent.mkdir(parents=True, exist_ok=True)
        run_once(
            [sys.executable, "-m", "export", str(model), str(out)], scratch / "quartet-export.log"
        )
    return out


def to_onnx(python: Path, model: Path, scratch: Path) -> Path:
    """The checkpoint's ONNX graph, by optimum's exporter and optimiser, with tokenizer and configuration."""
    out = place(scratch, "onnx", model)
    if not out.is_dir():
        part = out.with_name(f"{out.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        script = [str(python), str(PEERS / "infinity" / "to_onnx.py")]
        given = [str(model), str(part), str(models.MAX_TOKENS)]
        run_once([*script, *given], scratch / "onnx-export.log")
        part.rename(out)
    return out


# -- requests and answers -------------------------------------------------------------------------


def quartet_body(text: str) -> dict[str, Any]:
    return {"inputs": text, "truncate": True}


def inputs_body(text: str) -> dict[str, Any]:
    return {"inputs": text}


def infinity_embed_body(text: str) -> dict[str, Any]:
    return {"model": "default/not-specified", "input": text}


FIRST_EMBEDDING = Call("/embed", inputs_body, lambda document: document["embeddings"][0])


# -- the table ------------------------------------------------------------------------------------


def quartet(precision: str) -> Server:
    """Return Quartet at a precision."""

    def command(python: Path, model: Path, port: int) -> list[str]:
        served = [str(python), "-m", "service", str(model), "--port", str(port)]
        return [*served, "--precision", precision, "--log-format", "json"]

    return Server(
        name=f"quartet {precision}",
        command=command,
        ready="/health/ready",
        prepare=to_bundle,
        calls={
            "embed": Call("/embed", quartet_body, lambda document: document["embeddings"][0]),
            "classify": Call("/classify", quartet_body, lambda document: document["results"][0]),
            "ner": Call("/ner", quartet_body, lambda document: document["results"][0]),
        },
    )


def infinity(engine: str) -> Callable[[Path, Path, int], list[str]]:
    def command(python: Path, model: Path, port: int) -> list[str]:
        options = {
            "model-id": model,
            "served-model-name": "minilm",
            "engine": engine,
            "device": "cpu",
            "pooling-method": "mean",
            "host": "127.0.0.1",
            "port": port,
            "log-level": "warning",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return [str(python.with_name("infinity_emb")), "v2", *flags]

    return command


def app(peer: str) -> Callable[[Path, Path, int], list[str]]:
    def command(python: Path, model: Path, port: int) -> list[str]:
        return [str(python), str(PEERS / peer / "app.py"), str(model), "--port", str(port)]

    return command


INFINITY_EMBED = Call(
    "/embeddings", infinity_embed_body, lambda document: document["data"][0]["embedding"]
)


def quartet_as_infinity(precision: str) -> Server:
    """Return Quartet at a precision, which answers infinity's requests on infinity's paths."""
    native = quartet(precision)

    def command(python: Path, model: Path, port: int) -> list[str]:
        return [*native.command(python, model, port), "--root-dialect", "infinity"]

    name = f"{native.name}, infinity's API"
    return replace(native, name=name, command=command, calls={"embed": INFINITY_EMBED})


SERVERS = (
    quartet("fp32"),
    quartet("int8"),
    quartet_as_infinity("fp32"),
    Server(
        name="infinity torch",
        environment="infinity",
        command=infinity("torch"),
        calls={"embed": INFINITY_EMBED},
    ),
    Server(
        name="infinity optimum",
        environment="infinity",
        command=infinity("optimum"),
        prepare=to_onnx,
        calls={"embed": INFINITY_EMBED},
    ),
    Server(
        name="sentence-transformers",
        environment="sentence_transformers",
        command=app("sentence_transformers"),
        calls={"embed": FIRST_EMBEDDING},
        note="FastAPI, each request encoded by itself",
    ),
    Server(
        name="litserve",
        environment="litserve",
        command=app("litserve"),
        calls={"embed": FIRST_EMBEDDING},
        note="sentence-transformers in batches of up to 32",
    ),
)


def chosen(names: Sequence[str] | None, among: Sequence[Server] = SERVERS) -> list[Server]:
    """Return the servers of these names, or all. Raises KeyError as `named` does."""
    return [named(name, among) for name in names] if names else [*among]


def named(name: str, among: Sequence[Server] = SERVERS) -> Server:
    """Return the server of a name. Raises KeyError with the known names."""
    by_name = {server.name: server for server in among}
    if name not in by_name:
        raise KeyError(f"no server {name!r}; there are {', '.join(by_name)}")
    return by_name[name]
