"""The service inside another program: the same results as over HTTP, and nothing else in its process."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI

from service.embedded import EmbeddedService
from service.errors import DeadlineExceeded, Draining, InvalidInput, UnknownModel
from service.tasks.classification import Classification
from tests import samples
from tests.served import client_of
from tests.stores import serve_folder
from tests.versions import restate

TEXTS = [samples.text(1 + number % 9, seed=number) for number in range(12)]
MASKED = "[MASK] of the old town"


@pytest.fixture
async def service(tasks_bundle: Path) -> AsyncIterator[EmbeddedService]:
    async with EmbeddedService(tasks_bundle) as service:
        yield service


CALLS = {
    "/classify": ("classify", {"inputs": TEXTS}, "results"),
    "/ner": ("ner", {"inputs": TEXTS}, "results"),
    "/embed": ("embed", {"inputs": TEXTS, "normalize": True}, "embeddings"),
    "/embed-sparse": ("embed_sparse", {"inputs": TEXTS}, "embeddings"),
    "/embed-tokens": ("embed_tokens", {"inputs": TEXTS[:2]}, "embeddings"),
    "/fill-mask": ("fill_mask", {"inputs": MASKED, "top_k": 3}, "results"),
    "/zero-shot": ("zero_shot", {"inputs": TEXTS, "labels": ["sport", "news"]}, "results"),
    "/similarity": ("similarity", {"source": TEXTS[3], "inputs": TEXTS}, "results"),
    "/rerank": ("rerank", {"query": TEXTS[3], "documents": TEXTS, "top_n": 4}, "results"),
}


@pytest.mark.parametrize("path", CALLS)
async def test_calls_return_what_http_returns(service, path):
    """Each call has the numbers, labels and offsets of the native route for the same fields, mounted in a program."""
    name, fields, key = CALLS[path]
    program = FastAPI()
    program.mount("/models", service.app)
    async with client_of(program) as client:
        reply = (await client.post(f"/models{path}", json=fields)).raise_for_status().json()

    found = await getattr(service, name)(**fields)

    assert leaves(reply[key]) == pytest.approx(leaves(found), abs=1e-6)


async def test_answers_to_questions(service):
    """Questions and contexts are two lists, aligned."""
    async with client_of(service.app) as client:
        body = {"inputs": [{"question": TEXTS[1], "context": TEXTS[8]}]}
        reply = (await client.post("/qa", json=body)).raise_for_status().json()

    found = await service.qa([TEXTS[1]], [TEXTS[8]])

    assert leaves(reply["results"]) == pytest.approx(leaves(found), abs=1e-6)


def leaves(value: Any) -> list[Any]:
    """Return the numbers and texts of a result in order, whatever holds them."""
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in leaves(one)]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in leaves(one)]
    return value.ravel().tolist() if isinstance(value, np.ndarray) else [value]


async def test_wrong_calls_name_their_fault(service):
    """Options are checked as over HTTP, and a late answer is an error."""
    with pytest.raises(InvalidInput, match="did you mean top_k"):
        await service.classify("a text", top=1)
    with pytest.raises(UnknownModel, match="no model 'other'"):
        await service.classify("a text", model="other")
    with pytest.raises(DeadlineExceeded):
        await service.answer(Classification(inputs=TEXTS), timeout_s=0)


async def test_two_services_do_not_disturb_each_other(service, tiny_bundle):
    """Each has its models, answers while the other one opens, and goes on when it ends."""
    other = EmbeddedService(tiny_bundle)
    opening = asyncio.create_task(other.__aenter__())
    await asyncio.sleep(0)
    assert await service.classify("a text")
    assert not opening.done()
    async with await opening:
        both = await asyncio.gather(service.classify(TEXTS), other.classify(TEXTS))
        [model] = (await other.models())["models"]

    assert both[0] != both[1]
    assert "tiny@1" == model["id"]
    assert both[0] == await service.classify(TEXTS)
    with pytest.raises(Draining):
        await other.classify(TEXTS)


async def test_a_drain_completes_what_was_accepted(service):
    """Accepted calls are answered, later ones are refused, and the application is not ready."""
    accepted = [asyncio.create_task(service.classify(text)) for text in TEXTS]
    await asyncio.sleep(0)
    await service.drain()

    assert all(call.done() and call.result() for call in accepted)
    assert 0 == service.load.queue_tokens
    with pytest.raises(Draining):
        await service.classify("a text")
    async with client_of(service.app) as client:
        assert 503 == (await client.get("/health/ready")).status_code


def copy_versions(bundle: Path, folder: Path) -> list[Path]:
    """Copy a bundle as versions 1 and 2 of itself."""
    copies = [shutil.copytree(bundle, folder / f"tiny-{number}") for number in (1, 2)]
    for number, copy in enumerate(copies, start=1):
        restate(copy, version=str(number))
    return copies


async def test_models_change_under_calls(tiny_bundle, tmp_path):
    """A second version answers for the name while calls run, without a lost call, and goes again."""
    first, _ = copy_versions(tiny_bundle, tmp_path)
    async with EmbeddedService(first, models_dir=tmp_path) as service:
        calls = [asyncio.create_task(service.classify(text)) for text in TEXTS]
        loaded = await service.load_model("tiny-2")
        unloaded = await service.unload_model("tiny@1")
        await asyncio.gather(*calls)

        assert ("tiny@2", "tiny@1") == (loaded["model"]["id"], unloaded["unloaded"])
        assert await service.classify(TEXTS, model="tiny@2")


async def test_a_server_opens_the_service_by_its_lifespan(tiny_bundle):
    """A program without an `async with` block gives the application to a server, which runs its lifespan."""
    service = EmbeddedService(tiny_bundle)
    events = iter(["startup", "shutdown"])
    sent = []

    async def receive():
        return {"type": f"lifespan.{next(events)}"}

    async def send(message):
        sent.append(message["type"])
        if message["type"] == "lifespan.startup.complete":
            assert await service.classify("a text")

    await service.app({"type": "lifespan", "state": {}}, receive, send)

    assert ["lifespan.startup.complete", "lifespan.shutdown.complete"] == sent
    config = uvicorn.Config(service.app, log_config=None)
    config.load()
    assert "asgi3" == config.interface


PROGRAM = """
import asyncio, signal, sys

