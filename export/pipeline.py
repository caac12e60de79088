"""From a checkpoint or an external ONNX graph to a verified bundle: read, trace, quantize, check, measure, write.

`export` does all of it. The functions after it are its steps, in order. Each step that reports progress calls `show`
with a line of text.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import onnx
import torch
from pydantic import ValidationError

from export import (
    calibration,
    evaluation,
    goldens,
    model_card,
    provenance,
    run_report,
    trace_graphs,
    vector_ranges,
    verify,
)
from export.external import attach_head, onnx_source
from export.measure_memory import UnmeasuredError, measure_memory
from export.passes import (
    biases,
    first_token_only,
    half_stream,
    mask_free_attention,
    quantize,
    three_products,
)
from export.passes import fp16 as half
from export.passes.portable import make_portable
from model.checkpoints import writer
from model.checkpoints.head_config import declares_pooling
from model.checkpoints.hub_names import CheckpointError
from model.checkpoints.reader import read_teachers
from model.checkpoints.source import Source, read_source
from model.checkpoints.tables import unread_settings
from model.heads import EncoderWithHeads, SentenceEmbedding
from service.core import bundle
from service.core.bundle import (
    EMBEDDING_FIELDS,
    FORMAT_VERSION,
    Bundle,
    BundleError,
    Golden,
    Head,
    Manifest,
    Memory,
    Provenance,
)
from service.core.cpu import CPU
from service.core.encode import Encoder, Window
from service.core.packing import Packed, pack
from service.core.session import RUNTIME, BatchOutputs

PORTABLE = "fp32.portable.onnx"
TOKENIZER = "tokenizer.json"
HALF_WEIGHTS = "fp16.weights.bin"
BATCH_CHECK_LENGTH = 256  # tokens of the longest text in the batch that an external graph computes: padding costs time
EXPECTED_ERRORS = (
    BundleError,
    CheckpointError,
    OSError,
    ValueError,
    evaluation.QualityError,
    verify.ParityError,
)

NO_VECTORS = {"matryoshka_dimensions"}  # a field of embedding heads that changes no vector
# Fields that the hash of an embedding space omits where a head does not use them.
OPTIONAL_FIELDS = (
    *("late_interaction", "sparse", "mask_token_id", "vocabulary_size", "calibration_temperature"),
    *EMBEDDING_FIELDS,
)

Show = Callable[[str], None]


@dataclass(frozen=True)
class ExportRequest:
    """One export: the options of the command line.

    onnx: whether `checkpoint` is an external graph, which keeps its precision
    precisions: graphs to write, in the order of preference; empty for an external graph
    max_length: tokens, None for the checkpoint's own
    evaluations: a labelled file by head
    max_changed: the largest share of answers that int8 may change
    metadata: the content of the `--provenance` file
    memory: whether to measure the memory of the graphs
    dimensions: the numbers of dimensions that vectors may be cut to; empty for the checkpoint's own
    calibration: a file with a text per line, for int8 graphs and the ranges of quantized vectors
    encoder: a directory for the encoder in half precision, None to write none
    pooling: of vectors, where no file of the checkpoint declares it; "none" for a graph that pools
    outputs: names of an external graph's outputs, where they are not the usual ones
    """

    checkpoint: str
    onnx: bool
    out: Path
    precisions: tuple[str, ...]
    name: str
    version: str
    max_length: int | None
    evaluations: Mapping[str, Path]
    max_changed: float
    metadata: Mapping[str, Any]
    replace: bool
    task: bundle.Task | None = None
    memory: bool = True
    dimensions: tuple[int, ...] = ()
    calibration: Path | None = None
    encoder: Path | None = None
    pooling: bundle.PoolingMode | Literal["none"] | None = None
    outputs: tuple[str, ...] = ()

    @property
    def default_precision(self) -> str:
        """The precision that `auto` serves on a CPU. Raises ValueError when no requested one runs there."""
        for precision in self.precisions:
            if precision != "fp16":
                return precision
        raise ValueError("--precision: fp16 runs on a GPU only; add fp32 or int8")


@dataclass(frozen=True)
class ExportReport:
    """The result of the checks: a line of text by graph, and the tolerance of the goldens by precision."""

    lines: dict[str, str]
    tolerance: dict[str, dict[str, Any]]


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
        draft_bundle = draft_external if request.onnx else draft_checkpoint
        encoder, draft, report = draft_bundle(request, full, show)
        draft = vector_ranges.add_ranges(draft, encoder, request.calibration, show)
        metrics = measure(draft, encoder, request, show)
        finished = finish(draft, report, metrics, request)
        if request.memory:
            finished = state_memory(finished, full, show)
        with bundle.writing(request.out, replace=request.replace) as folder:
            card = model_card.render(finished, request.metadata, report.lines)
            write_bundle(finished, full, folder, card)
        if request.encoder:
            write_encoder(request, request.encoder, full / TOKENIZER, show)
    run_report.add_export(request.checkpoint, request.out, finished, report.lines, show)
    return finished


def one_line(error: Exception) -> str:
    """Return an error's message in one line."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False)
        return "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in faults)
    return " ".join(str(error).split())


