"""The device of this process says what is wrong with it."""

import asyncio
import hashlib
import math
import shutil
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from service import liveness
from service.core import bundle, session
from service.core.bundle import BundleError
from service.core.cpu import CPU
from service.core.cuda import CUDA
from service.core.device_kind import Slots
from service.core.encode import Window
from service.core.packing import MOST_MASKS, Packed
from service.core.session import BatchOutputs, Session, SessionOptions, open_session
from service.engines import local_device
from service.engines.local_device import LocalDevice, OpenedBundle, Runner, full_shapes
from service.errors import InferenceFailed
from service.observability.metrics import Metrics
from service.scheduling.entries import Entry
from service.scheduling.executor import BatchStats, Running
from service.scheduling.load import MAX_QUEUE_TOKENS
from service.settings import Settings
from tests.json_files import editing
from tests.versions import GRAPH, read_manifest, restate, save_version


@pytest.fixture
async def device():
    made = LocalDevice(Settings(hang_s=5), Slots(2, {1: 1, 2: 2}), Metrics())
    await made.batcher.start()
    yield made
    await made.batcher.stop(0)


@pytest.mark.parametrize(
    ("expected_s", "age_s", "hangs"),
    [(0.1, 4.9, False), (0.1, 5.1, True), (1.0, 19.9, False), (1.0, 20.1, True)],
)
async def test_a_batch_hangs_when_it_runs_for_much_too_long(device, expected_s, age_s, hangs):
    """Longer than `hang_s`, and than twenty times what was expected: then only a restart can help."""
    device.batcher.running.add(Running("m@1", 8, 312, expected_s, age_s))
    said = f"a batch of m@1 (8 texts, 312 tokens) has run for {age_s:.1f} s"
    assert (said if hangs else "") == device.load().problem
    assert device.alive() is not hangs


async def test_what_ends_in_the_end_did_not_hang(device):
    """All is well again when the batch is done."""
    late = Running("m@1", 8, 312, 0.1, 6.0)
    device.batcher.running.add(late)
    assert not device.alive()
    device.batcher.running.discard(late)
    assert device.alive()
    assert device.load().ready


def test_an_isolated_failure_is_logged_without_its_text(device, lines):
    """By a hash of its tokens, which the same text will have again; not every one of a flood."""
    entry = Entry("m@1", Window(np.array([2, 7, 3]), np.zeros(3)), "r", 0.0, 9.0, heads=("h",))
    error = InferenceFailed("not finite")
    failed = entry, entry.window, error
    for _ in range(99):
        device._observe(BatchStats("m@1", 2, 6, 3, (0.1, 0.1), 0.1, failed=[failed]))
    told = [line for line in lines if line["event"] == "an input failed alone"]
    assert 0 < len(told) < 99
    expected = hashlib.sha256(b"".join(n.to_bytes(8, "little") for n in (2, 7, 3))).hexdigest()[:16]
    names = ("model", "head", "tokens", "sha256", "problem", "request_id")
    assert ("m@1", "h", 3, expected, "not finite", "r") == tuple(told[0][name] for name in names)
    assert 'quartet_poison_inputs_total{model="m@1"} 99.0' in device._metrics.render().decode()


async def test_batches_grow_older(device, monkeypatch):
    """While they run and the process is watched."""
    monkeypatch.setattr(liveness, "TICK_S", 0.001)
    running = Running("m@1", 8, 312, 0.1)
    device.batcher.running.add(running)
    watching = asyncio.create_task(device.watch())
    async with asyncio.timeout(30):
        while running.age_s < 0.01:
            await asyncio.sleep(0.001)
    watching.cancel()


@pytest.mark.parametrize(
    ("layout", "padded", "sizes"),
    [
        ("packed", False, {1, 6, 8}),
        ("portable", True, {1, 6, 8}),
        ("padded", True, {1, 6, 8}),
        ("alone", False, {1}),
    ],
)
def test_a_bundle_is_measured_by_the_layout_of_its_graph(
    layout, padded, sizes, tiny_bundle, tmp_path, monkeypatch
):
    """The layout decides whether padding costs time, and unbatched graphs are measured with single texts only."""
    path = shutil.copytree(tiny_bundle, tmp_path / "copy")
    with editing(path / "manifest.json") as manifest:
        graphs = {
            graph["layout"]: graph for graph in manifest["graphs"] if graph["precision"] == "fp32"
        }
        kept = graphs["packed" if layout == "packed" else "portable"]
        manifest["graphs"] = [{**kept, "layout": layout}]
    session = open_session(bundle.load(path), provider="cpu", options=SessionOptions(threads=1))
    runner = Runner(bundle.load(path), {1: session})
    monkeypatch.setattr(local_device, "WARM_UP_S", 60)  # time for every shape
    ran = []
    run = runner.run

    def spy(width, windows):
        ran.append(len(windows))
        return run(width, windows)

    runner.run = spy
    runner.warm_up()
    assert runner.padded is padded
    assert runner.unbatched is (layout == "alone")
    assert set(ran) == sizes


