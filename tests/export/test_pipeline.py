"""The export as a function: `pipeline.export` returns the manifest, and reports its steps to its caller alone."""

from pathlib import Path

import pytest

from export import pipeline
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
