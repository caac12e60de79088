"""Export a checkpoint to a verified bundle: `python -m export CHECKPOINT OUT [--precision fp32 int8 fp16]`.

CHECKPOINT is a directory in the hub's layout, trained here or elsewhere, or a hub name. With `--onnx` it is a directory
that holds a graph already, of whatever encoder, or that graph. OUT is the bundle's directory. Every graph is checked
before OUT appears; when a check fails, the exit status is 1 and nothing is left.
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import onnx
from pydantic import ValidationError

from export import evaluation, goldens, model_card, provenance, trace_graphs, verify
from export.external import attach_head, onnx_source
from export.passes import first_token_only, quantize
from export.passes import fp16 as half
from model.checkpoints.hub_download import join_name
from model.checkpoints.hub_names import CheckpointError
from model.checkpoints.source import Source, read_source
from model.checkpoints.unread import unread_settings
from service.core import bundle
from service.core.bundle import Bundle, BundleError, Golden, Head, Manifest, Provenance
from service.core.encode import Encoder
from service.core.session import RUNTIME, BatchOutputs

PORTABLE = "fp32.portable.onnx"
TOKENIZER = "tokenizer.json"
HALF_WEIGHTS = "fp16.weights.bin"
COMPANY_LENGTH = 256  # tokens of the longest text in a batch of a given graph's: its padding costs what tokens cost
EXPECTED_ERRORS = (
    BundleError,
    CheckpointError,
    OSError,
    ValueError,
    evaluation.QualityError,
    verify.ParityError,
)


@dataclass(frozen=True)
class ExportRequest:
    """What the command line asks for; a graph that is there already has the precision that it has."""

    checkpoint: str
    onnx: bool
    out: Path
    precisions: tuple[str, ...]
    name: str
    version: str
    max_length: int | None
    evaluations: Mapping[str, Path]
    max_changed: float
    told: Mapping[str, Any]
    replace: bool
    task: bundle.Task | None = None

    @property
    def default_precision(self) -> str:
        """What `auto` serves on a CPU. Raises ValueError when nothing that is asked for runs there."""
        for precision in self.precisions:
            if precision != "fp16":
                return precision
        raise ValueError("--precision: fp16 runs on a GPU only; name fp32 or int8 beside it")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        export(read_request(argv))
    except EXPECTED_ERRORS as error:
        print(f"export: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


def one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False)
        return "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in faults)
    return " ".join(str(error).split())


def read_request(argv: Sequence[str] | None) -> ExportRequest:
    parser = argparse.ArgumentParser("python -m export", description=__doc__)
    parser.add_argument(
        "checkpoint", help="a local directory, or a hub name: NAME or NAME@REVISION"
    )
    parser.add_argument("--revision", help="a branch, tag or commit of a hub name")
    parser.add_argument(
        "--onnx",
        action="store_true",
        help="CHECKPOINT is a directory with model.onnx or onnx/model.onnx, or such a graph: serve it as it is",
    )
    parser.add_argument("out", type=Path, help="the bundle's directory")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=["fp32", "int8", "fp16"],
        dest="precisions",
        help="graphs to write; the first of fp32 and int8 is what `auto` serves on a CPU, and fp16 is for CUDA",
    )
    parser.add_argument("--name", help="the model's name in requests; OUT's name by default")
    parser.add_argument("--version", default="1")
    parser.add_argument("--max-length", type=int, help="tokens; the checkpoint's own by default")
    parser.add_argument(
        "--eval", nargs="+", default=[], metavar="HEAD=FILE", help="measure heads on labelled files"
    )
    parser.add_argument(
        "--max-changed",
        type=float,
        default=0.05,
        help="the largest share of answers that int8 may change where --eval gives data",
    )
    parser.add_argument("--provenance", type=Path, help="a TOML file for the manifest and the card")
    parser.add_argument(
        "--task",
        choices=get_args(bundle.Task),
        help="the head to read, where architectures in config.json does not name it; "
        "embedding reads the encoder alone of any checkpoint",
    )
    parser.add_argument("--replace", action="store_true", help="replace OUT if it is a bundle")
    given = parser.parse_args(argv)
    if given.onnx and given.revision:
        parser.error("--revision: with --onnx, CHECKPOINT is a local directory")
    if given.onnx and given.precisions:
        parser.error("--onnx: the graph has the precision that it has; leave --precision out")
    precisions = () if given.onnx else given.precisions or ("fp32", "int8")
    evaluations = dict(part.split("=", 1) for part in given.eval if "=" in part)
    if len(evaluations) != len(given.eval):
        parser.error("--eval takes HEAD=FILE, each head once")
    return ExportRequest(
        checkpoint=join_name(given.checkpoint, given.revision),
        onnx=given.onnx,
        out=given.out,
        precisions=tuple(dict.fromkeys(precisions)),
        name=given.name or given.out.resolve().name,
        version=given.version,
        max_length=given.max_length,
        evaluations={head: Path(file) for head, file in evaluations.items()},
        max_changed=given.max_changed,
        told=provenance.read_metadata(given.provenance) if given.provenance else {},
        replace=given.replace,
        task=given.task,
    )


def export(asked: ExportRequest) -> None:
    """Read, trace, quantise, check, measure, write. Raises what EXPECTED_ERRORS lists."""
    if asked.out.exists() and not asked.replace:
        raise FileExistsError(f"{asked.out} exists; use --replace, or give another name")
    bundle.check_replaceable(asked.out)
    check_words(asked)
    with tempfile.TemporaryDirectory() as scratch:
        full = Path(scratch) / "full"
        full.mkdir()
        make = from_graph if asked.onnx else from_checkpoint
        encoder, draft, report = make(asked, full)
        metrics = measure(draft, encoder, asked)
        finished = finish(draft, report, metrics, asked)
        with bundle.writing(asked.out, replace=asked.replace) as folder:
            keep(finished, full, folder, model_card.render(finished, asked.told, report.lines))
    summarise(asked.out, finished)


def from_checkpoint(asked: ExportRequest, folder: Path) -> tuple[Encoder, Bundle, "ExportReport"]:
    """Trace, quantise and check: the full bundle of a model that is written here."""
    source = read_source(asked.checkpoint, asked.task)
    told = provenance.with_commit(asked.told, asked.checkpoint, source.folder)
    asked = replace(asked, told=provenance.with_teachers(told, source.folder))
    encoder = Encoder(source.tokenizer, _max_length(asked, source.max_length))
    heads = source.model.described
    announce(asked, source.folder, heads, encoder)
    if unread := unread_settings(source.folder):
        print(f"settings that neither Quartet nor the reference library reads: {unread}")
    write_graphs(source, folder, asked.precisions)
    source.tokenizer.save(str(folder / TOKENIZER))
    draft = _describe(
        asked,
        encoder,
        source.model.config.vocab_size,
        goldens.make_golden(source.model, goldens.golden_encodings(encoder)),
        folder,
        heads=heads,
        default_precision=asked.default_precision,
        graphs=graph_records(folder),
        embedding_space=embedding_space(heads, folder / trace_graphs.WEIGHTS, folder / TOKENIZER),
    )
    return encoder, draft, check(draft, source, encoder)


def from_graph(asked: ExportRequest, folder: Path) -> tuple[Encoder, Bundle, "ExportReport"]:
    """Run a graph that is there already, append what makes its outputs a head, and check: a bundle of it alone."""
    given = onnx_source.read_external(asked.checkpoint, asked.task)
    encoder = Encoder(given.tokenizer, _max_length(asked, given.max_length))
    encodings = goldens.golden_encodings(encoder)
    answers = onnx_source.run_external(given, encodings)
    recipe = onnx_source.read_recipe(given, encodings, answers)
    name: str = recipe.head.task
    heads = {name: recipe.head}
    announce(asked, given.folder, heads, encoder)
    record = attach_head.write_graph(given.graph, recipe, folder)
    given.tokenizer.save(str(folder / TOKENIZER))
    expected = [{name: recipe.apply(own)} for own in answers]
    files = [folder / file for file in (record["file"], trace_graphs.WEIGHTS, TOKENIZER)]
    draft = _describe(
        asked,
        encoder,
        given.config["vocab_size"],
        goldens.join_golden(encodings, expected),
        folder,
        heads=heads,
        default_precision=record["precision"],
        graphs=[record],
        embedding_space=embedding_space(heads, *filter(Path.is_file, files)),
    )
    return encoder, *check_given(draft, expected, encoder)


def announce(
    asked: ExportRequest, folder: Path, heads: Mapping[str, Head], encoder: Encoder
) -> None:
    """Say what is exported. Raises ValueError where --eval names what is not there."""
    named = ", ".join(f"{name} ({head.task})" for name, head in heads.items())
    print(f"{folder}: {named}; inputs of up to {encoder.max_length} tokens")
    unknown = set(asked.evaluations) - set(heads)
    if unknown:
        raise ValueError(f"--eval: the checkpoint has no head {', '.join(sorted(unknown))}")


def check_words(asked: ExportRequest) -> None:
    """Refuse early what the manifest would refuse late. Raises ValueError."""
    for flag, word in (("--name", asked.name), ("--version", asked.version)):
        if not re.fullmatch(bundle.NAME, word):
            raise ValueError(f"{flag}: {word!r} may have letters, digits, dots, dashes and _ only")
    _ = asked.onnx or asked.default_precision
    Provenance.model_validate(asked.told.get("provenance", {}))


def _max_length(asked: ExportRequest, longest: int | None) -> int:
    chosen = asked.max_length or longest
    if chosen is None:
        raise ValueError("--max-length: the checkpoint does not say how long its inputs may be")
    if chosen < 8 or chosen > (longest or chosen):
        own = f" to the checkpoint's own {longest}" if longest else ""
        raise ValueError(f"--max-length: from 8{own}")
    return chosen


def write_graphs(source: Source, folder: Path, precisions: Sequence[str]) -> None:
    """The fp32 graphs, which share one weight file, and what else is asked for."""
    print("tracing the packed and the portable graph ...")
    packed = trace_graphs.export_packed(source.model)
    portable = trace_graphs.export_portable(source.model)
    if "int8" in precisions:
        quantized = quantize.quantize(packed)
        first_token_only.narrow(quantized)
        onnx.save(quantized, folder / "int8.onnx")
    first_token_only.narrow(packed)
    trace_graphs.save_sharing_weights(
        {folder / "fp32.onnx": packed, folder / PORTABLE: portable}, folder / trace_graphs.WEIGHTS
    )
    if "fp16" in precisions:
        print("tracing the graph for CUDA ...")
        halved = trace_graphs.export_cuda(half.halved(source.model))
        trace_graphs.save_sharing_weights({folder / "fp16.onnx": halved}, folder / HALF_WEIGHTS)


def _describe(
    asked: ExportRequest, encoder: Encoder, rows: int, golden: Golden, folder: Path, **found: Any
) -> Bundle:
    """The full bundle before it is checked: with goldens, without tolerances and metrics.

    found: what the manifest says that only the caller knows
    """
    bundle.save_golden(folder / "golden.npz", golden)
    precisions = dict.fromkeys(record["precision"] for record in found["graphs"])
    tolerance: dict[str, dict[str, Any]] = {precision: {} for precision in precisions}
    told = {key: asked.told[key] for key in ("weights_license",) if key in asked.told}
    manifest = Manifest.model_validate(
        {
            "format_version": bundle.format_version(found["graphs"]),
            "name": asked.name,
            "version": asked.version,
            "max_length": encoder.max_length,
            "vocabulary": {
                **bundle.describe_file(folder / TOKENIZER),
                "size": rows,
            },
            "goldens": {**bundle.describe_file(folder / "golden.npz"), "tolerance": tolerance},
            "provenance": {**asked.told.get("provenance", {}), "runtime": RUNTIME},
            **found,
            **told,
        }
    )
    return Bundle(folder, manifest, "", golden)


def graph_records(folder: Path) -> list[dict[str, Any]]:
    weights = bundle.describe_file(folder / trace_graphs.WEIGHTS)
    fp32 = {"precision": "fp32", "opset": trace_graphs.OPSET, "provider": "any", "weights": weights}
    records = [
        {**fp32, **bundle.describe_file(folder / "fp32.onnx"), "layout": "packed"},
        {**fp32, **bundle.describe_file(folder / PORTABLE), "layout": "portable"},
    ]
    if (folder / "int8.onnx").is_file():
        int8 = {
            "precision": "int8",
            "opset": trace_graphs.OPSET,
            "provider": "cpu",
            "layout": "packed",
        }
        records.append({**int8, **bundle.describe_file(folder / "int8.onnx")})
    if (folder / "fp16.onnx").is_file():
        fp16 = {
            "precision": "fp16",
            "opset": trace_graphs.OPSET,
            "provider": "cuda",
            "layout": "packed",
        }
        fp16["weights"] = bundle.describe_file(folder / HALF_WEIGHTS)
        proto = onnx.load(folder / "fp16.onnx", load_external_data=False)
        fp16["attention_bias"] = trace_graphs.has_attention_bias(proto)
        records.append({**fp16, **bundle.describe_file(folder / "fp16.onnx")})
    return records


def embedding_space(heads: Mapping[str, Head], *files: Path) -> str | None:
    """A name that changes whenever vectors stop being comparable: of the weights, the tokenizer and the pooling."""
    described = [head.model_dump_json() for head in heads.values() if head.task == "embedding"]
    if not described:
        return None
    parts = [bundle.hash_file(file) for file in files]
    return hashlib.sha256("".join([*parts, *described]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ExportReport:
    """What checking found: lines for people by graph, and what the goldens are to demand of each precision."""

    lines: dict[str, str]
    tolerance: dict[str, dict[str, Any]]


def check(draft: Bundle, source: Source, encoder: Encoder) -> ExportReport:
    """Every graph against PyTorch, and alone against in company. Raises ParityError."""
    encodings = goldens.golden_encodings(encoder)
    expected = [
        output for encoding in encodings for output in goldens.run_torch(source.model, [encoding])
    ]
    lines: dict[str, str] = {}
    tolerance: dict[str, dict[str, Any]] = {}
    for record in draft.manifest.graphs:
        run = verify.graph_runner(draft, record, threads=os.cpu_count() or 1)
        what = f"{record.precision} {record.layout}"
        if record.precision == "fp32":
            worst = verify.check_parity(expected, run, encodings, what)
            tolerance["fp32"] = {"max_difference": 10 * verify.FP32_TOLERANCE}
            lines[what] = f"differs from PyTorch by {worst:.1e}"
        else:
            found = run(encodings)
            digits = 6 if record.precision == "fp16" else 4
            lines[what] = agreement(draft.manifest, expected, found, digits)
            if record.precision == "fp16":
                least = verify.check_half(expected, found, what)
                lines[what] += f"; {verify.check_on_gpu(draft, record, expected, encodings)}"
            else:
                least = verify.check_int8(expected, found, what)
            tolerance[record.precision] = {"min_cosine": least}
        company = verify.check_batch_invariance(run, encodings, what)
        lines[what] += f"; alone and in a batch by {company:.1e}"
        print(f"{what}: {lines[what]}")
    return ExportReport(lines, tolerance)


def check_given(
    draft: Bundle, expected: Sequence[BatchOutputs], encoder: Encoder
) -> tuple[Bundle, ExportReport]:
    """A given graph with its head against the same graph without, and alone against in company.

    Where company changes an answer, or a batch cannot be computed, the graph's layout is `alone`. Raises ParityError.
    """
    (record,) = draft.manifest.graphs
    alone = record.model_copy(update={"layout": "alone"})
    threads = os.cpu_count() or 1
    encodings = goldens.golden_encodings(encoder)
    run = verify.graph_runner(draft, alone, threads)
    what, before = f"{record.precision} with its head", "the graph without"
    line = f"differs from {before} its head by"
    line += f" {verify.check_parity(expected, run, encodings, what, before):.1e}"
    tolerance: dict[str, Any] = {"max_difference": 10 * verify.FP32_TOLERANCE}
    if record.precision == "fp16":
        tolerance = {"min_cosine": verify.check_half(expected, run(encodings), what)}
    elif record.precision == "int8":
        tolerance = {"min_cosine": verify.check_int8(expected, run(encodings), what, before)}
    short = Encoder(encoder.tokenizer, min(encoder.max_length, COMPANY_LENGTH))
    try:
        run = verify.graph_runner(draft, record, threads)
        company = verify.check_batch_invariance(
            run, goldens.golden_encodings(short), record.precision
        )
        line += f"; alone and in a batch by {company:.1e}"
    except Exception as error:  # the runtime's, which have no type, where it cannot compute a batch
        record = alone
        line += f"; each text runs alone, for in a batch: {one_line(error)}"
    what = f"{record.precision} {record.layout}"
    print(f"{what}: {line}")
    manifest = draft.manifest.model_copy(update={"graphs": (record,)})
    return replace(draft, manifest=manifest), ExportReport(
        {what: line}, {record.precision: tolerance}
    )


def agreement(
    manifest: Manifest, expected: Sequence[BatchOutputs], found: Sequence[BatchOutputs], digits: int
) -> str:
    parts = []
    for name, head in manifest.heads.items():
        agreed = verify.compare(name, head, expected, found)
        part = f"{name} cosine {agreed.cosine:.{digits}f}"
        parts.append(
            part if head.task == "embedding" else f"{part}, {agreed.same:.1%} the same decision"
        )
    return "against fp32 on the goldens: " + "; ".join(parts)


def measure(
    draft: Bundle, encoder: Encoder, asked: ExportRequest
) -> dict[str, dict[str, dict[str, float]]]:
    """Each evaluated head's metrics per precision. Raises QualityError when int8 loses too much."""
    runs: dict[str, verify.RunGraph] = {
        record.precision: verify.graph_runner(draft, record, threads=os.cpu_count() or 1)
        for record in draft.manifest.graphs
        if record.layout != "portable" and record.provider != "cuda"  # emulated, it takes too long
    }
    metrics = {}
    for name, file in asked.evaluations.items():
        head = draft.manifest.heads[name]
        metrics[name] = evaluation.measure_head(name, head, file, encoder, runs, asked.max_changed)
    return metrics


def finish(
    draft: Bundle, report: ExportReport, metrics: Mapping[str, Any], asked: ExportRequest
) -> Manifest:
    """The manifest of what is kept: the asked precisions, with tolerances and metrics."""
    record = draft.manifest.model_dump()
    precisions = asked.precisions or draft.manifest.precisions
    record["graphs"] = [g for g in record["graphs"] if g["precision"] in precisions]
    record["goldens"]["tolerance"] = {p: report.tolerance[p] for p in precisions}
    record["metrics"] = metrics
    return Manifest.model_validate(record)


def keep(manifest: Manifest, full: Path, folder: Path, text: str) -> None:
    """Write what the manifest answers for into the bundle, and the manifest last."""
    for name in manifest.files():
        shutil.copyfile(full / name, folder / name)
    (folder / "README.md").write_text(text, encoding="utf-8")
    document = manifest.model_dump_json(indent=2, exclude_defaults=True)
    (folder / bundle.MANIFEST).write_text(document + "\n", encoding="utf-8")


def summarise(out: Path, manifest: Manifest) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    total = sum(sizes.values()) / 1e6
    print(f"{out}: {manifest.id}, {', '.join(manifest.precisions)}, {total:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