def test_the_cost_of_mask_tokens_is_measured(masked_bundle):
    """The warm-up runs an input of mask tokens. Only the fill-mask head computes logits for them."""
    opened = bundle.load(masked_bundle)
    session = open_session(opened, provider="cpu", options=SessionOptions(threads=1))
    runner = Runner(opened, {1: session})
    mask = opened.manifest.mask_token_id
    assert mask is not None
    window = Window(np.array([2, *[mask] * 40, 3]), np.zeros(42, np.int64))
    (masks,) = (name for name, head in opened.manifest.heads.items() if head.per_mask)
    others = tuple(name for name in opened.manifest.heads if name != masks)
    assert (MOST_MASKS, MOST_MASKS, 0) == (
        runner.count_masks(window),
        runner.count_masks(window, (masks,)),
        runner.count_masks(window, others),
    )
    (samples,) = runner.warm_up().values()
    assert [sample.masks for sample in samples if sample.masks] == [MOST_MASKS]


@pytest.mark.parametrize(
    ("precision", "bias", "given", "area"),
    [
        ("fp16", True, None, 16 * 2**30 // (2 * 2 * 64 * 2)),
        ("fp32", None, None, 16 * 2**30 // (2 * 2 * 64 * 4)),
        ("fp16", True, 5000, 5000),
        ("fp16", False, 5000, math.inf),
    ],
)
def test_attention_of_a_batch_is_bounded_by_the_memory(
    precision, bias, given, area, gpu_bundle, monkeypatch
):
    """The scores of the batches that run at once take half of the GPU, unless the limit is set."""
    gpu = replace(CUDA, memory=lambda: 16 * 2**30)
    opened = bundle.load(gpu_bundle)
    graph = next(g for g in opened.manifest.graphs if g.precision == precision)
    graph = graph.model_copy(update={"attention_bias": bias})
    monkeypatch.setattr(Session, "__init__", lambda self: None)
    session = Session()
    session.graph, session.kind = graph, gpu
    device = LocalDevice(Settings(max_batch_attention=given), Slots(2, {1: 1}), Metrics())
    assert area == device._area(session)


@pytest.mark.parametrize(
    ("max_length", "tokens", "size", "area", "shapes"),
    [
        (512, 16_384, 256, math.inf, [(32, 512)]),
        (32, 16_384, 256, math.inf, [(256, 32)]),
        (512, 16_384, 1, math.inf, [(1, 512)]),
        (8192, 1000, 64, math.inf, [(1, 8192)]),
        (8192, 16_384, 256, 2**25, [(8, 2048), (1, 8192)]),
        (250, 16_384, 256, 1000, [(256, 16), (1, 250)]),
        (512, 16_384, 256, 16_384 * 512, [(32, 512)]),
    ],
)
def test_full_shapes(max_length, tokens, size, area, shapes):
    """The longest texts that fill a batch within its limits and, where that excludes it, the longest text alone."""
    assert shapes == full_shapes(max_length, tokens, size, area)


class OnTheGpu:
    """A session of the tiny bundle on the CPU that reports to run on CUDA, and records the batches that it runs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.graph, self.kind, self.provider = session.graph, CUDA, CUDA.provider
        self.precision, self.tolerance, self.runtime = "fp32", session.tolerance, session.runtime
        self.stores_scores, self.provider_note = False, None
        self.ran: list[tuple[int, int]] = []
        self.most = math.inf  # tokens for which there is memory

    def run(self, packed: Packed, heads: Collection[str] = ()) -> BatchOutputs:
        self.ran.append((len(packed.lengths), packed.layout.longest))
        if len(packed.input_ids) > self.most:
            raise RuntimeError("Failed to allocate memory\n for requested buffer")
        return self.session.run(packed)


@pytest.fixture
def on_the_gpu(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> OnTheGpu:
    session = open_session(
        bundle.load(tiny_bundle), provider="cpu", options=SessionOptions(threads=1)
    )
    made = OnTheGpu(session)
    monkeypatch.setattr(local_device, "open_session", lambda *_, **__: made)
    return made


def gpu_device(**settings: Any) -> LocalDevice:
    chosen = Settings(**{"max_batch_tokens": 1024, **settings})
    return LocalDevice(chosen, Slots(2, {1: 1}), Metrics(), CUDA)


def at_rate(opened: OpenedBundle, gpu_rate: float) -> OpenedBundle:
    return replace(opened, proof=replace(opened.proof, gpu_rate=gpu_rate))


async def test_a_gpu_runs_full_batches_first(on_the_gpu, tiny_bundle):
    """All slots run one at the same time, twice, before anything else; by their rate the queue is limited."""
    device = gpu_device()
    assert MAX_QUEUE_TOKENS == device.max_queue_tokens
    opened = bundle.load(tiny_bundle)
    found = device.open(opened)
    length = opened.manifest.max_length
    assert [(1024 // length, length)] * 4 == on_the_gpu.ran[:4]
    assert found.proof.gpu_rate > 0
    assert math.inf == found.area
    device.add(at_rate(found, 1e6))
    assert 3_000_000 == device.max_queue_tokens == device.load().max_queue_tokens
    device.add(at_rate(found, 1e9))
    assert 2**23 == device.max_queue_tokens
    device.add(at_rate(found, 10.0))
    assert MAX_QUEUE_TOKENS == device.max_queue_tokens
    await device.drop("tiny@1")
    assert MAX_QUEUE_TOKENS == device.max_queue_tokens


def test_a_set_queue_limit_is_kept(on_the_gpu, tiny_bundle):
    """Whatever the GPU's rate is."""
    device = gpu_device(max_queue_tokens=1000)
    device.add(at_rate(device.open(bundle.load(tiny_bundle)), 1e6))
    assert 1000 == device.max_queue_tokens


def test_a_gpu_without_the_memory_for_a_full_batch(on_the_gpu, tiny_bundle):
    """The bundle is refused at start, and the settings to lower are named with their values."""
    on_the_gpu.most = 900
    reason = (
        r"2 batches of \d+ x \d+ tokens at once failed on the GPU: lower max_batch_tokens \(1024\) or replicas \(2\):"
        " Failed to allocate memory for requested buffer$"
    )
    with pytest.raises(BundleError, match=reason):
        gpu_device().open(bundle.load(tiny_bundle))


async def test_broken_gpu_under_auto(tiny_bundle, monkeypatch, lines):
    """The CPU serves with its own number of slots, and the reason is logged and described."""
    problems = {CUDA: "NVIDIA H100 failed a trial run: why", CPU: None}
    monkeypatch.setattr(session, "device_problem", problems.get)
    monkeypatch.setattr(session.ort, "get_available_providers", lambda: [CUDA.provider])
    monkeypatch.setattr(local_device, "usable_cores", lambda: 3)
    async with local_device.open_device(Settings(bundles=(tiny_bundle,)), Metrics()) as device:
        device.add(device.open(bundle.load(tiny_bundle)))
        assert 3 == device.batcher.planner.slots
        note = device.runs_on["tiny@1"].provider_note
    assert "NVIDIA H100 failed a trial run: why" == note
    assert [note] == [line["reason"] for line in lines if line["event"] == "the GPU is not used"]


async def test_gpu_that_works(monkeypatch):
    """Two batches run at once, of up to 256 sequences."""
    monkeypatch.setattr(session, "device_problem", lambda kind: None)
    async with local_device.open_device(Settings(), Metrics()) as device:
        assert (2, 256) == (device.batcher.planner.slots, device.batcher.planner.budget.size)


def never_end(path: Path) -> None:
    """Let the graph of a bundle count to 2**62 before it computes."""
    values = {"count": 2**62, "on": True, "zero": np.float32(0)}
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Identity", ["x"], ["x2"])],
        "body",
        [value("i", 7, []), value("c", 9, []), value("x", 1, [])],
        [value("c2", 9, []), value("x2", 1, [])],
    )
    proto = onnx.load(path / GRAPH, load_external_data=False)
    output = proto.graph.output[0].name
    for node in proto.graph.node:
        node.output[:] = [
            name.replace(output, "real") if name == output else name for name in node.output
        ]
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.array(number), name) for name, number in values.items()
    )
    proto.graph.node.append(helper.make_node("Loop", ["count", "on", "zero"], ["end"], body=body))
    proto.graph.node.append(helper.make_node("Add", ["real", "end"], [output]))
    (path / GRAPH).write_bytes(proto.SerializeToString())
    (graph,) = read_manifest(path)["graphs"]
    restate(path, graphs=[graph | bundle.describe_file(path / GRAPH)])


def test_a_graph_that_never_ends(tiny_bundle, tmp_path):
    """Opening it ends with an error at the time limit, and so do its runs."""
    path = save_version(tiny_bundle, tmp_path / "endless", "1")
    never_end(path)
    device = LocalDevice(Settings(load_timeout_s=0.3), Slots(1, {1: 1}), Metrics())
    with pytest.raises(BundleError, match=r"takes more than load_timeout_s, 0\.3 s"):
        device.open(bundle.load(path))
    assert not [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
