"""The provider of OpenVINO: with a double where the package is absent, and with the package where it is installed.

No test imports `openvino` itself, because its own import sends telemetry.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quartet import bench, doctor
from service.core import bundle, openvino, packing
from service.core.bundle import Bundle, BundleError
from service.core.device_table import KINDS, named_kinds
from service.core.encode import Encoder
from service.core.goldens import cosine
from service.core.openvino import OPENVINO, load_runtime
from service.core.packing import Packed
from service.core.session import ProviderError, SessionOptions, TimeLimit, open_session, ort
from service.embedded import EmbeddedService
from service.engines.memory_need import graph_needs
from service.settings import Settings
from tests.conftest import ROOT
from tests.head_bundles import save_head
from tests.service.core.test_session import change_manifest

ONE_THREAD = SessionOptions(threads=1)
TYPES = {"tensor(float)": "f32", "tensor(int64)": "i64"}


class OpenvinoDouble:
    """The parts of `openvino` that the provider uses, which compute with ONNX Runtime.

    unreadable: layouts of graphs that its frontend refuses; noise: added to outputs; meeting: waited for in each run
    feeds: of the last run
    """

    def __init__(self) -> None:
        self.frontend = self
        self.FrontEndManager = lambda: self
        self.Core = lambda: self
        self.options: list[dict[str, Any]] = []
        self.unreadable: tuple[str, ...] = ()
        self.noise = 0.0
        self.meeting: Barrier | None = None
        self.feeds: dict[str, Any] = {}

    def load_by_framework(self, name: str) -> "OpenvinoDouble":
        assert "onnx" == name
        return self

    def load(self, source: Any) -> Any:
        if isinstance(source, str) and Path(source).name in self.unreadable:
            raise RuntimeError("no conversion rule for com.microsoft.MultiHeadAttention")
        return source if isinstance(source, str) else source.read()

    def convert(self, model: Any) -> Any:
        return model

    def get_property(self, device: str, name: str) -> str:
        return "a processor"

    def compile_model(self, model: Any, device: str, options: dict[str, Any]) -> "CompiledDouble":
        self.options.append(options)
        return CompiledDouble(self, model)


class CompiledDouble:
    def __init__(self, runtime: OpenvinoDouble, model: Any) -> None:
        self.runtime = runtime
        self.session = ort.InferenceSession(model)
        self.inputs = [*map(port, self.session.get_inputs())]
        self.outputs = [*map(port, self.session.get_outputs())]

    def create_infer_request(self) -> "RequestDouble":
        return RequestDouble(self)


class RequestDouble:
    def __init__(self, model: CompiledDouble) -> None:
        self.model = model
        self.is_busy = False

    def infer(self, feeds: dict[str, Any], share_inputs: bool) -> dict[str, Any]:
        assert not self.is_busy
        self.is_busy = True
        self.model.runtime.feeds = feeds
        if self.model.runtime.meeting:
            self.model.runtime.meeting.wait(10)
        names = [value.name for value in self.model.session.get_outputs()]
        found = dict(zip(names, self.model.session.run(names, feeds), strict=True))
        self.is_busy = False
        return {
            name: value + value.dtype.type(self.model.runtime.noise)
            for name, value in found.items()
        }


def port(value: Any) -> SimpleNamespace:
    kind = SimpleNamespace(get_type_name=lambda: TYPES[value.type])
    return SimpleNamespace(get_names=lambda: {value.name}, get_element_type=lambda: kind)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OpenvinoDouble:
    """The double in place of openvino, on a processor with bf16."""
    double = OpenvinoDouble()
    whole = metadata.version
    monkeypatch.setattr(openvino, "load_runtime", lambda: double)
    monkeypatch.setattr(
        metadata, "version", lambda name: "0" if name == "openvino" else whole(name)
    )
    set_features(monkeypatch, tmp_path, "avx512f avx512_bf16")
    return double


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package; the test takes the processor for one with bf16, which OpenVINO then emulates."""
    if find_spec("openvino") is None:
        pytest.skip("the package openvino is not installed")
    set_features(monkeypatch, tmp_path, "avx512_bf16")


def set_features(monkeypatch: pytest.MonkeyPatch, folder: Path, features: str) -> None:
    file = folder / "cpuinfo"
    file.write_text(f"model name\t: a processor\nflags\t\t: fpu {features}\nbogomips\t: 1\n")
    monkeypatch.setattr(openvino, "CPUINFO", file)


@pytest.fixture
def opened(tiny_bundle: Path) -> Bundle:
    return bundle.load(tiny_bundle)


@pytest.fixture
def packed(opened: Bundle, sentences: list[str]) -> Packed:
    encoder = Encoder.from_file(opened.file("tokenizer.json"), opened.manifest.max_length)
    return packing.pack([item.windows[0] for item in encoder.texts(sentences[:9])])


