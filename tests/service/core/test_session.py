"""Sessions on the tiny bundle: which graph, on which provider, and when a bundle is not served."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

from service.core import bundle, cuda, packing
from service.core.bundle import Bundle, BundleError
from service.core.cpu import CPU
from service.core.cuda import CUDA
from service.core.encode import Encoder
from service.core.goldens import cosine, save_golden
from service.core.packing import SLOT_MULTIPLE, Packed, make_layout, positions
from service.core.session import (
    TRIAL,
    ProviderError,
    Session,
    SessionOptions,
    device_problem,
    open_graph,
    open_session,
    ort,
    packed_feeds,
    padded_feeds,
    usable_kinds,
)
from tests.json_files import editing
from tests.service.fakes import FakeDriver

ONE_THREAD = SessionOptions(threads=1)
RUNTIME_SESSION = ort.InferenceSession


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
    with editing(path) as manifest:
        for part in (manifest["vocabulary"], manifest["goldens"], *manifest["graphs"]):
            part.update(bundle.describe_file(folder / part["file"]))
        change(manifest)


def only(layout: str) -> Callable[[dict[str, Any]], object]:
    """Keep the fp32 graph of one layout."""

    def change(manifest: dict[str, Any]) -> None:
        kept = [g for g in manifest["graphs"] if (g["precision"], g["layout"]) == ("fp32", layout)]
        manifest["graphs"] = kept

    return change


class Pretended:
    """A runtime's session that loads anything and runs on the CPU."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def get_providers(self) -> list[str]:
        return [CPU.provider]


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that was built for GPUs, on a machine without the library that it needs."""

    def load(name: str) -> None:
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA.provider, CPU.provider])
    monkeypatch.setattr(ort, "preload_dlls", lambda: None, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", load)


# -- what is opened -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "precision"), [("auto", "fp32"), ("fp32", "fp32"), ("int8", "int8")]
)
def test_graph(asked, precision, opened):
    """The packed graph of the precision that was asked for is opened; `auto` is the manifest's default."""
    session = open_session(opened, precision=asked, provider="cpu", options=ONE_THREAD)
    assert (precision, "packed", CPU) == (
        session.graph.precision,
        session.graph.layout,
        session.kind,
    )


def test_default_precision(copy):
    """A bundle whose default is int8 is served as int8 unless the setting is fp32."""
    change_manifest(copy, lambda manifest: manifest.update(default_precision="int8"))
    session = open_session(bundle.load(copy), options=ONE_THREAD, provider="cpu")
    assert "int8" == session.graph.precision


@pytest.mark.parametrize("layout", ["portable", "padded", "alone"])
def test_graph_of_rectangles_answers_the_same(layout, copy, opened, packed):
    """A bundle with only the portable graph is served in both layouts, with the packed graph's results."""
    change_manifest(copy, only("portable"))
    change_manifest(copy, lambda manifest: manifest["graphs"][0].update(layout=layout))
    rectangles = open_session(bundle.load(copy), options=ONE_THREAD, provider="cpu")
    expected = open_session(opened, options=ONE_THREAD, provider="cpu").run(packed)
    found = rectangles.run(packed)
    assert layout == rectangles.graph.layout
    assert [*expected] == [*found]
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("layout", "sizes"), [("padded", [9]), ("alone", [1] * 9)])
def test_runs_of_a_batch(layout, sizes, copy, packed, monkeypatch):
    """A padded graph runs a batch at once; one whose answers depend on company, a text at a time and unpadded."""
    change_manifest(copy, only("portable"))
    change_manifest(copy, lambda manifest: manifest["graphs"][0].update(layout=layout))
    session = open_session(bundle.load(copy), options=ONE_THREAD, provider="cpu")
    shapes = []
    run = session._session.run

    def spy(outputs, feeds, options):
        shapes.append(feeds["input_ids"].shape)
        return run(outputs, feeds, options)

    monkeypatch.setattr(session._session, "run", spy)
    session.run(packed)
    assert sizes == [batch for batch, _ in shapes]
    longest = [packed.layout.longest] if layout == "padded" else packed.lengths.tolist()
    assert longest == [columns for _, columns in shapes]


