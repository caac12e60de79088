"""A further kind of device is one record and one row of the table: here an NPU, which computes on the CPU."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.core import device_table
from service.core.cpu import CPU
from service.core.cuda import CUDA
from service.core.device_kind import DeviceKind, shared_slots
from service.core.session import ProviderError, device_problem, ort
from service.observability.metrics import Metrics
from service.processes.single_process import open_local_engines
from service.settings import Settings
from tests.json_files import editing
from tests.served import engine_of
from tests.service.engines.test_registry import embed

NPU = DeviceKind(
    name="npu",
    provider="NPUExecutionProvider",
    label="the NPU",
    graphs=("npu", "any"),
    batch_tokens=4096,
    batch_size=16,
    slots=lambda replicas, threads, bundles: shared_slots(1, threads),
    http_workers=lambda cores: 3,
    precisions=("fp32",),
    options={"device_type": "npu"},
    find=lambda runtime: "NPU 1",
)
WHOLE = ort.InferenceSession


class OnTheNpu:
    """A runtime's session that reports to run on the NPU."""

    def __init__(
        self, source: Any, settings: Any, providers: list[Any], enable_fallback: int
    ) -> None:
        assert [(NPU.provider, NPU.options), CPU.provider] == providers
        self.session = WHOLE(source, settings, providers=[CPU.provider])

    def get_providers(self) -> list[str]:
        return [NPU.provider, CPU.provider]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime and a machine with an NPU."""
    monkeypatch.setattr(device_table, "KINDS", (NPU, CUDA, CPU))
    monkeypatch.setattr(ort, "get_available_providers", lambda: [NPU.provider, CPU.provider])
    monkeypatch.setattr(ort, "InferenceSession", OnTheNpu)
    device_problem.cache_clear()


@pytest.fixture
def folder(tiny_bundle: Path, tmp_path: Path) -> Path:
    """The tiny bundle, whose portable graph is for the NPU only."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    with editing(copy / "manifest.json") as manifest:
        for graph in manifest["graphs"]:
            if graph["layout"] == "packed" and graph["provider"] == "any":
                graph["provider"] = "cpu"
            elif graph["layout"] == "portable":
                graph["provider"] = "npu"
    return copy


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("provider", ["auto", "npu"])
async def test_further_device_serves(provider, folder, tiny_bundle, monkeypatch):
    """It serves its own graph by its own rules, with the results of the CPU, by name and by preference."""
    settings = Settings(bundles=(folder,), provider=provider)
    assert 3 == settings.workers(cores=8)
    async with open_local_engines(Metrics(), settings) as engines:
        engine = engines.get(None)
        described = engine.describe()
        found = await embed(engine, "Ada drew a comet.")
    assert (NPU.provider, "portable", None) == (
        described["provider"],
        described["layout"],
        described["provider_note"],
    )
    assert 16 == settings.batch_size(NPU)
    monkeypatch.setattr(ort, "InferenceSession", WHOLE)
    async with engine_of(tiny_bundle) as engine:
        expected = await embed(engine, "Ada drew a comet.")
    np.testing.assert_allclose(found, expected, atol=1e-5)  # graphs of two layouts


@pytest.mark.usefixtures("npu")
async def test_further_device_that_is_missing(tiny_bundle, monkeypatch):
    """By name it is refused with what to install."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU.provider])
    line = "provider is npu, but this onnxruntime has no NPU provider: install onnxruntime"
    with pytest.raises(ProviderError, match=line):
        async with engine_of(tiny_bundle, provider="npu"):
            pytest.fail("it opened")