def check_request(request: ExportRequest) -> None:
    """Raise ValueError early for a name or a table that the manifest cannot contain."""
    for flag, word, pattern, more in (
        ("--name", request.name, bundle.MODEL_NAME, " and one / between them"),
        ("--version", request.version, bundle.NAME, ""),
    ):
        if not re.fullmatch(pattern, word):
            raise ValueError(
                f"{flag}: {word!r} may have letters, digits, dots, dashes and _ only{more}"
            )
    _ = request.onnx or request.default_precision
    Provenance.model_validate(request.metadata.get("provenance", {}))


def draft_checkpoint(
    request: ExportRequest, folder: Path, show: Show
) -> tuple[Encoder, Bundle, ExportReport]:
    """Trace, quantize and check a checkpoint's model: a bundle of all its graphs in `folder`."""
    source = read_source(request.checkpoint, request.task)
    choose_pooling(request, source)
    metadata = provenance.with_commit(request.metadata, request.checkpoint, source.folder)
    request = replace(request, metadata=provenance.with_teachers(metadata, source.folder))
    encoder = Encoder(source.tokenizer, choose_max_length(request, source.max_length))
    heads = choose_dimensions(request, source.model.described)
    check_evaluations(request, heads)
    check_precisions(request, heads)
    show(describe_source(source.folder, heads, encoder))
    assumed = not (request.pooling or declares_pooling(source.folder))
    show_assumptions(source.folder, heads, assumed, show)
    if unread := unread_settings(source.folder):
        show(f"settings that neither Quartet nor the reference library reads: {unread}")
    encodings = goldens.golden_encodings(encoder, heads)
    texts = calibration.read_texts(request.calibration)
    windows = calibration.choose_windows(encoder, texts) if "int8" in request.precisions else []
    write_graphs(source, folder, request.precisions, encodings, windows, show)
    source.tokenizer.save(str(folder / TOKENIZER))
    draft = draft_manifest(
        request,
        encoder,
        source.model.config.vocab_size,
        goldens.make_golden(source.model, encodings),
        folder,
        heads=heads,
        default_precision=request.default_precision,
        graphs=graph_records(folder),
        embedding_space=embedding_space(heads, folder / trace_graphs.WEIGHTS, folder / TOKENIZER),
    )
    return encoder, draft, check_graphs(draft, source, encoder, show)


def draft_external(
    request: ExportRequest, folder: Path, show: Show
) -> tuple[Encoder, Bundle, ExportReport]:
    """Attach a head to an external graph, and check it: a bundle of that one graph in `folder`."""
    external = onnx_source.read_external(request.checkpoint, request.task)
    encoder = Encoder(external.tokenizer, choose_max_length(request, external.max_length))
    encodings = goldens.golden_encodings(encoder, {})
    outputs = onnx_source.run_external(external, encodings)
    recipe = onnx_source.read_recipe(external, encodings, outputs, request.pooling, request.outputs)
    name: str = recipe.head.task
    heads = choose_dimensions(request, {name: recipe.head})
    check_evaluations(request, heads)
    show(describe_source(external.folder, heads, encoder))
    pools_here = recipe.pooling is not None
    assumed = pools_here and not (request.pooling or declares_pooling(external.folder))
    show_assumptions(external.folder, heads, assumed, show)
    record = attach_head.write_graph(external.graph, recipe, folder)
    external.tokenizer.save(str(folder / TOKENIZER))
    expected = [{name: recipe.apply(own)} for own in outputs]
    files = [folder / file for file in (record["file"], trace_graphs.WEIGHTS, TOKENIZER)]
    draft = draft_manifest(
        request,
        encoder,
        external.config["vocab_size"],
        goldens.join_golden(encodings, expected),
        folder,
        heads=heads,
        default_precision=record["precision"],
        graphs=[record],
        embedding_space=embedding_space(heads, *filter(Path.is_file, files)),
    )
    return encoder, *check_external(draft, expected, encoder, show)


