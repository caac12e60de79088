"""Models of a directory are opened at their first requests, within a memory budget, and closed by use."""

import asyncio
import os
import shutil
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from service.core import bundle as bundles
from service.core.bundle import BundleTexts
from service.core.encode import Window
from service.core.session import Session
from service.engines import proofs
from service.engines.commands import ListModels, LoadModel
from service.engines.local_device import open_device
from service.engines.memory_need import graph_needs
from service.engines.model_state import Models
from service.engines.proofs import FILE, Proof
from service.errors import NotReady, UnknownModel
from service.observability.metrics import Metrics
from service.processes.trial import open_once
from service.rollout.model_manager import ModelManager, do_nothing, kept_of
from service.rollout.on_demand import Trial
from service.scheduling.entries import Entry, Outcome
from service.settings import Settings
from tests.versions import save_fleet

NAMES = ("a", "b", "c")


class Follower:
    async def adopt(self, models: Models, texts: Mapping[str, BundleTexts]) -> None:
        self.models = models

    async def left(self, model_id: str) -> None:
        pass


class Fleet:
    """A manager of a directory of three models, with memory for two, and what it has opened."""

    def __init__(self, manager: ModelManager, opened: list[str]) -> None:
        self.manager = manager
        self.device = manager.device
        self.opened = opened
        self.entries: list[Entry] = []

    @property
    def open_now(self) -> list[str]:
        return [name for name in NAMES if self.manager._device.is_open(f"{name}@1")]

    async def ask(self, name: str, within_s: float = 60.0) -> float:
        """Return how much the answer of a model differs from its golden."""
        now = time.monotonic()
        folder = self.manager._settings.models_dir
        assert folder is not None
        golden = bundles.load(folder / name, proven=True).golden
        length = golden.lengths[0]
        window = Window(golden.input_ids[:length], golden.token_type_ids[:length])
        entry = Entry(f"{name}@1", window, "r", now, now + within_s, heads=("sentiment",))
        self.entries.append(entry)
        (outcome,) = await self.device.submit([entry])
        assert isinstance(outcome, Outcome)
        return float(np.abs(outcome.outputs["sentiment"] - golden.outputs["sentiment"][0]).max())

    async def states(self) -> dict[str, str]:
        models = (await self.manager.execute(ListModels()))["models"]
        return {model["id"].partition("@")[0]: model["state"] for model in models}


Start = Callable[..., Any]