def test_heads_are_computed_alone_as_with_all(opened):
    """A run of some heads returns only their outputs, equal to the outputs of a run of all heads."""
    session = open_session(opened, options=ONE_THREAD, provider="cpu")
    golden = opened.golden
    layout = make_layout(golden.lengths)
    packed = Packed(golden.input_ids, golden.token_type_ids, positions(layout), layout)
    everything = session.run(packed)
    names = [*session.heads]
    assert names == [*everything]
    for heads in ([names[0]], names[-2:]):
        outputs = session.run(packed, heads)
        assert heads == [*outputs]
        for name in heads:
            np.testing.assert_array_equal(everything[name], outputs[name])


def test_padded_feeds():
    """Tokens, segments and positions in their slots; padding holds its sequence's first token and is masked."""
    layout = packing.make_layout([3, 1])
    ids, types = np.array([5, 6, 7, 8]), np.array([0, 0, 1, 1])
    feeds = padded_feeds(Packed(ids, types, packing.positions(layout), layout))
    assert {
        "input_ids": [[5, 6, 7], [8, 8, 8]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "token_type_ids": [[0, 0, 1], [1, 1, 1]],
        "position_ids": [[0, 1, 2], [0, 1, 2]],
    } == {name: value.tolist() for name, value in feeds.items()}
    assert {np.dtype(np.int64)} == {value.dtype for value in feeds.values()}


def test_hidden_tokens_are_masked():
    """Tokens that no token attends to are masked, and a packed graph gets the number of the others as lengths."""
    layout = packing.make_layout([3, 1], [2, 0])
    ids = np.array([5, 6, 7, 8])
    packed = Packed(ids, 0 * ids, packing.positions(layout), layout)
    assert [[1, 0, 0], [1, 0, 0]] == padded_feeds(packed)["attention_mask"].tolist()
    feeds = packed_feeds(packed, ())
    assert ([1, 1], [0, 1, 2, SLOT_MULTIPLE]) == (feeds["lengths"].tolist(), feeds["pack"].tolist())


def test_shapes(opened, packed):
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


def test_threads_change_nothing(opened, packed):
    """One thread or several, spinning or not: the answers are the same."""
    graph = opened.manifest.graphs[0]
    expected = Session(opened, graph, CPU, ONE_THREAD).run(packed)
    found = Session(opened, graph, CPU, SessionOptions(threads=2, spin=True)).run(packed)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


# -- providers ------------------------------------------------------------------------------------


def test_cuda_with_a_cpu_runtime(opened, monkeypatch):
    """CUDA that was asked for and cannot be ends with what to install."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU.provider])
    line = "provider is cuda, but this onnxruntime has no CUDA provider: install onnxruntime-gpu"
    with pytest.raises(ProviderError, match=line):
        open_session(opened, provider="cuda", options=ONE_THREAD)


@pytest.mark.usefixtures("gpu_build")
def test_cuda_without_its_library(opened):
    """The library that is missing is named; `auto` serves on the CPU, and can say why."""
    with pytest.raises(ProviderError, match=r"a library is missing: libcudnn\.so\.9"):
        open_session(opened, provider="cuda", options=ONE_THREAD)
    session = open_session(opened, options=ONE_THREAD)
    assert CPU is session.kind
    assert "libcudnn.so.9" in (session.provider_note or "")


def test_auto_without_a_gpu_build(opened, monkeypatch):
    """The CPU build of ONNX Runtime serves on the CPU without a warning."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU.provider])
    session = open_session(opened, options=ONE_THREAD)
    assert (CPU, None) == (session.kind, session.provider_note)


def test_cpu_is_never_in_doubt(opened, monkeypatch):
    """With `provider = cpu` no GPU is queried, also where the runtime is a GPU build."""
    monkeypatch.setattr(cuda, "find_gpu", lambda: pytest.fail("queried a GPU"))
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA.provider, CPU.provider])
    assert CPU == usable_kinds("cpu")[0]
    session = open_session(opened, provider="cpu", options=ONE_THREAD)
    assert "provider is cpu" == session.provider_note


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_auto_with_a_gpu_that_does_not_work(opened, monkeypatch):
    """If CUDA loads but its device is not usable, `auto` serves on the CPU and logs the reason."""
    monkeypatch.setattr("service.core.session.device_problem", lambda kind: None)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA.provider, CPU.provider])
    session = open_session(opened, options=ONE_THREAD)
    assert (CPU, "fp32") == (session.kind, session.graph.precision)
    assert CUDA.provider in (session.provider_note or "")