# -- reading ----------------------------------------------------------------------------------------------------------


def describe_source(folder: Path, heads: Mapping[str, Head], encoder: Encoder) -> str:
    named = ", ".join(f"{name} ({head.task})" for name, head in heads.items())
    return f"{folder}: {named}; inputs of up to {encoder.max_length} tokens"


def show_assumptions(folder: Path, heads: Mapping[str, Head], assumed: bool, show: Show) -> None:
    """Show what no file of a checkpoint declares about its vectors.

    assumed: whether the pooling is the default
    """
    head = heads.get("embedding")
    if head is None:
        return
    if assumed:
        show(
            f"warning: {folder} has neither modules.json nor 1_Pooling: the pooling is assumed to be {head.pooling}; "
            "--pooling selects another one, such as cls for the bge and arctic models"
        )
    if head.pooling == "none":
        show("the graph pools its vectors itself, in a way that no file declares")
    if head.normalize and not declares_pooling(folder):
        show(
            "vectors are normalized; sentence-transformers does not normalize those of a model without modules.json: "
            '"normalize": false in a request, or in config.json before the export, returns them unchanged'
        )


def choose_pooling(request: ExportRequest, source: Source) -> None:
    """Give the embedding head of a checkpoint the requested pooling. Raises ValueError where it has another one."""
    pooling, heads = request.pooling, source.model.described
    if request.outputs or pooling == "none":
        raise ValueError("--output and --pooling none are for ONNX graphs only")
    if pooling is None:
        return
    declared = [head.pooling for head in heads.values() if head.task == "embedding"]
    if not declared:
        raise ValueError("--pooling: the checkpoint has no embedding head")
    if declared != [pooling] and declares_pooling(source.folder):
        named = ", ".join(map(str, declared))
        raise ValueError(f"--pooling: the files of the checkpoint declare {named}: leave it out")
    if declared != [pooling]:
        heads["embedding"] = heads["embedding"].model_copy(update={"pooling": pooling})
        source.model.heads["embedding"] = SentenceEmbedding(pooling)


def check_evaluations(request: ExportRequest, heads: Mapping[str, Head]) -> None:
    """Raise ValueError where --eval names a head that the checkpoint does not have, or that has no labelled data."""
    unknown = set(request.evaluations) - set(heads)
    if unknown:
        raise ValueError(f"--eval: the checkpoint has no head {', '.join(sorted(unknown))}")
    unlabelled = [name for name in request.evaluations if heads[name].per_mask]
    if unlabelled:
        raise ValueError(
            f"--eval: {unlabelled[0]} is a fill-mask head, for which there is no metric"
        )


def check_precisions(request: ExportRequest, heads: Mapping[str, Head]) -> None:
    """Raise ValueError where --precision names fp16, and a head needs what CUDA's packed attention does not have."""
    for name, head in heads.items():
        late = head.late_interaction
        if "fp16" in request.precisions and late is not None and late.hides_expansion:
            reason = f"fp16 cannot hide the query expansion of head {name} from other tokens"
            raise ValueError(f"--precision: {reason}; leave out fp16")


def choose_dimensions(request: ExportRequest, heads: Mapping[str, Head]) -> dict[str, Head]:
    """Return the heads with the requested numbers of dimensions. Raises ValueError for ones that they cannot have.

    Raises ValueError, too, where there are options for embedding heads and no such head.
    """
    embedding = [name for name, head in heads.items() if head.task == "embedding"]
    ranges = request.calibration if "int8" not in request.precisions else None
    for flag, value in (("--dimensions", request.dimensions), ("--calibrate", ranges)):
        if value and not embedding:
            raise ValueError(f"{flag}: the checkpoint has no embedding head")
    fields = {"matryoshka_dimensions": tuple(sorted(request.dimensions))}
    return {
        name: Head.model_validate({**head.model_dump(), **fields})
        if request.dimensions and name in embedding
        else head
        for name, head in heads.items()
    }