@pytest.fixture(scope="module")
def fleet_folder(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fleet(tiny_bundle, tmp_path_factory.mktemp("fleet"), NAMES)


@pytest.fixture
def start(fleet_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A function that starts to serve the directory, as a new process does."""
    monkeypatch.setattr("service.engines.local_device.WARM_UP_S", 0.001)
    folder = tmp_path / "models"
    shutil.copytree(fleet_folder, folder)

    @asynccontextmanager
    async def begin(
        resume: Mapping[str, Any] | None = None,
        models: int = 2,
        precision: str = "auto",
        trial: Trial = do_nothing,
    ) -> AsyncIterator[Fleet]:
        settings = Settings(
            models_dir=folder,
            memory_budget=models * need(folder / "a"),
            provider="cpu",
            threads=1,
            precision=precision,
        )
        metrics = Metrics()
        async with open_device(settings, metrics) as device:
            manager = ModelManager(device, settings, metrics, trial=trial)
            opened: list[str] = []
            open_bundle = device.open

            def spied(bundle: bundles.Bundle, *proof: Any) -> Any:
                opened.append(bundle.manifest.name)
                return open_bundle(bundle, *proof)

            monkeypatch.setattr(device, "open", spied)
            manager.open(resume)
            await manager.follow(Follower())
            yield Fleet(manager, opened)

    return begin


def located(fleet: Fleet, name: str) -> tuple[Path, str]:
    """Return the directory and the hash of a model."""
    listed = fleet.device.listed[f"{name}@1"]
    return Path(listed.path), listed.sha256


def need(folder: Path) -> int:
    """Return the bytes that a model takes of the budget."""
    (own,) = graph_needs(Settings(), folder)
    return own.memory.opened


async def test_models_open_at_their_first_request_and_close_by_use(start):
    """All are listed from the start; each answer is its model's own."""
    async with start() as fleet:
        assert dict.fromkeys(NAMES, "cold") == await fleet.states()
        for name in ("a", "b", "a", "c"):
            assert await fleet.ask(name) < 1e-4
        assert ["a", "c"] == fleet.open_now
        assert {"a": "current", "b": "cold", "c": "current"} == await fleet.states()
        await fleet.ask("a")
        assert await fleet.ask("b") < 1e-4
        assert ["a", "b"] == fleet.open_now
        with pytest.raises(UnknownModel):
            await fleet.device.open("d@1")


async def test_models_are_listed_by_name(start, tmp_path):
    """The default model is the first by name, also when another bundle has come last."""
    os.utime(tmp_path / "models" / "c")
    async with start() as fleet:
        assert [*NAMES] == [*await fleet.states()]


async def test_a_copy_under_the_same_name_is_not_listed(start, tmp_path):
    """The log names it."""
    shutil.copytree(tmp_path / "models" / "a", tmp_path / "models" / "copy")
    with capture_logs() as logs:
        async with start() as fleet:
            assert dict.fromkeys(NAMES, "cold") == await fleet.states()
    (line,) = [line for line in logs if line["event"] == "not listed"]
    assert "give one of them another name or version" in line["problem"]


async def test_concurrent_first_requests_open_a_model_once(start):
    """More models than fit are requested at once, and each request is answered."""
    async with start() as fleet:
        assert max(await asyncio.gather(*[fleet.ask(name) for name in NAMES * 8])) < 1e-4
        assert [*NAMES] == sorted({*fleet.opened})
        await asyncio.gather(*[fleet.ask(fleet.open_now[0]) for _ in range(8)])
        assert 3 <= len(fleet.opened) <= 4  # the last may have closed one whose requests came later


async def test_a_request_waits_no_longer_than_its_deadline(start):
    """It fails with the seconds after which to try again; the model opens nevertheless."""
    async with start() as fleet:
        with pytest.raises(NotReady, match="a@1 is being opened") as refused:
            await fleet.ask("a", within_s=0.01)
        assert "1" == refused.value.headers["Retry-After"]
        assert await fleet.ask("a") < 1e-4
        assert ["a"] == fleet.opened


async def test_a_model_is_not_closed_while_it_answers(start, monkeypatch):
    """The model that has been used least recently still completes its request."""
    async with start(models=1) as fleet:
        await fleet.ask("a")
        hold = threading.Event()
        run = Session.run
        monkeypatch.setattr(Session, "run", lambda *given: hold.wait(30) and run(*given))
        answers = [asyncio.create_task(fleet.ask(name)) for name in ("a", "b")]
        await asyncio.sleep(0.1)
        assert ["a"] == fleet.open_now
        hold.set()
        assert max(await asyncio.gather(*answers)) < 1e-4
        assert ["b"] == fleet.open_now


async def test_a_closed_model_leaves_no_sessions(start):
    """Not even while the request that it has answered is kept."""
    async with start(models=1) as fleet:
        await fleet.ask("a")
        runner = weakref.ref(fleet.manager._device._runners["a@1"])
        await fleet.ask("b")
        assert runner() is None


async def test_an_unusable_model_is_set_aside_by_name(start):
    """Its requests fail with the reason, others are served, and a load tries it again."""
    async with start() as fleet:
        folder = fleet.manager._settings.models_dir / "b"
        weights = (folder / "weights.bin").read_bytes()
        (folder / "weights.bin").write_bytes(weights[:-4] + b"\0\0\0\0")
        with pytest.raises(NotReady, match=r"b@1 is set aside: it cannot be opened: .*SHA-256"):
            await fleet.ask("b")
        assert await fleet.ask("a") < 1e-4
        assert "set_aside" == (await fleet.states())["b"]
        (folder / "weights.bin").write_bytes(weights)
        await fleet.manager.execute(LoadModel(path="b", by="ops"))
        assert await fleet.ask("b") < 1e-4
        for name in ("a", "c", "a"):  # a loaded model stays open
            await fleet.ask(name)
        assert "b" in fleet.open_now


async def test_goldens_are_proven_once(start, monkeypatch):
    """Also by the next process; a changed file, other settings or other kernels need another proof."""
    checked: list[str] = []
    check = Session.check

    def spied(self: Session, bundle: bundles.Bundle) -> None:
        checked.append(bundle.manifest.name)
        check(self, bundle)

    monkeypatch.setattr(Session, "check", spied)
    async with start() as fleet:
        for name in ("a", "b", "c", "a"):
            await fleet.ask(name)
        assert [*NAMES] == checked
        folder = fleet.manager._settings.models_dir
    async with start() as fleet:
        assert await fleet.ask("a") < 1e-4
        assert [*NAMES] == checked
    weights = folder / "a" / "weights.bin"
    weights.write_bytes(weights.read_bytes())
    async with start() as fleet:
        await fleet.ask("a")
        await fleet.ask("b")
    async with start(precision="fp32") as fleet:
        await fleet.ask("b")
    with monkeypatch.context() as machine:
        machine.setattr(proofs, "vector_features", lambda: ("another",))
        async with start() as fleet:
            await fleet.ask("c")
    assert [*NAMES, "a", "b", "c"] == checked
    (folder / FILE).write_text('{"x": [')
    async with start() as fleet:
        await fleet.ask("b")
    assert [*NAMES, "a", "b", "c", "b"] == checked


async def test_a_trial_proves_the_goldens(start, monkeypatch):
    """The process that serves opens the bundle without them."""
    proofs = []

    async def trial(settings: Settings, folder: Path) -> Proof:
        proofs.append(await open_once(settings, folder))
        monkeypatch.setattr(Session, "check", None)  # fails from now on
        return proofs[0]

    async with start(trial=trial) as fleet:
        assert await fleet.ask("a") < 1e-4
        assert proofs == [fleet.device.proofs.get(*located(fleet, "a"))]


async def test_two_models_are_opened_at_once(start, monkeypatch):
    """Within the budget; a model that may have ended the process is opened alone."""
    monkeypatch.setattr("service.rollout.on_demand.usable_cores", lambda: 8)
    most: list[int] = []
    for models, struck in ((3, ""), (1, ""), (3, "b@1")):
        async with start(models=models) as fleet:
            fleet.device.strike(filter(None, [struck]))
            running: list[str] = []
            reported: list[int] = []
            open_now = fleet.device._open

            async def spied(folder, sha256, running=running, reported=reported, open_now=open_now):
                running.append(folder.name)
                await asyncio.sleep(0.05)
                reported.append(len(running))
                opened = await open_now(folder, sha256)
                running.remove(folder.name)
                return opened

            monkeypatch.setattr(fleet.device, "_open", spied)
            assert max(await asyncio.gather(*map(fleet.ask, "ba"))) < 1e-4
            most.append(max(reported))
    assert [2, 1, 1] == most


async def test_equal_tokenizers_are_kept_once(start):
    async with start() as fleet:
        await fleet.ask("a")
        assert 1 == len({id(t.tokenizer) for t in fleet.manager._device.texts.values()})


async def test_after_a_crash_the_busiest_opens_first(start):
    """Models that were open are opened again in the order of their use; all others stay cold."""
    async with start() as fleet:
        for name in ("a", "b", "b"):
            await fleet.ask(name)
        models = [kept_of(model) for model in fleet.manager.models]
        used = fleet.device.rank()
    async with start({"models": models, "used": used}) as fleet:
        await fleet.manager.reopen()
        assert ["b", "a"] == fleet.opened
        assert ["a", "b"] == fleet.open_now


async def test_a_model_that_ends_its_process_is_set_aside(start):
    """At the third time in a row; an answer in between is an acquittal."""
    resume: dict[str, Any] = {}
    async with start() as fleet:
        resume["models"] = [kept_of(model) for model in fleet.manager.models]
    for end in range(3):
        async with start(resume) as fleet:
            fleet.device.strike(["a@1", "b@1"])
            fleet.device.strike(["a@1"])  # another HTTP process reports the same end
            if end < 2:
                assert await fleet.ask("b") < 1e-4
                while fleet.device.strikes["b@1"]:
                    await asyncio.sleep(0.001)
                    fleet.device.acquit()
                resume["strikes"] = dict(fleet.device.strikes)
                assert {"a@1": end + 1} == resume["strikes"]
            else:
                with pytest.raises(NotReady, match="a@1 is set aside: it has ended the inference"):
                    await fleet.ask("a")
                assert await fleet.ask("b") < 1e-4
                assert not fleet.device.load().problem
