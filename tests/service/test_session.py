"""Sessions on the tiny bundle: which graph, on which provider, and when a bundle is not served."""

import ctypes
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from service import bundle, packing
from service.bundle import Bundle, BundleError
from service.encode import Encoder
from service.packing import Packed
from service.session import (
    CPU,
    CUDA,
    RUNTIME,
    ProviderError,
    Session,
    SessionOptions,
    find_provider,
    open_session,
    unused_gpu,
)

ONE_THREAD = SessionOptions(threads=1)


@pytest.fixture
def opened(tiny_bundle: Path) -> Bundle:
    return bundle.load(tiny_bundle)


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """The tiny bundle, to be tampered with."""
    return shutil.copytree(tiny_bundle, tmp_path / "copy")


@pytest.fixture
def packed(opened: Bundle, sentences: list[str]) -> Packed:
    encoder = Encoder.from_file(opened.file("tokenizer.json"), opened.manifest.max_length)
    return packing.pack([item.windows[0] for item in encoder.texts(sentences[:9])])


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the manifest; hashes of files that were changed are set right, too."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for part in (manifest["vocabulary"], manifest["goldens"], *manifest["graphs"]):
        part.update(bundle.describe_file(folder / part["file"]))
    change(manifest)
    path.write_text(json.dumps(manifest))


def only(layout: str) -> Callable[[dict[str, Any]], object]:
    """Keep the fp32 graph of one layout."""

    def change(manifest: dict[str, Any]) -> None:
        kept = [g for g in manifest["graphs"] if (g["precision"], g["layout"]) == ("fp32", layout)]
        manifest["graphs"] = kept

    return change


class Pretended:
    """A runtime's session that loads anything and runs on the CPU."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def disable_fallback(self) -> None: ...

    def get_providers(self) -> list[str]:
        return [CPU]


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that was built for GPUs, on a machine without the library that it needs."""

    def load(name: str) -> None:
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(ort, "preload_dlls", lambda: None, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", load)


# -- what is opened -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "precision"), [("auto", "fp32"), ("fp32", "fp32"), ("int8", "int8")]
)
def test_graph(asked: Any, precision: str, opened: Bundle) -> None:
    """The packed graph of the precision that was asked for is opened; `auto` is the manifest's default."""
    session = open_session(opened, precision=asked, provider="cpu", options=ONE_THREAD)
    assert (precision, "packed", CPU) == (
        session.graph.precision,
        session.graph.layout,
        session.provider,
    )


def test_default_precision(copy: Path) -> None:
    """A bundle whose default is int8 is served so unless fp32 is asked for."""
    change_manifest(copy, lambda manifest: manifest.update(default_precision="int8"))
    session = open_session(bundle.load(copy), options=ONE_THREAD, provider="cpu")
    assert "int8" == session.graph.precision


def test_portable_graph_answers_the_same(copy: Path, opened: Bundle, packed: Packed) -> None:
    """A bundle of the portable graph alone serves, with the packed graph's answers."""
    change_manifest(copy, only("portable"))
    portable = open_session(bundle.load(copy), options=ONE_THREAD, provider="cpu")
    expected = open_session(opened, options=ONE_THREAD, provider="cpu").run(packed)
    found = portable.run(packed)
    assert "portable" == portable.graph.layout
    assert [*expected] == [*found]
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_shapes(opened: Bundle, packed: Packed) -> None:
    """Outputs have a row per sequence or per token."""
    outputs = open_session(opened, options=ONE_THREAD, provider="cpu").run(packed)
    tokens, texts = len(packed.input_ids), len(packed.lengths)
    assert {
        "sentiment": (texts, 3),
        "topics": (texts, 4),
        "entities": (tokens, 5),
        "answers": (tokens, 2),
        "embeddings": (texts, 64),
    } == {name: value.shape for name, value in outputs.items()}
    assert {np.dtype(np.float32)} == {value.dtype for value in outputs.values()}


def test_threads_change_nothing(opened: Bundle, packed: Packed) -> None:
    """One thread or several, spinning or not: the answers are the same."""
    graph = opened.manifest.graphs[0]
    expected = Session(opened, graph, CPU, ONE_THREAD).run(packed)
    found = Session(opened, graph, CPU, SessionOptions(threads=2, spin=True)).run(packed)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


# -- providers ------------------------------------------------------------------------------------