seen = []
EVENTS = {"socket.bind", "subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"}
sys.addaudithook(lambda event, _: seen.append(event) if event in EVENTS else None)

import quartet

async def main():
    async with quartet.EmbeddedService(sys.argv[1], models_dir=sys.argv[2]) as service:
        await service.load_model("tiny-2")
        [[best]] = await service.classify("a text", top_k=1)
        handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        print([best.label, handled, *seen])

asyncio.run(main())
"""


def test_a_program_keeps_its_signals_ports_and_output(tiny_bundle, tmp_path):
    """A plain program gets no handler of SIGTERM, no port, no process and no output, nor when it loads a model."""
    first, _ = copy_versions(tiny_bundle, tmp_path)
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(first), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert "" == run.stderr
    assert ", False]\n" == run.stdout[-9:]
    assert 1 == run.stdout.count("\n")


async def test_a_bundle_at_an_address(mini_bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serve_folder(mini_bundle.parent) as web:
        service = EmbeddedService(f"{web.url}/{mini_bundle.name}")
        assert [] == web.requests  # before it is entered
        async with service:
            assert 1 == len(await service.embed("a"))


@pytest.mark.parametrize("path", CALLS)
async def test_remembered_results_have_the_same_bytes(tasks_bundle, path):
    """For every task; the second response says that it was remembered, and was in no batch."""
    fields = CALLS[path][1]
    async with (
        EmbeddedService(tasks_bundle, cache_mb=64) as service,
        client_of(service.app) as client,
    ):
        first, again = [(await client.post(path, json=fields)).raise_for_status() for _ in range(2)]
    assert first.content == again.content
    assert "x-quartet-cache" not in first.headers
    assert again.headers["x-quartet-cache"] == "hit"
    assert again.headers["x-quartet-batch"] == "size=0;tokens=0"


@pytest.mark.slow
async def test_a_swapped_model_leaves_no_result_behind(tiny_bundle, tasks_bundle, tmp_path):
    """Two models take turns under one id; each response is that of the model that is served."""
    for name, source in (("a", tiny_bundle), ("b", tasks_bundle)):
        shutil.copytree(source, tmp_path / name)
        restate(tmp_path / name, name="m", version="1")
    shutil.copytree(tiny_bundle, tmp_path / "other")
    expected = {}
    for name in ("a", "b"):
        async with EmbeddedService(tmp_path / name) as service:
            expected[name] = await service.embed(TEXTS)
    assert not np.array_equal(expected["a"], expected["b"])
    options = {"cache_mb": 16, "models_dir": tmp_path}
    async with EmbeddedService(tmp_path / "other", **options) as service:
        for turn in range(10):
            name = "ab"[turn % 2]
            await service.load_model(name)
            for _ in range(2):
                assert np.allclose(await service.embed(TEXTS, model="m"), expected[name], atol=1e-5)
            await service.unload_model("m@1")