def test_session_that_got_another_provider(opened, monkeypatch):
    """A runtime that quietly falls back to the CPU is found out."""
    monkeypatch.setattr("service.core.session.device_problem", lambda kind: None)
    monkeypatch.setattr(ort, "InferenceSession", Pretended)
    with pytest.raises(
        ProviderError,
        match=f"{CUDA.provider} was asked for, but the session runs on {CPU.provider}",
    ):
        open_session(opened, provider="cuda", options=ONE_THREAD)


# -- the device -----------------------------------------------------------------------------------


@pytest.fixture
def gpu_driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A GPU build with all its libraries, and a driver with an H100."""
    driver = FakeDriver()
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA.provider, CPU.provider])
    monkeypatch.setattr(ort, "preload_dlls", lambda: None, raising=False)
    monkeypatch.setattr(ort, "__version__", "1.31.1")
    monkeypatch.setattr(ort, "cuda_version", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(ort, "InferenceSession", OnTheGpu)
    return driver


class OnTheGpu:
    """A runtime's session of the trial graph that runs, as it reports, on the GPU."""

    def __init__(
        self, model: bytes, settings: Any, providers: list[Any], enable_fallback: int
    ) -> None:
        assert (TRIAL, 0) == (model, enable_fallback)
        assert (1, CUDA.provider) == (settings.intra_op_num_threads, providers[0][0])
        self.session = RUNTIME_SESSION(model, settings, providers=[CPU.provider])

    def get_providers(self) -> list[str]:
        return [CUDA.provider, CPU.provider]

    def run(self, outputs: Any, feeds: dict[str, Any], options: Any = None) -> Any:
        return self.session.run(outputs, feeds)


def refuse(*_: Any, enable_fallback: int = 1, **__: Any) -> Any:
    """A session factory that fails; the runtime's own moves to the CPU unless that is disabled."""
    assert not enable_fallback
    raise RuntimeError("CUDA failure 46:\n all CUDA-capable devices are busy or unavailable")


@pytest.mark.usefixtures("gpu_driver")
def test_gpu_that_works():
    """Driver, card and a trial run agree: CUDA is the provider, by default and by name."""
    assert device_problem(CUDA) is None
    assert [CUDA, CUDA] == [usable_kinds("auto")[0], usable_kinds("cuda")[0]]


def test_trial_graph():
    """The graph of the trial run is valid ONNX: a matrix product and an exponential."""
    model = onnx.load_from_string(TRIAL)
    onnx.checker.check_model(model, full_check=True)
    assert ["MatMul", "Exp"] == [node.op_type for node in model.graph.node]
    (value,) = open_graph(TRIAL, CPU, ONE_THREAD).run(None, {"x": np.full((1, 1), 2, "f4")})
    np.testing.assert_allclose(value, [[np.exp(4)]], rtol=1e-6)