# -- which precision ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "precision", "hint"),
    [("auto", "fp32", "f32"), ("fp32", "fp32", "f32"), ("bf16", "bf16", "bf16")],
)
def test_precision(asked, precision, hint, opened, runtime):
    """bf16 computes the fp32 graph where it is set; any other value computes fp32, against OpenVINO's own default."""
    session = open_session(opened, precision=asked, provider="openvino", options=ONE_THREAD)
    assert (precision, "fp32", "OpenVINO", "openvino 0", None) == (
        session.precision,
        session.graph.precision,
        session.provider,
        session.runtime,
        session.provider_note,
    )
    assert hint == runtime.options[-1]["INFERENCE_PRECISION_HINT"]
    assert (session.tolerance.max_difference is None) == (precision == "bf16")


def test_auto_never_selects_it(runtime):
    assert OPENVINO in KINDS
    assert OPENVINO not in named_kinds("auto")


@pytest.mark.parametrize(
    ("features", "refused"),
    [("avx512f avx512_vnni", True), ("amx_bf16", False), ("avx512_bf16", False)],
)
def test_processor_without_bf16(features, refused, opened, runtime, monkeypatch, tmp_path):
    """The precision is refused by name with what is missing, and fp32 is not."""
    set_features(monkeypatch, tmp_path, features)
    if refused:
        line = "precision is bf16, but this processor has none of the features amx_bf16 and avx512_bf16: set precision"
        with pytest.raises(ProviderError, match=line):
            open_session(opened, precision="bf16", provider="openvino", options=ONE_THREAD)
    else:
        open_session(opened, precision="bf16", provider="openvino", options=ONE_THREAD)
    open_session(opened, precision="fp32", provider="openvino", options=ONE_THREAD)


@pytest.mark.parametrize(
    ("provider", "precision", "line"),
    [
        ("auto", "bf16", "precision bf16 needs provider openvino, not auto"),
        ("cpu", "bf16", "precision bf16 needs provider openvino, not cpu"),
        ("openvino", "int8", "it has no int8 graph for OpenVINO, only for cpu"),
    ],
)
def test_settings_that_do_not_fit(provider, precision, line, opened, runtime, monkeypatch):
    with pytest.raises(BundleError, match=line):
        open_session(opened, precision=precision, provider=provider, options=ONE_THREAD)


def test_bundle_without_an_fp32_graph(tiny_bundle, tmp_path, runtime):
    """The reason names the missing graph."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    keep = [g for g in bundle.load(copy).manifest.graphs if g.precision == "int8"]
    change_manifest(
        copy,
        lambda manifest: manifest.update(
            graphs=[g.model_dump(mode="json") for g in keep], default_precision="int8"
        ),
    )
    with pytest.raises(BundleError, match="it has no fp32 graph, only int8"):
        open_session(bundle.load(copy), precision="bf16", provider="openvino", options=ONE_THREAD)


def test_absent_package(opened, monkeypatch):
    """The start ends with what to install."""
    monkeypatch.setattr(openvino, "PACKAGE", "no_such_package")
    load_runtime.cache_clear()
    line = r'provider is openvino, but openvino cannot be imported .*: pip install "quartet-serving\[openvino\]"'
    with pytest.raises(ProviderError, match=line):
        open_session(opened, provider="openvino", options=ONE_THREAD)


# -- how it is opened and run -----------------------------------------------------------------------


def test_portable_graph_where_the_packed_one_has_no_conversion(opened, runtime, packed):
    session = open_session(opened, provider="openvino", options=ONE_THREAD)
    assert "packed" == session.graph.layout
    runtime.unreadable = (session.graph.file,)
    other = open_session(opened, provider="openvino", options=ONE_THREAD)
    assert "portable" == other.graph.layout
    expected = session.run(packed)
    for name, value in other.run(packed).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5)


def test_concurrent_runs(opened, runtime, packed):
    """Threads share one compiled model, which knows their number; each run has an infer request of its own."""
    options = SessionOptions(threads=2, runs=3)
    session = open_session(opened, provider="openvino", options=options)
    names = ("INFERENCE_NUM_THREADS", "NUM_STREAMS", "CPU_RUNTIME_CACHE_CAPACITY")
    assert (6, 3, 200) == tuple(runtime.options[-1][name] for name in names)
    runtime.meeting = Barrier(3)
    with ThreadPoolExecutor(3) as threads:
        for outputs in threads.map(session.run, [packed] * 6):
            assert [*session.heads] == [*outputs]
    assert 3 == len(session._session._idle)


def test_number_of_rows(opened, runtime, packed):
    """A run has a multiple of eight rows, and its outputs are those of the batch's own tokens."""
    tokens = len(packed.input_ids)
    assert tokens % 8
    expected = open_session(opened, provider="cpu", options=ONE_THREAD).run(packed)
    found = open_session(opened, provider="openvino", options=ONE_THREAD).run(packed)
    assert {packing.round_up(tokens, 8)} == {
        len(runtime.feeds[name]) for name in ("input_ids", "position_ids", "pack")
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6)


