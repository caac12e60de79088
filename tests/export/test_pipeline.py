"""The export as a function: `pipeline.export` returns the manifest, and reports its steps to its caller alone."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from export import drafts, measure_memory, pipeline, run_report, vector_ranges
from export.goldens import run_torch
from model.checkpoints.source import read_source
from model.report.page import Report, Section
from service.core import bundle
from service.core.encode import Encoder
from service.core.manifest import Head
from tests import samples
from tests.json_files import editing

GRAPHS = ("fp32.onnx", "int8.onnx")

pytestmark = [pytest.mark.usefixtures("scratch"), pytest.mark.slow]


def make_request(checkpoint: Path, out: Path, **fields: object) -> drafts.ExportRequest:
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
    return drafts.ExportRequest(checkpoint=str(checkpoint), out=out, **{**defaults, **fields})


def test_export(tiny_checkpoint, out, capsys):
    """A caller gets the manifest of the written bundle and a line for each step; nothing is printed."""
    lines = []

    manifest = pipeline.export(make_request(tiny_checkpoint, out), lines.append)

    assert bundle.load(out).manifest == manifest
    assert ["fp32 packed", "fp32 portable", "int8 packed"] == [
        line.partition(":")[0] for line in lines[3:]
    ]
    assert "" == capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": (65,)}, "matryoshka_dimensions: 65 exceeds dimensions 64"),
        ({"calibration": Path("/none")}, "No such file or directory: '/none'"),
    ],
)
def test_refused(fields, message, tiny_checkpoint, out):
    """A request that cannot be met raises an error of EXPECTED_ERRORS, and leaves no bundle."""
    with pytest.raises(pipeline.EXPECTED_ERRORS, match=message):
        pipeline.export(make_request(tiny_checkpoint, out, **fields), print)

    assert not out.exists()


def test_memory_is_stated(tiny_checkpoint, out):
    """The graphs that a CPU runs state their memory; the portable twin does not."""
    lines = []

    manifest = pipeline.export(make_request(tiny_checkpoint, out, memory=True), lines.append)

    assert bundle.load(out).manifest == manifest
    for graph in manifest.graphs:
        if graph.layout == "portable":
            assert graph.memory is None
            continue
        assert graph.memory is not None
        assert [1024, 4096, 16384] == sorted(graph.memory.batches)
        assert sorted(graph.memory.batches.values()) == [*graph.memory.batches.values()]
        assert 0 < graph.memory.opened < 50e6
        assert any(line.startswith(f"{graph.precision} packed: a session takes") for line in lines)


@pytest.mark.nightly
def test_memory_of_an_export(minilm_folder, out):
    """An export of MiniLM at fp32 and int8, with all checks, needs at most 1.5 GB."""
    process = subprocess.Popen([sys.executable, "-m", "export", minilm_folder, out])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert 0 == process.returncode
    assert usage.ru_maxrss * 1024 <= 1.5e9


def test_unmeasured_memory_is_left_out(tiny_checkpoint, out, tmp_path, monkeypatch):
    """A system without /proc/self/status makes a bundle without it, and the reason is printed."""

    def measure(*_):
        monkeypatch.setattr(measure_memory, "STATUS", tmp_path / "none")
        measure_memory.read_status("VmRSS")

    monkeypatch.setattr(pipeline, "measure_memory", measure)
    lines = []

    manifest = pipeline.export(make_request(tiny_checkpoint, out, memory=True), lines.append)

    assert {None} == {graph.memory for graph in manifest.graphs}
    reason = (
        f"memory was not measured: {tmp_path / 'none'} cannot be read: No such file or directory"
    )
    assert [f"fp32 packed: {reason}", f"int8 packed: {reason}"] == lines[-2:]


def test_the_page_of_the_run(tiny_checkpoint, out, tmp_path):
    """The page next to the checkpoint gets parity, quantization and sizes, once however often it is exported."""
    run = tmp_path / "run"
    shutil.copytree(tiny_checkpoint, run / "checkpoint")
    Report("Training", [Section("run", "Run", "before")]).write(run)
    lines = []

    pipeline.export(make_request(run / "checkpoint", out), lines.append)
    manifest = pipeline.export(make_request(run / "checkpoint", out, replace=True), lines.append)

    assert f"{run / 'report.html'}: parity and quantization were added" == lines[-1]
    report = Report.read(run)
    assert report is not None
    assert ["run", "export tiny"] == [section.name for section in report.sections]
    page = (run / "report.html").read_text(encoding="utf-8")
    shown = ("Export tiny@1", "differs from PyTorch by", "against fp32 on the goldens", " MB")
    assert [] == [text for text in (*shown, *manifest.files()) if text not in page]


def test_quantization_of_the_page(tiny_checkpoint, out):
    """The page has each metric by precision, with its difference to fp32."""
    manifest = pipeline.export(make_request(tiny_checkpoint, out), print)
    metrics = {"sentiment": {"fp32": {"accuracy": 91.5}, "int8": {"accuracy": 91.0}}}
    manifest = manifest.model_copy(update={"metrics": metrics})

    body = run_report.describe(out, manifest, {"int8 packed": "<close>"}).body

    assert '<td>int8</td><td class="number">91.0000</td><td>-0.50</td>' in body
    assert "&lt;close&gt;" in body


def test_a_temperature_is_carried(tiny_checkpoint, out, tmp_path):
    """A fitted temperature makes a bundle with the same graphs, goldens and space of vectors."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, checkpoint)
    with editing(checkpoint / "heads.json") as heads:
        heads["sentiment"]["calibration_temperature"] = 1.25

    plain = pipeline.export(make_request(tiny_checkpoint, tmp_path / "plain"), print)
    manifest = pipeline.export(make_request(checkpoint, out), print)

    assert 1.25 == bundle.load(out).manifest.heads["sentiment"].calibration_temperature
    assert plain.embedding_space == manifest.embedding_space
    assert plain.files() == manifest.files()