@pytest.mark.usefixtures("gpu_driver")
def test_gpu_that_fails_a_trial_run(monkeypatch):
    """Where no session can be made on the device, CUDA by name is refused and `auto` takes the CPU, with the reason."""
    monkeypatch.setattr(ort, "InferenceSession", refuse)
    reason = "NVIDIA H100 failed a trial run: CUDA failure 46: all CUDA-capable devices are busy or unavailable"
    assert reason == device_problem(CUDA)
    assert CPU == usable_kinds("auto")[0]
    with pytest.raises(ProviderError, match=f"provider is cuda, but {reason}"):
        usable_kinds("cuda")[0]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            {"cuda": 12080},
            "the NVIDIA driver supports CUDA 12.8, and onnxruntime-gpu 1.31.1 needs CUDA 13: install NVIDIA driver 580",
        ),
        (
            {"name": b"NVIDIA B200", "capability": (10, 0)},
            "NVIDIA B200 has compute capability 10.0, and onnxruntime-gpu 1.31.1 has code for 7.5, 8.0, ",
        ),
        ({"count": 0}, "the NVIDIA driver has no visible GPU"),
        ({"failing": "cuInit"}, "the NVIDIA driver failed: cuInit returned 999, what failed"),
    ],
)
def test_gpu_that_cannot_be_used(facts, reason, gpu_driver, opened):
    """An old driver, a card without code and a broken driver are named; `auto` serves on the CPU with the reason."""
    vars(gpu_driver).update(facts)
    with pytest.raises(ProviderError) as raised:
        usable_kinds("cuda")[0]
    assert str(raised.value).startswith(f"provider is cuda, but {reason}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ort, "InferenceSession", RUNTIME_SESSION)
        session = open_session(opened, options=ONE_THREAD)
    assert CPU is session.kind
    assert (session.provider_note or "").startswith(reason)


def test_device_is_queried_once(gpu_driver, monkeypatch, capsys):
    """Libraries are loaded and the driver is called once in a process, and what the runtime prints is dropped."""
    loads = []

    def preload():
        print("Failed to load libcublas.so.13")
        loads.append(None)

    monkeypatch.setattr(ort, "preload_dlls", preload)
    assert [None] * 3 == [device_problem(CUDA) for _ in range(3)]
    assert (1, 1) == (len(loads), gpu_driver.calls["cuInit"])
    assert ("", "") == tuple(capsys.readouterr())


def test_threads_on_a_gpu(gpu_bundle, monkeypatch):
    """A session on CUDA has one thread, one on the CPU as many as it is given."""
    threads = []

    def open_on(_, settings, providers, **__):
        threads.append(settings.intra_op_num_threads)
        names = [one if isinstance(one, str) else one[0] for one in providers]
        return SimpleNamespace(get_providers=lambda: names)

    monkeypatch.setattr(ort, "InferenceSession", open_on)
    for kind in (CUDA, CPU):
        open_graph(gpu_bundle / "fp32.onnx", kind, SessionOptions(threads=8))
    assert [1, 8] == threads


# -- a GPU's graph --------------------------------------------------------------------------------


class Emulated:
    """A runtime's session on a GPU, of any graph: it computes on the CPU."""

    opened: ClassVar[list[tuple[str, Any]]] = []  # each file with the provider's options

    def __init__(
        self, path: str, _: object, providers: list[Any], enable_fallback: int = 1
    ) -> None:
        from export.cuda_emulator import evaluator

        assert not enable_fallback, "a session that fails on the GPU would move to the CPU"
        self.opened.append((Path(path).name, providers[0]))
        self.evaluator = evaluator(Path(path))

    def get_providers(self) -> list[str]:
        return [CUDA.provider, CPU.provider]

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self.evaluator.input_names]

    def get_outputs(self) -> list[SimpleNamespace]:
        kinds = [kind.tensor_type.elem_type for kind in self.evaluator.output_types]
        types = [f"tensor({onnx.TensorProto.DataType.Name(kind).lower()})" for kind in kinds]
        named = zip(self.evaluator.output_names, types, strict=True)
        return [SimpleNamespace(name=name, type=kind) for name, kind in named]

    def run(self, outputs: list[str], feeds: dict[str, Any], options: Any = None) -> Any:
        kinds = dict(zip(self.evaluator.input_names, self.evaluator.input_types, strict=True))
        assert kinds.keys() == feeds.keys()
        for name, value in feeds.items():
            expected = onnx.helper.tensor_dtype_to_np_dtype(kinds[name].tensor_type.elem_type)
            assert expected == value.dtype, name
        return self.evaluator.run(outputs, feeds)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """A GPU that works, in all but name; gives what has been opened on it."""
    monkeypatch.setattr("service.core.session.device_problem", lambda kind: None)
    monkeypatch.setattr(ort, "InferenceSession", Emulated)
    monkeypatch.setattr(Emulated, "opened", [])
    return Emulated.opened


@pytest.mark.parametrize(("asked", "provider"), [("auto", "auto"), ("fp16", "cuda")])
def test_half_on_a_gpu(asked, provider, gpu_bundle, gpu, packed):
    """A GPU runs the fp16 graph where there is one, is fed what it takes, and gives fp32's answers but for rounding."""
    opened = bundle.load(gpu_bundle)
    session = open_session(opened, precision=asked, provider=provider, options=ONE_THREAD)
    assert ("fp16", CUDA) == (session.graph.precision, session.kind)
    assert ["fp16.onnx"] == [name for name, _ in gpu]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ort, "InferenceSession", RUNTIME_SESSION)
        expected = open_session(opened, provider="cpu", options=ONE_THREAD).run(packed)
    found = session.run(packed)
    assert [*expected] == [*found]
    for name, value in expected.items():
        assert cosine(found[name], value) > 1 - 1e-4, name  # fp16 costs 6e-6 at most


