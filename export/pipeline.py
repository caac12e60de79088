"""From a checkpoint or an external ONNX graph to a verified bundle: read, trace, quantize, check, measure, write.

`export` does all of it. The functions after it are its steps, in order. Each step that reports progress calls `show`
with a line of text.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export import evaluation, model_card, run_report, vector_ranges, verify
from export.drafts import TOKENIZER, ExportReport, ExportRequest, Show
from export.measure_memory import UnmeasuredError, measure_memory
from model.checkpoints.errors import CheckpointError
from service.core import bundle
from service.core.bundle import Bundle, BundleError
from service.core.cpu import CPU
from service.core.encode import Encoder
from service.core.manifest import MODEL_NAME, NAME, Manifest, Memory, Provenance

EXPECTED_ERRORS = (
    BundleError,
    CheckpointError,
    OSError,
    ValueError,
    evaluation.QualityError,
    verify.ParityError,
)


def export(request: ExportRequest, show: Show) -> Manifest:
    """Export a checkpoint to a bundle, and return its manifest. Raises the errors in EXPECTED_ERRORS."""
    if request.out.exists() and not request.replace:
        raise FileExistsError(f"{request.out} exists; use --replace, or give another name")
    bundle.check_replaceable(request.out)
    check_request(request)
    if request.encoder:
        check_encoder_folder(request.encoder, request.replace)
    with tempfile.TemporaryDirectory() as scratch:
        full = Path(scratch) / "full"
        full.mkdir()
        if request.onnx:
            from export.from_graph import draft_bundle
        else:  # which needs torch
            from export.from_checkpoint import draft_bundle
        request, encoder, draft, report = draft_bundle(request, full, show)
        draft = vector_ranges.add_ranges(draft, encoder, request.calibration, show)
        metrics = measure(draft, encoder, request, show)
        finished = finish(draft, report, metrics, request)
        if request.memory:
            finished = state_memory(finished, full, show)
        with bundle.writing(request.out, replace=request.replace) as folder:
            card = model_card.render(finished, request.metadata, report.lines)
            write_bundle(finished, full, folder, card)
        if request.encoder:
            from export.from_checkpoint import write_encoder

            write_encoder(request, request.encoder, full / TOKENIZER, show)
    run_report.add_export(request.checkpoint, request.out, finished, report.lines, show)
    return finished


def check_request(request: ExportRequest) -> None:
    """Raise ValueError early for a name or a table that the manifest cannot contain."""
    for flag, word, pattern, more in (
        ("--name", request.name, MODEL_NAME, " and one / between them"),
        ("--version", request.version, NAME, ""),
    ):
        if not re.fullmatch(pattern, word):
            raise ValueError(
                f"{flag}: {word!r} may have letters, digits, dots, dashes and _ only{more}"
            )
    _ = request.onnx or request.default_precision
    Provenance.model_validate(request.metadata.get("provenance", {}))


# -- checks -----------------------------------------------------------------------------------------------------------


def measure(
    draft: Bundle, encoder: Encoder, request: ExportRequest, show: Show
) -> dict[str, dict[str, dict[str, float]]]:
    """Return each evaluated head's metrics by precision. Raises QualityError when int8 loses too much."""
    if not request.evaluations:
        return {}
    runs: dict[str, verify.RunGraph] = {
        record.precision: verify.graph_runner(draft, record, threads=os.cpu_count() or 1)
        for record in draft.manifest.graphs
        if record.layout != "portable"
        and record.provider in CPU.graphs  # emulated, it takes too long
    }
    metrics = {}
    for name, file in request.evaluations.items():
        head = draft.manifest.heads[name]
        metrics[name] = evaluation.measure_head(
            name, head, file, encoder, runs, request.max_changed, show
        )
    return metrics


# -- writing ----------------------------------------------------------------------------------------------------------


def finish(
    draft: Bundle, report: ExportReport, metrics: Mapping[str, Any], request: ExportRequest
) -> Manifest:
    """Return the bundle's final manifest: the requested precisions, with tolerances and metrics."""
    record = draft.manifest.model_dump()
    precisions = request.precisions or draft.manifest.precisions
    record["graphs"] = [g for g in record["graphs"] if g["precision"] in precisions]
    record["goldens"]["tolerance"] = {p: report.tolerance[p] for p in precisions}
    record["metrics"] = metrics
    return Manifest.model_validate(record)


def state_memory(manifest: Manifest, full: Path, show: Show) -> Manifest:
    """Measure the graphs that a CPU runs, and return the manifest with their memory.

    Portable twins of packed graphs are not measured, because they do not run. A graph that cannot be measured gets no
    record.

    full: directory of the manifest's files, where a manifest is written
    """
    write_manifest(manifest, full)
    served = [graph for p in manifest.precisions for graph in manifest.graphs_for(CPU, p)[:1]]
    graphs = []
    for graph in manifest.graphs:
        record = graph.model_dump()
        if graph in served:
            what = f"{graph.precision} {graph.layout}"
            try:
                memory = measure_memory(full, graph)
            except UnmeasuredError as error:
                show(f"{what}: memory was not measured: {error}")
            else:
                show(f"{what}: {describe_memory(memory)}")
                record["memory"] = memory.model_dump()
        graphs.append(record)
    return Manifest.model_validate({**manifest.model_dump(), "graphs": graphs})


def describe_memory(memory: Memory) -> str:
    batches = ", ".join(f"{tokens}: {size / 1e6:.0f} MB" for tokens, size in memory.batches.items())
    return f"a session takes {memory.opened / 1e6:.0f} MB, and batches by their tokens {batches}"


def write_manifest(manifest: Manifest, folder: Path) -> None:
    document = manifest.model_dump_json(indent=2, exclude_defaults=True)
    (folder / bundle.MANIFEST).write_text(document + "\n", encoding="utf-8")


def write_bundle(manifest: Manifest, full: Path, folder: Path, card: str) -> None:
    """Copy the manifest's files from `full`, and write the model card and, last, the manifest."""
    for name in manifest.files():
        shutil.copyfile(full / name, folder / name)
    (folder / model_card.CARD).write_text(card, encoding="utf-8")
    write_manifest(manifest, folder)


def check_encoder_folder(folder: Path, replace: bool) -> None:
    """Raise FileExistsError for a directory that may not be replaced: without `--replace`, or with other content."""
    if folder.exists() and not replace:
        raise FileExistsError(f"{folder} exists; use --replace, or give another name")
    if folder.exists() and not (folder / "config.json").is_file():
        raise FileExistsError(f"{folder} is no checkpoint, and --replace replaces nothing else")