def choose_max_length(request: ExportRequest, longest: int | None) -> int:
    """Return the requested length, else `longest`, in tokens. Raises ValueError for none and for one out of range.

    longest: the checkpoint's own length; None if it has none
    """
    chosen = request.max_length or longest
    if chosen is None:
        raise ValueError("--max-length: the checkpoint does not say how long its inputs may be")
    if chosen < 8 or chosen > (longest or chosen):
        own = f" to the checkpoint's own {longest}" if longest else ""
        raise ValueError(f"--max-length: from 8{own}")
    return chosen


# -- graphs and manifest ----------------------------------------------------------------------------------------------


def write_graphs(
    source: Source,
    folder: Path,
    precisions: Sequence[str],
    encodings: Sequence[Window],
    windows: Sequence[Window],
    show: Show,
) -> None:
    """Write the fp32 graphs, which share one weight file, and the graphs of other requested precisions.

    encodings: the goldens' texts, whose numbers decide what an fp16 graph computes in fp16
    windows: texts whose numbers decide how int8 rounds; empty without an int8 graph
    """
    show("tracing the packed graph ...")
    packed = trace_graphs.trace_packed(source.model)
    portable = make_portable(packed)
    mask_free_attention.drop_masks(packed)
    if "int8" in precisions:
        show("calibrating and rounding the int8 graph ...")
        inputs = calibration.measure_inputs(packed, windows)
        quantized = quantize.quantize(packed, inputs)
        first_token_only.narrow(quantized)
        onnx.save(quantized, folder / "int8.onnx")
    first_token_only.narrow(packed)
    trace_graphs.save_sharing_weights(
        {folder / "fp32.onnx": packed, folder / PORTABLE: portable}, folder / trace_graphs.WEIGHTS
    )
    if "fp16" in precisions:
        show("tracing the graph for CUDA ...")
        halved = trace_cuda(source.model, pack(encodings))
        trace_graphs.save_sharing_weights({folder / "fp16.onnx": halved}, folder / HALF_WEIGHTS)


def trace_cuda(model: EncoderWithHeads, packed: Packed) -> onnx.ModelProto:
    """Trace a model for CUDA in mixed precision, and rewrite the graph for CUDA's kernels.

    packed: texts whose sums decide which norms are in fp16
    """
    graph = trace_graphs.export_cuda(half.halved(model))
    half_stream.fuse_norms(graph, half_stream.fitting_norms(model, packed))
    three_products.split_products(graph)
    biases.move_biases(graph)
    onnx.checker.check_model(graph)
    return graph


def draft_manifest(
    request: ExportRequest,
    encoder: Encoder,
    rows: int,
    golden: Golden,
    folder: Path,
    **fields: Any,
) -> Bundle:
    """Return a bundle before its checks: with goldens, without tolerances and metrics.

    rows: of the embedding table
    fields: further fields of the manifest
    """
    bundle.save_golden(folder / "golden.npz", golden)
    precisions = dict.fromkeys(record["precision"] for record in fields["graphs"])
    tolerance: dict[str, dict[str, Any]] = {precision: {} for precision in precisions}
    metadata = request.metadata
    license_field = {key: metadata[key] for key in ("weights_license",) if key in metadata}
    manifest = Manifest.model_validate(
        {
            "format_version": FORMAT_VERSION,
            "name": request.name,
            "version": request.version,
            "max_length": encoder.max_length,
            "vocabulary": {
                **bundle.describe_file(folder / TOKENIZER),
                "size": rows,
            },
            "goldens": {**bundle.describe_file(folder / "golden.npz"), "tolerance": tolerance},
            "provenance": {**metadata.get("provenance", {}), "runtime": RUNTIME},
            **fields,
            **license_field,
        }
    )
    return Bundle(folder, manifest, "", golden)


def graph_records(folder: Path) -> list[dict[str, Any]]:
    """Return the manifest's records of the graphs in a folder."""
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
    """Return a name that changes whenever vectors stop being comparable; None without a head that gives vectors.

    files: weights and tokenizer, which it is a hash of, with the descriptions of the heads that give vectors
    """
    described = [
        head.model_dump_json(exclude=head.unused_fields(OPTIONAL_FIELDS) | NO_VECTORS)
        for head in heads.values()
        if head.gives_vectors
    ]
    if not described:
        return None
    parts = [bundle.hash_file(file) for file in files]
    return hashlib.sha256("".join([*parts, *described]).encode()).hexdigest()[:16]


# -- checks -----------------------------------------------------------------------------------------------------------