TEXTS = [samples.text(words, seed=words) for words in (1, 3, 9, 20, 40)]


def test_ranges(tiny_checkpoint, out, tmp_path):
    """The manifest has the range of each number over the calibration texts, for each trained number of dimensions."""
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    plain = pipeline.export(make_request(tiny_checkpoint, tmp_path / "plain"), print)
    request = make_request(
        tiny_checkpoint, out, dimensions=(16, 8), calibration=tmp_path / "texts.txt"
    )

    manifest = pipeline.export(request, print)

    head = manifest.heads["embeddings"]
    assert (8, 16) == head.matryoshka_dimensions
    assert [8, 16, 64] == [*head.quantization_ranges]
    source = read_source(tiny_checkpoint)
    windows = [item.windows[0] for item in Encoder(source.tokenizer, 64).texts(TEXTS)]
    outputs = [own["embeddings"] for own in run_torch(source.model, windows)]
    for count, ranges in head.quantization_ranges.items():
        vectors = np.stack([own[:count] / np.linalg.norm(own[:count]) for own in outputs])
        np.testing.assert_allclose(ranges[0], vectors.min(axis=0), rtol=0, atol=1e-5)
        np.testing.assert_allclose(ranges[1], vectors.max(axis=0), rtol=0, atol=1e-5)
    assert () == plain.heads["embeddings"].matryoshka_dimensions
    assert plain.embedding_space != manifest.embedding_space


def test_too_few_texts(tiny_checkpoint, out, tmp_path):
    """One text has no range."""
    (tmp_path / "texts.txt").write_text("Ada\n\n")
    request = make_request(tiny_checkpoint, out, calibration=tmp_path / "texts.txt")
    with pytest.raises(ValueError, match=r"--calibrate: .*texts\.txt has 1 texts, at least 2"):
        pipeline.export(request, print)


def test_options_without_an_embedding_head():
    """Options of embedding heads are refused where there is none."""
    request = make_request(Path("a"), Path("b"), dimensions=(8,))
    with pytest.raises(ValueError, match="--dimensions: the checkpoint has no embedding head"):
        drafts.choose_dimensions(request, {"answers": Head(task="qa")})


def test_calibration_without_an_embedding_head(tmp_path):
    """Texts calibrate int8 for any head, and are refused for other precisions."""
    heads = {"answers": Head(task="qa")}
    request = make_request(Path("a"), Path("b"), calibration=tmp_path / "texts.txt")
    assert heads == drafts.choose_dimensions(request, heads)
    with pytest.raises(ValueError, match="--calibrate: the checkpoint has no embedding head"):
        drafts.choose_dimensions(replace(request, precisions=("fp32",)), heads)


def test_no_ranges_without_an_embedding_head(tiny_checkpoint, out, tmp_path):
    """Texts for int8 give a bundle without vectors no ranges, and no embedding space."""
    (tmp_path / "texts.txt").write_text("the old man\nto the sea\n")
    pipeline.export(make_request(tiny_checkpoint, out), lambda _: None)
    full = bundle.load(out)
    heads = {name: head for name, head in full.manifest.heads.items() if head.task != "embedding"}
    manifest = full.manifest.model_copy(update={"heads": heads, "embedding_space": None})
    draft = replace(full, manifest=manifest)
    encoder = Encoder.from_file(full.file("tokenizer.json"), 64)
    assert draft is vector_ranges.add_ranges(draft, encoder, tmp_path / "texts.txt", print)


def test_calibration_changes_the_int8_graph_only(tiny_checkpoint, tmp_path):
    """Other texts give another int8 graph, and the same fp32 graph."""
    (tmp_path / "texts.txt").write_text("the old man\nto the sea\n" * 3000)
    for name, texts in (("first", None), ("second", tmp_path / "texts.txt")):
        request = make_request(tiny_checkpoint, tmp_path / name, calibration=texts)
        pipeline.export(request, lambda _: None)
    files = [[(tmp_path / n / f).read_bytes() for n in ("first", "second")] for f in GRAPHS]
    assert [True, False] == [first == second for first, second in files]


def test_embedding_space(tmp_path):
    """It depends on the prompts, and not on the trained dimensions; fields that a head does not use do not count."""
    (tmp_path / "file").write_text("weights")
    base = {"task": "embedding", "pooling": "mean", "dimensions": 4}
    heads = [
        Head.model_validate({**base, **fields})
        for fields in ({}, {"matryoshka_dimensions": [2]}, {"prompts": {"query": "query: "}})
    ]
    spaces = [drafts.embedding_space({"a": head}, tmp_path / "file") for head in heads]
    assert "e95eae0a1da7c516" == spaces[0]
    assert spaces[0] == spaces[1] != spaces[2]
