"""A bundle is opened in a process of its own, which can be ended."""

import asyncio
import time

import pytest

from service.core.bundle import BundleError
from service.processes import trial
from service.settings import Settings
from tests import faulty


async def test_a_bundle_that_opens(tiny_bundle, tmp_path):
    """The proof has the measured batches; a bundle with a fault has none."""
    settings = Settings(bundles=(tiny_bundle,), provider="cpu", threads=1)
    proof = await trial.try_bundle(settings, tiny_bundle)
    assert proof is not None
    assert proof.samples[1][0].seconds > 0
    assert await trial.try_bundle(settings, tmp_path) is None


@pytest.mark.slow
async def test_an_operator_that_never_ends(tiny_bundle, tmp_path, monkeypatch):
    """Its process is killed, so that it keeps no core."""
    monkeypatch.setattr(trial, "STOP_S", 0.5)
    path = faulty.with_fault(tiny_bundle, tmp_path / "endless", faulty.endless_operator)
    settings = Settings(bundles=(path,), precision="fp32", threads=1, load_timeout_s=5)
    began = time.monotonic()
    with pytest.raises(BundleError, match=r"takes more than load_timeout_s, 5 s"):
        await trial.try_bundle(settings, path)
    assert time.monotonic() - began > 5
    process = await asyncio.create_subprocess_exec("pgrep", "-f", str(path))
    assert await process.wait() == 1


async def test_a_graph_that_crashes(tiny_bundle, monkeypatch):
    """Only the process of the trial ends."""
    command = ["bash", "-c", "kill -SEGV $$"]
    monkeypatch.setattr(trial, "child_python", lambda: command)
    with pytest.raises(BundleError, match="ends a process with SIGSEGV"):
        await trial.try_bundle(Settings(), tiny_bundle)


async def test_a_cancelled_trial(tiny_bundle, monkeypatch):
    """Its process ends with it."""
    monkeypatch.setattr(trial, "child_python", lambda: ["bash", "-c", "exec sleep 54321.5"])
    running = asyncio.create_task(trial.try_bundle(Settings(), tiny_bundle))
    await asyncio.sleep(0.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    process = await asyncio.create_subprocess_exec("pgrep", "-f", "54321.5")
    assert await process.wait() == 1