def test_goldens_that_disagree(opened, runtime):
    """At bf16 each head needs a cosine of 0.999."""
    runtime.noise = 0.05
    with pytest.raises(BundleError, match=r"goldens disagree at bf16: .* at least 0\.999"):
        open_session(opened, precision="bf16", provider="openvino", options=ONE_THREAD)


async def test_heads_of_an_encoder_in_bf16(states_bundle, runtime, tmp_path):
    """The goldens of a head that reads the encoder's states have the tolerance of bf16."""
    save_head(states_bundle, tmp_path / "head")
    runtime.noise = 0.01  # more than the tolerance of fp32
    folders = (tmp_path / "head", states_bundle)
    async with EmbeddedService(*folders, provider="openvino", precision="bf16") as service:
        assert "bf16" in service.fingerprint


def test_time_limit(opened, runtime, packed):
    """A session whose time limit is over begins no further run."""
    with TimeLimit(60) as limit:
        options = SessionOptions(threads=1, limit=limit)
        session = open_session(opened, provider="openvino", options=options)
        limit._end()
        with pytest.raises(RuntimeError, match="ended before it began"):
            session.run(packed)


def test_memory_need(tiny_bundle):
    """bf16 counts as the fp32 graph that it computes, with twice the memory of ONNX Runtime's session."""
    pairs = [("openvino", "bf16"), ("openvino", "fp32"), ("cpu", "fp32")]
    bf16, fp32, other = (
        graph_needs(Settings(provider=provider, precision=precision), tiny_bundle)[0]
        for provider, precision in pairs
    )
    assert bf16 == fp32
    assert (other.graph, 2 * other.memory.opened) == (bf16.graph, bf16.memory.opened)


# -- the commands -----------------------------------------------------------------------------------


def test_commands_recommend_bf16(opened, runtime, monkeypatch, tmp_path):
    """`quartet bench` measures bf16, and `quartet doctor` names its flags, where the processor has it."""
    flags = ["--provider", "openvino", "--precision", "bf16"]
    assert flags == bench.runnable(opened.manifest)["bf16"]
    assert f"openvino: usable, openvino 0; for speed: {' '.join(flags)}" in found_by_doctor()
    set_features(monkeypatch, tmp_path, "avx2")
    assert ["fp32", "int8"] == sorted(bench.runnable(opened.manifest))
    assert "openvino: usable, openvino 0" in found_by_doctor()


def found_by_doctor() -> list[str]:
    return [found for found, _ in doctor.check_device()]


# -- telemetry --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "sent"),
    [
        ("import openvino", True),
        ("from service.core.openvino import load_runtime; load_runtime()", False),
        ("import openvino_telemetry, service.core.openvino as o; o.load_runtime()", True),
    ],
)
def test_telemetry_is_not_imported(script, sent, tmp_path):
    """The import of openvino finds no telemetry package; one that the program imports itself stays."""
    (tmp_path / "openvino.py").write_text("try: import openvino_telemetry\nexcept ImportError: 0\n")
    (tmp_path / "openvino_telemetry.py").write_text("")
    script += "\nimport sys; print('openvino_telemetry' in sys.modules)"
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    command = [sys.executable, "-c", script]
    assert f"{sent}\n" == subprocess.check_output(command, env=path, text=True)


# -- the package ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("real")
def test_outputs_of_the_package(opened, packed):
    """fp32 agrees with ONNX Runtime to rounding, and bf16 to a cosine of 0.999; a run alone agrees with a batch."""
    expected = open_session(opened, provider="cpu", options=ONE_THREAD).run(packed)
    for precision, tolerance, least in (("fp32", 1e-4, 1 - 1e-6), ("bf16", 0.1, 0.999)):
        session = open_session(
            opened, precision=precision, provider="openvino", options=SessionOptions(1, runs=2)
        )
        found = session.run(packed)
        alone = [session.run(one) for one in packing.each(packed)]
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=tolerance)
            assert cosine(found[name], value) >= least
            joined = np.concatenate([one[name] for one in alone])
            assert cosine(joined, found[name]) >= least


@pytest.mark.usefixtures("real")
def test_some_heads(opened, packed):
    """A run of some heads returns their outputs only, equal to the outputs in a run of all heads."""
    session = open_session(opened, provider="openvino", options=ONE_THREAD)
    everything = session.run(packed)
    first, *_ = session.heads
    (value,) = session.run(packed, [first]).values()
    np.testing.assert_array_equal(everything[first], value)
