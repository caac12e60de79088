"""The export as a function: `pipeline.export` returns the manifest, and reports its steps to its caller alone."""

from pathlib import Path

import pytest

from export import measure_memory, pipeline
from service.core import bundle
from tests.conftest import Traced

pytestmark = pytest.mark.usefixtures("scratch")


@pytest.fixture(autouse=True)
def _no_tracing(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    traced.spare(monkeypatch)


def make_request(checkpoint: Path, out: Path, **fields: object) -> pipeline.ExportRequest:
    """Return a request with the defaults of the command line."""
    defaults: dict[str, object] = {
        "onnx": False,
        "precisions": ("fp32", "int8"),
        "name": "tiny",
        "version": "1",
        "max_length": 64,
        "evaluations": {},
        "max_changed": 0.05,
        "metadata": {},
        "replace": False,
        "memory": False,
    }
    return pipeline.ExportRequest(checkpoint=str(checkpoint), out=out, **{**defaults, **fields})


def test_export(tiny_checkpoint: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A caller gets the manifest of the written bundle and a line for each step; nothing is printed."""
    lines: list[str] = []

    manifest = pipeline.export(make_request(tiny_checkpoint, out), lines.append)

    assert bundle.load(out).manifest == manifest
    assert ["fp32 packed", "fp32 portable", "int8 packed"] == [
        line.partition(":")[0] for line in lines[2:]
    ]
    assert "" == capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precisions": ("fp16",)}, "--precision: fp16 runs on a GPU only"),
        ({"name": "a b"}, "--name: 'a b' may have letters"),
        ({"max_length": 513}, "--max-length: from 8 to the checkpoint's own 512"),
        ({"evaluations": {"none": Path("x")}}, "--eval: the checkpoint has no head none"),
    ],
)
def test_refused(fields: dict[str, object], message: str, tiny_checkpoint: Path, out: Path) -> None:
    """A request that cannot be met raises an error of EXPECTED_ERRORS, and leaves no bundle."""
    with pytest.raises(pipeline.EXPECTED_ERRORS, match=message):
        pipeline.export(make_request(tiny_checkpoint, out, **fields), print)

    assert not out.exists()


def test_memory_is_stated(tiny_checkpoint: Path, out: Path) -> None:
    """The graphs that a CPU runs state their memory, in format 3; the portable twin does not."""
    lines: list[str] = []

    manifest = pipeline.export(make_request(tiny_checkpoint, out, memory=True), lines.append)

    assert bundle.load(out).manifest == manifest
    assert 3 == manifest.format_version
    for graph in manifest.graphs:
        if graph.layout == "portable":
            assert graph.memory is None
            continue
        assert graph.memory is not None
        assert [1024, 4096, 16384] == sorted(graph.memory.batches)
        assert sorted(graph.memory.batches.values()) == [*graph.memory.batches.values()]
        assert 0 < graph.memory.opened < 50e6
        assert any(line.startswith(f"{graph.precision} packed: a session takes") for line in lines)


def test_unmeasured_memory_is_left_out(
    tiny_checkpoint: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system without /proc/self/status makes a bundle of the older format, and the reason is printed."""

    def measure(*_: object) -> None:
        monkeypatch.setattr(measure_memory, "STATUS", tmp_path / "none")
        measure_memory.read_status("VmRSS")

    monkeypatch.setattr(pipeline, "measure_memory", measure)
    lines: list[str] = []

    manifest = pipeline.export(make_request(tiny_checkpoint, out, memory=True), lines.append)

    assert 1 == manifest.format_version
    assert {None} == {graph.memory for graph in manifest.graphs}
    reason = (
        f"memory was not measured: {tmp_path / 'none'} cannot be read: No such file or directory"
    )
    assert [f"fp32 packed: {reason}", f"int8 packed: {reason}"] == lines[-2:]