def test_order_on_a_gpu(gpu_bundle, gpu, monkeypatch):
    """Where the fp16 graph cannot be opened, fp32's are tried, the packed one first; fp32 is not rounded to TF32."""
    whole = Emulated.__init__

    def load(self, path, *arguments, **named):
        whole(self, path, *arguments, **named)
        if path.endswith(("/fp16.onnx", "/fp32.onnx")):
            raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(Emulated, "__init__", load)
    session = open_session(bundle.load(gpu_bundle), options=ONE_THREAD)
    assert ("portable", CUDA) == (session.graph.layout, session.kind)
    assert ["fp16.onnx", "fp32.onnx", "fp32.portable.onnx"] == [name for name, _ in gpu]
    options = {"use_tf32": "0", "enable_skip_layer_norm_strict_mode": "1"}
    assert [(CUDA.provider, options)] * 3 == [provider for _, provider in gpu]


@pytest.mark.usefixtures("gpu")
def test_half_with_other_answers_is_refused(gpu_bundle, monkeypatch):
    """A device that rounds more than fp16 does is refused by the goldens, though fp32 might be right."""
    whole = Session.run

    def run(self, packed, heads=()):
        return {name: value + 0.2 for name, value in whole(self, packed).items()}

    monkeypatch.setattr(Session, "run", run)
    said = r"goldens disagree at fp16: \w+ has cosine 0\.\d+, at least 0\.999"
    with pytest.raises(BundleError, match=said):
        open_session(bundle.load(gpu_bundle), options=ONE_THREAD)