def test_cuda_with_a_cpu_runtime(opened: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA that was asked for and cannot be ends with what to install."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU])
    line = "CUDA was asked for, but this onnxruntime has no CUDA provider: install onnxruntime-gpu"
    with pytest.raises(ProviderError, match=line):
        open_session(opened, provider="cuda", options=ONE_THREAD)


@pytest.mark.usefixtures("gpu_build")
def test_cuda_without_its_library(opened: Bundle) -> None:
    """The library that is missing is named."""
    with pytest.raises(ProviderError, match=r"a library is missing: libcudnn\.so\.9"):
        open_session(opened, provider="cuda", options=ONE_THREAD)


@pytest.mark.usefixtures("gpu_build")
def test_auto_without_the_library(opened: Bundle) -> None:
    """`auto` serves on the CPU, and can say why."""
    session = open_session(opened, options=ONE_THREAD)
    assert CPU == session.provider
    assert "libcudnn.so.9" in (unused_gpu(session) or "")


def test_auto_without_a_gpu_build(opened: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime for the CPU serves on it, and there is nothing to say."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU])
    session = open_session(opened, options=ONE_THREAD)
    assert (CPU, None) == (session.provider, unused_gpu(session))


def test_cpu_is_never_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for the CPU, nobody looks for a GPU."""
    monkeypatch.setattr("service.session.cuda_problem", lambda: pytest.fail("asked for a GPU"))
    assert CPU == find_provider("cpu")


def test_auto_with_a_gpu_that_does_not_work(
    opened: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where CUDA loads and its device cannot be used, `auto` serves on the CPU and says why."""
    monkeypatch.setattr("service.session.cuda_problem", lambda: None)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    session = open_session(opened, options=ONE_THREAD)
    assert (CPU, "fp32") == (session.provider, session.graph.precision)
    assert CUDA in (unused_gpu(session) or "")


def test_session_that_got_another_provider(opened: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that quietly falls back to the CPU is found out."""
    monkeypatch.setattr("service.session.cuda_problem", lambda: None)
    monkeypatch.setattr(ort, "InferenceSession", Pretended)
    with pytest.raises(ProviderError, match=f"{CUDA} was asked for, but the session runs on {CPU}"):
        open_session(opened, provider="cuda", options=ONE_THREAD)


# -- bundles that are not served ------------------------------------------------------------------


def test_missing_precision(opened: Bundle) -> None:
    """A precision that the bundle lacks is named, and those that it has."""
    with pytest.raises(BundleError, match="it has no fp16 graph, only fp32, int8"):
        open_session(opened, precision="fp16", provider="cpu", options=ONE_THREAD)


def test_no_graph_for_the_provider(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A precision that has a graph, but none for the provider that was named, is refused."""
    monkeypatch.setattr("service.session.cuda_problem", lambda: None)
    with pytest.raises(BundleError, match=f"it has no graph for {CUDA}"):
        open_session(bundle.load(copy), precision="int8", provider="cuda", options=ONE_THREAD)


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("fp32", r"goldens disagree at fp32: entities differs by \d\.\d+e\+00, allowed 1e-03"),
        ("int8", r"goldens disagree at int8: entities has cosine -?0\.\d+, at least 0\.\d+"),
    ],
)
def test_goldens_that_disagree(precision: Any, said: str, copy: Path) -> None:
    """A bundle whose outputs are not the goldens' is refused by precision, head and figure."""
    golden = bundle.load(copy).golden
    golden.outputs["entities"][:] = np.roll(golden.outputs["entities"], 1, axis=1)
    bundle.save_golden(copy / "golden.npz", golden)
    change_manifest(copy, lambda manifest: None)
    with pytest.raises(BundleError, match=said):
        open_session(bundle.load(copy), precision=precision, provider="cpu", options=ONE_THREAD)


def test_goldens_of_another_runtime(copy: Path) -> None:
    """Where the runtime has changed since the export, both are named."""
    golden = bundle.load(copy).golden
    golden.outputs["entities"][3] += 1
    bundle.save_golden(copy / "golden.npz", golden)
    change_manifest(copy, lambda manifest: manifest["provenance"].update(runtime="onnxruntime 0.1"))
    said = rf"\(exported with onnxruntime 0\.1, running {RUNTIME}\)"
    with pytest.raises(BundleError, match=said):
        open_session(bundle.load(copy), provider="cpu", options=ONE_THREAD)


def test_graph_of_another_bundle(copy: Path) -> None:
    """A graph that lacks a head's output is refused by the head."""
    golden = bundle.load(copy).golden
    golden.outputs["moods"] = golden.outputs["sentiment"]
    bundle.save_golden(copy / "golden.npz", golden)
    change_manifest(
        copy, lambda manifest: manifest["heads"].update(moods=manifest["heads"]["sentiment"])
    )
    with pytest.raises(BundleError, match=r"fp32\.onnx has no output for moods"):
        open_session(bundle.load(copy), provider="cpu", options=ONE_THREAD)


def test_graph_that_disagrees_is_not_passed_over(
    opened: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed graph with wrong answers refuses the bundle, though its portable graph may be right."""

    def run(self: Session, packed: Packed) -> dict[str, np.ndarray]:
        outputs = whole(self, packed)
        return outputs if self.graph.layout == "portable" else {n: -v for n, v in outputs.items()}

    whole = Session.run
    monkeypatch.setattr(Session, "run", run)
    with pytest.raises(BundleError, match="goldens disagree at fp32"):
        open_session(opened, provider="cpu", options=ONE_THREAD)


def test_graph_that_the_provider_cannot_run_is_passed_over(
    opened: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the runtime lacks an operator of the packed graph, the portable one serves."""

    def load(path: str, *arguments: Any, **named: Any) -> Any:
        if path.endswith("/fp32.onnx"):
            raise RuntimeError("no kernel for com.microsoft.MultiHeadAttention")
        return whole(path, *arguments, **named)

    whole = ort.InferenceSession
    monkeypatch.setattr(ort, "InferenceSession", load)
    assert "portable" == open_session(opened, provider="cpu", options=ONE_THREAD).graph.layout