def check_graphs(draft: Bundle, source: Source, encoder: Encoder, show: Show) -> ExportReport:
    """Compare every graph with PyTorch, and its batched with its unbatched outputs. Raises ParityError."""
    encodings = goldens.golden_encodings(encoder, source.model.described)
    encodings += goldens.expanded_queries(encoder, source.model.described)
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
            outputs = run(encodings)
            digits = 6 if record.precision == "fp16" else 4
            lines[what] = describe_agreement(draft.manifest, expected, outputs, digits)
            if record.precision == "fp16":
                least = verify.check_half(expected, outputs, what)
                lines[what] += f"; {verify.check_on_gpu(draft, record, expected, encodings)}"
            else:
                least = verify.check_int8(expected, outputs, what)
            tolerance[record.precision] = {"min_cosine": least}
        worst = verify.check_batch_invariance(run, encodings, what)
        lines[what] += f"; alone and in a batch by {worst:.1e}"
        show(f"{what}: {lines[what]}")
    return ExportReport(lines, tolerance)


def check_external(
    draft: Bundle, expected: Sequence[BatchOutputs], encoder: Encoder, show: Show
) -> tuple[Bundle, ExportReport]:
    """Compare an external graph and its head with the graph's own outputs, and batched with unbatched outputs.

    The graph's layout becomes `alone` where its outputs depend on the batch, or where a batch cannot be computed.
    Raises ParityError.
    """
    (record,) = draft.manifest.graphs
    unbatched = record.model_copy(update={"layout": "alone"})
    threads = os.cpu_count() or 1
    encodings = goldens.golden_encodings(encoder, {})
    run = verify.graph_runner(draft, unbatched, threads)
    what, reference = f"{record.precision} with its head", "the graph without"
    line = f"differs from {reference} its head by"
    line += f" {verify.check_parity(expected, run, encodings, what, reference):.1e}"
    tolerance: dict[str, Any] = {"max_difference": 10 * verify.FP32_TOLERANCE}
    if record.precision == "fp16":
        tolerance = {"min_cosine": verify.check_half(expected, run(encodings), what)}
    elif record.precision == "int8":
        tolerance = {"min_cosine": verify.check_int8(expected, run(encodings), what, reference)}
    short = Encoder(encoder.tokenizer, min(encoder.max_length, BATCH_CHECK_LENGTH))
    try:
        run = verify.graph_runner(draft, record, threads)
        encodings = goldens.golden_encodings(short, {})
        worst = verify.check_batch_invariance(run, encodings, record.precision)
        line += f"; alone and in a batch by {worst:.1e}"
    except Exception as error:  # the runtime's errors have no type, where it cannot compute a batch
        record = unbatched
        line += f"; each text runs alone, for in a batch: {one_line(error)}"
    what = f"{record.precision} {record.layout}"
    show(f"{what}: {line}")
    manifest = draft.manifest.model_copy(update={"graphs": (record,)})
    return replace(draft, manifest=manifest), ExportReport(
        {what: line}, {record.precision: tolerance}
    )


def describe_agreement(
    manifest: Manifest,
    expected: Sequence[BatchOutputs],
    outputs: Sequence[BatchOutputs],
    digits: int,
) -> str:
    """Return a line with each head's cosine to the expected outputs, and its share of equal decisions."""
    parts = []
    for name, head in manifest.heads.items():
        agreement = verify.compare(name, head, expected, outputs)
        part = f"{name} cosine {agreement.cosine:.{digits}f}"
        parts.append(
            part if head.gives_vectors else f"{part}, {agreement.same:.1%} the same decision"
        )
    return "against fp32 on the goldens: " + "; ".join(parts)


def measure(
    draft: Bundle, encoder: Encoder, request: ExportRequest, show: Show
) -> dict[str, dict[str, dict[str, float]]]:
    """Return each evaluated head's metrics by precision. Raises QualityError when int8 loses too much."""
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


def write_encoder(request: ExportRequest, folder: Path, tokenizer: Path, show: Show) -> None:
    """Write the encoder of the exported checkpoint as a checkpoint of its own, in half precision."""
    source = read_source(request.checkpoint, request.task)
    with writer.replacing(folder) as partial:
        writer.save_encoder(partial, source.model.encoder, tokenizer, torch.float16)
        writer.save_teachers(partial, read_teachers(source.folder))
    show(f"{folder}: the encoder in half precision, which training can start from")