@pytest.mark.parametrize(
    ("provider", "said"),
    [
        ("cpu", f"it has no fp16 graph for {CPU.provider}, only for cuda$"),
        (
            "auto",
            f"it has no fp16 graph for {CPU.provider}, only for cuda: this onnxruntime has no CUDA",
        ),
    ],
)
def test_half_asked_for_on_a_cpu(provider, said, gpu_bundle, monkeypatch):
    """The setting fp16 needs a GPU, and the error has the reason why there is none."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU.provider])
    with pytest.raises(BundleError, match=said):
        open_session(
            bundle.load(gpu_bundle), precision="fp16", provider=provider, options=ONE_THREAD
        )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("precision", "change", "stores"),
    [
        ("fp16", {}, False),
        ("fp16", {"attention_bias": True}, True),
        ("fp16", {"attention_bias": None}, True),  # of a bundle from before the field
        ("fp32", {}, True),
    ],
)
def test_scores_that_attention_stores(precision, change, stores, gpu_bundle):
    """On a GPU only a packed graph for CUDA that states to have no attention bias stores no scores."""
    opened = bundle.load(gpu_bundle)
    (*_, graph) = [g for g in opened.manifest.graphs if g.precision == precision]
    session = Session(opened, graph.model_copy(update=change), CUDA, ONE_THREAD)
    assert stores is session.stores_scores


def test_scores_on_a_cpu(opened):
    """On a CPU nothing is bounded by them."""
    assert not open_session(opened, options=ONE_THREAD, provider="cpu").stores_scores


def test_only_cuda_is_fed_its_layout(packed):
    """The slots of `token_offset` are made for a graph that takes them, and for no other."""
    fed = packed_feeds(packed, {"input_ids", "token_offset"})["token_offset"]
    np.testing.assert_array_equal(packed.layout.widen(SLOT_MULTIPLE).token_offset(), fed)
    assert 0 == fed.shape[1] % SLOT_MULTIPLE < packed.layout.longest % SLOT_MULTIPLE
    assert "token_offset" not in packed_feeds(packed, {"input_ids", "unpack", "pack"})


REUSE = """
import resource, sys
import numpy as np
from service.core.session import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [np.ones(1 << 20, np.uint8) for _ in range(40)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    keep_freed_memory()
print([pages() for _ in range(5)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_is_reused_without_new_pages():
    """40 MiB in buffers of 1 MiB are 10,240 pages; the process keeps them only after it has asked for that."""

    def new_pages(how):
        command = [sys.executable, "-c", REUSE, how]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert new_pages("default") > 5000
    assert new_pages("keep") < 500


def test_concurrent_runs(opened, packed):
    """Several threads may run one session at once: each gets exactly the answers of a run without others."""
    session = open_session(opened, options=ONE_THREAD, provider="cpu")
    parts = [*packing.each(packed)]
    expected = [session.run(part) for part in parts]
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(session.run, 4 * parts)]
    for want, got in zip(4 * expected, found, strict=True):
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)


# -- heads over the vocabulary --------------------------------------------------------------------


@pytest.fixture
def masked(masked_bundle: Path) -> Bundle:
    return bundle.load(masked_bundle)


def masked_batch(opened: Bundle, sentences: list[str]) -> Packed:
    """Texts of mixed lengths, of which every second one has one to three mask tokens."""
    encoder = Encoder.from_file(opened.file("tokenizer.json"), opened.manifest.max_length)
    texts = [
        f"[MASK] {text} [MASK] and" + " [MASK]" * (index % 3) if index % 2 else text
        for index, text in enumerate(sentences[:9])
    ]
    return packing.pack([item.windows[0] for item in encoder.texts(texts)])


def open_layout(opened: Bundle, precision: str, layout: str) -> Session:
    graphs = opened.manifest.graphs
    (graph,) = [g for g in graphs if (g.precision, g.layout) == (precision, layout)]
    return Session(opened, graph, CPU, ONE_THREAD)


@pytest.mark.parametrize(
    ("precision", "layout"), [("fp32", "packed"), ("fp32", "portable"), ("int8", "packed")]
)
def test_mask_tokens_have_rows(precision, layout, masked, sentences):
    """There is a row of logits for each mask token, the same alone as in a batch, and for no other token."""
    session = open_layout(masked, precision, layout)
    packed = masked_batch(masked, sentences)
    together = session.run(packed)
    alone = [session.run(one) for one in packing.each(packed)]
    mask = masked.manifest.mask_token_id
    assert mask is not None
    rows = masked.manifest.vocabulary.size
    assert (np.count_nonzero(packed.input_ids == mask), rows) == together["masks"].shape
    assert (0, rows) == alone[0]["masks"].shape
    for name, value in together.items():
        parts = np.concatenate([own[name] for own in alone])
        np.testing.assert_allclose(value, parts, rtol=0, atol=1e-5, err_msg=name)


def test_masks_cost_nothing_for_other_heads(masked, sentences):
    """A batch that needs no row per mask token does not compute any, whatever its texts contain."""
    session = open_layout(masked, "fp32", "packed")
    packed = masked_batch(masked, sentences)
    fed = []
    inner = session._session

    def run(outputs, feeds, options):
        fed.append((outputs, len(feeds["positions"]), options))
        return inner.run(outputs, feeds, options)

    session._session = SimpleNamespace(run=run)
    expected = session.run(packed)
    found = session.run(packed, ["sentiment"])
    assert [
        (["sentiment", "entities", "masks"], len(expected["masks"]), session._all),
        (["sentiment"], 1, session._only_fetched),
    ] == fed
    np.testing.assert_array_equal(expected["sentiment"], found["sentiment"])


def test_a_masked_head_needs_its_input(masked_bundle, tmp_path):
    """A graph that computes a fill-mask head for given positions only must take these."""
    folder = shutil.copytree(masked_bundle, tmp_path / "copy")
    proto = onnx.load(folder / "int8.onnx")
    (masks,) = [value for value in proto.graph.input if value.name == "positions"]
    proto.graph.input.remove(masks)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "positions"))
    onnx.save(proto, folder / "int8.onnx")
    change_manifest(folder, lambda manifest: None)
    with pytest.raises(BundleError, match=r"int8\.onnx has a fill-mask head without `positions`"):
        open_session(bundle.load(folder), precision="int8", provider="cpu", options=ONE_THREAD)


@pytest.mark.gpu
@pytest.mark.skipif(device_problem(CUDA) is not None, reason=f"no GPU: {device_problem(CUDA)}")
def test_half_on_a_real_gpu(gpu_bundle, packed):
    """On a device the goldens hold, and a text's answer in a batch is the one alone but for fp16's rounding."""
    opened = bundle.load(gpu_bundle)
    session = open_session(opened, precision="fp16", provider="cuda", options=ONE_THREAD)
    heads = opened.manifest.heads
    first = int(packed.lengths[0])
    layout = packing.make_layout([first])
    ids = (packed.input_ids[:first], packed.token_type_ids[:first], packing.positions(layout))
    one = Packed(*ids, layout)
    (alone,) = packing.split(session.run(one), 1, packing.row_starts(one, heads))
    together = packing.split(
        session.run(packed), len(packed.lengths), packing.row_starts(packed, heads)
    )[0]
    for name, value in alone.items():
        assert cosine(value, together[name]) > 0.999, name


# -- bundles that are not served ------------------------------------------------------------------


def test_no_graph_for_the_provider(copy, monkeypatch):
    """A precision that has a graph, but none for the provider that was named, is refused."""
    monkeypatch.setattr("service.core.session.device_problem", lambda kind: None)
    said = f"it has no int8 graph for {CUDA.provider}, only for cpu"
    with pytest.raises(BundleError, match=said):
        open_session(bundle.load(copy), precision="int8", provider="cuda", options=ONE_THREAD)


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("fp32", r"goldens disagree at fp32: entities differs by \d\.\d+e\+00, allowed 1e-03"),
        ("int8", r"goldens disagree at int8: entities has cosine -?0\.\d+, at least 0\.\d+"),
    ],
)
def test_goldens_that_disagree(precision, said, copy):
    """A bundle whose outputs are not the goldens' is refused by precision, head and figure."""
    golden = bundle.load(copy).golden
    golden.outputs["entities"][:] = np.roll(golden.outputs["entities"], 1, axis=1)
    save_golden(copy / "golden.npz", golden)
    change_manifest(copy, lambda manifest: None)
    with pytest.raises(BundleError, match=said):
        open_session(bundle.load(copy), precision=precision, provider="cpu", options=ONE_THREAD)


def test_graph_of_another_bundle(copy):
    """A graph that lacks a head's output is refused by the head."""
    golden = bundle.load(copy).golden
    golden.outputs["moods"] = golden.outputs["sentiment"]
    save_golden(copy / "golden.npz", golden)
    change_manifest(
        copy, lambda manifest: manifest["heads"].update(moods=manifest["heads"]["sentiment"])
    )
    with pytest.raises(BundleError, match=r"fp32\.onnx has no output for moods"):
        open_session(bundle.load(copy), provider="cpu", options=ONE_THREAD)


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE])
def test_graph_of_other_numbers(kind, copy):
    """Whatever a graph computes in, its answers are float32: others are read wrong where they cross processes."""
    proto = onnx.load(copy / "fp32.onnx", load_external_data=False)
    for output in proto.graph.output:
        (node,) = [node for node in proto.graph.node if output.name in node.output]
        node.output[0] = f"{output.name}.float"
        proto.graph.node.append(
            onnx.helper.make_node("Cast", [node.output[0]], [output.name], to=kind)
        )
        output.type.tensor_type.elem_type = kind
    onnx.save(proto, copy / "fp32.onnx")
    change_manifest(copy, lambda manifest: None)
    with pytest.raises(
        BundleError, match=r"fp32\.onnx gives sentiment as tensor\((float16|double)"
    ):
        open_session(bundle.load(copy), provider="cpu", options=ONE_THREAD)


def test_graph_that_disagrees_is_not_passed_over(opened, monkeypatch):
    """A packed graph with wrong answers refuses the bundle, though its portable graph may be right."""

    def run(self, packed, heads=()):
        outputs = whole(self, packed)
        return outputs if self.graph.layout == "portable" else {n: -v for n, v in outputs.items()}

    whole = Session.run
    monkeypatch.setattr(Session, "run", run)
    with pytest.raises(BundleError, match="goldens disagree at fp32"):
        open_session(opened, provider="cpu", options=ONE_THREAD)


def test_graph_that_the_provider_cannot_run_is_passed_over(opened, monkeypatch):
    """Where the runtime lacks an operator of the packed graph, the portable one serves."""

    def load(path, *arguments, **named):
        if path.endswith("/fp32.onnx"):
            raise RuntimeError("no kernel for com.microsoft.MultiHeadAttention")
        return whole(path, *arguments, **named)

    whole = ort.InferenceSession
    monkeypatch.setattr(ort, "InferenceSession", load)
    assert "portable" == open_session(opened, provider="cpu", options=ONE_THREAD).graph.layout


def test_runtime_logs_errors_only(capfd):
    """The runtime's default logger, which kernels log to, writes no warnings to stderr."""
    options = ort.SessionOptions()
    for value in ("1", "2"):
        options.add_session_config_entry("test.entry", value)  # the second is worth a warning
    assert ("", "") == capfd.readouterr()
