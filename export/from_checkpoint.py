"""The graphs of a checkpoint: traced, quantized and compared with PyTorch."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from export import calibration, goldens, provenance, trace_graphs, verify
from export.drafts import (
    TOKENIZER,
    ExportReport,
    ExportRequest,
    Show,
    check_evaluations,
    choose_dimensions,
    choose_max_length,
    describe_source,
    draft_manifest,
    embedding_space,
    show_assumptions,
)
from export.passes import (
    biases,
    first_token_only,
    half_stream,
    mask_free_attention,
    quantize,
    three_products,
)
from export.passes import fp16 as half
from export.passes.graph_utils import WEIGHTS, embed_weights
from export.passes.portable import attention_graph, make_portable
from export.passes.sliding_window import lower_windows
from model.checkpoints import writer
from model.checkpoints.head_config import declares_pooling
from model.checkpoints.reader import read_teachers
from model.checkpoints.source import Source, read_source
from model.checkpoints.tables import unread_settings
from model.families.registry import family_of
from model.families.spec import Family
from model.heads import EncoderWithHeads, HiddenStates, SentenceEmbedding
from model.static_embedding import StaticModel
from model.training.capture import attention_maps
from service.core import bundle
from service.core.bundle import Bundle
from service.core.encode import Encoder, Window
from service.core.manifest import ATTENTION, MOST_ATTENDED, Head, Manifest
from service.core.packing import Packed, pack
from service.core.session import BatchOutputs, open_attention, trim

PORTABLE = "fp32.portable.onnx"
ATTENTION_FILE = "fp32.attention.onnx"
TRACED = "traced.weights.bin"  # not of the bundle
HALF_WEIGHTS = "fp16.weights.bin"


def draft_bundle(
    request: ExportRequest, folder: Path, show: Show
) -> tuple[ExportRequest, Encoder, Bundle, ExportReport]:
    """Trace, quantize and check a checkpoint's model: a bundle of all its graphs in `folder`.

    Returns the request with the metadata of the checkpoint, too.
    """
    source = read_source(request.checkpoint, request.task, request.adapter)
    choose_pooling(request, source)
    of_encoder = request.encoder or request.states or request.attention
    if of_encoder and isinstance(source.model, StaticModel):
        flags = "--encoder, --states, --attention"
        raise ValueError(f"{flags}: static embeddings have no encoder: leave them out")
    if request.states:
        add_states(source)
    metadata = provenance.with_commit(request.metadata, request.checkpoint, source.folder)
    metadata = provenance.with_teachers(metadata, source.folder)
    request = replace(request, metadata=provenance.with_training(metadata, source.folder))
    encoder = Encoder(source.tokenizer, choose_max_length(request, source.max_length))
    heads = choose_dimensions(request, source.model.described)
    check_evaluations(request, heads)
    check_precisions(request, family_of(source.model.config), heads)
    show(describe_source(source.folder, heads, encoder))
    assumed = not (request.pooling or declares_pooling(source.folder))
    show_assumptions(source.folder, heads, assumed, show)
    if unread := unread_settings(source.folder):
        show(f"settings that neither Quartet nor the reference library reads: {unread}")
    encodings = goldens.golden_encodings(encoder, heads)
    checked = [*encodings, *goldens.expanded_queries(encoder, heads)]
    expected = [out for encoding in checked for out in goldens.run_torch(source.model, [encoding])]
    short = [own for own in encodings if len(own) <= MOST_ATTENDED] if request.attention else []
    maps = [attention_maps(source.model.encoder, own).numpy() for own in short]
    texts = calibration.read_texts(request.calibration)
    is_rounded = "int8" in request.precisions
    windows = calibration.choose_windows(encoder, texts, heads) if is_rounded else []
    show("tracing the packed graph ...")
    packed = trace_graphs.trace_packed(source.model, folder / TRACED)
    if "fp16" in request.precisions:
        show("tracing the graph for CUDA ...")
        halved = trace_cuda(source.model, pack(encodings))
        trace_graphs.save_sharing_weights({folder / "fp16.onnx": halved}, folder / HALF_WEIGHTS)
        del halved
    source.tokenizer.save(str(folder / TOKENIZER))
    rows = source.model.config.vocab_size
    del source  # the graphs' own memory follows
    trim()
    write_graphs(packed, folder, windows, show, attention=request.attention)
    draft = draft_manifest(
        request,
        encoder,
        rows,
        goldens.join_golden(encodings, expected[: len(encodings)]),
        folder,
        heads=heads,
        default_precision=request.default_precision,
        graphs=graph_records(folder),
        attention=attention_record(folder, maps) if maps else None,
        embedding_space=embedding_space(heads, folder / WEIGHTS, folder / TOKENIZER),
    )
    if maps:
        check_attention(draft, short, maps, show)
    return request, encoder, draft, check_graphs(draft, checked, expected, show)


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


def add_states(source: Source) -> None:
    """Add a head that gives the last hidden states to a checkpoint's model."""
    name, width = "last_hidden_state", source.model.config.hidden_size
    source.model.described[name] = Head(task="hidden-states", dimensions=width)
    source.model.heads[name] = HiddenStates()


def check_precisions(request: ExportRequest, family: Family, heads: Mapping[str, Head]) -> None:
    """Raise ValueError where --precision names fp16, and the family or a head cannot be computed in it."""
    if "fp16" in request.precisions and not family.fits_half:
        reason = f"activations of {family.model_type} exceed the range of fp16"
        raise ValueError(f"--precision: {reason}; leave out fp16")
    for name, head in heads.items():
        if "fp16" in request.precisions and head.per_pair:
            reason = f"head {name} of the task {head.task} has no graph for CUDA"
            raise ValueError(f"--precision: {reason}; leave out fp16")
        late = head.late_interaction
        if "fp16" in request.precisions and late is not None and late.hides_expansion:
            reason = f"fp16 cannot hide the query expansion of head {name} from other tokens"
            raise ValueError(f"--precision: {reason}; leave out fp16")


def write_graphs(
    packed: onnx.ModelProto,
    folder: Path,
    windows: Sequence[Window],
    show: Show,
    attention: bool = False,
) -> None:
    """Write the fp32 graphs, which share one weight file, and the int8 graph.

    windows: texts whose numbers decide how int8 rounds; empty for no int8 graph
    attention: whether to write the graph of attention weights, too
    """
    portable = make_portable(packed)
    lower_windows(packed)
    mask_free_attention.drop_masks(packed)
    if windows:
        show("calibrating and rounding the int8 graph ...")
        inputs = calibration.measure_inputs(packed, windows, folder)
        quantized = quantize.quantize(packed, inputs)
        first_token_only.narrow(quantized)
        embed_weights(quantized)
        onnx.save(quantized, folder / "int8.onnx")
    first_token_only.narrow(packed)
    graphs = {folder / "fp32.onnx": packed, folder / PORTABLE: portable}
    if attention:
        graphs[folder / ATTENTION_FILE] = attention_graph(portable)
    trace_graphs.save_sharing_weights(graphs, folder / WEIGHTS)


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


def graph_records(folder: Path) -> list[dict[str, Any]]:
    """Return the manifest's records of the graphs in a folder."""

    def describe(file: str, **fields: Any) -> dict[str, Any]:
        return {"opset": trace_graphs.OPSET, **bundle.describe_file(folder / file), **fields}

    weights = bundle.describe_file(folder / WEIGHTS)
    fp32 = {"precision": "fp32", "provider": "any", "weights": weights}
    records = [
        describe("fp32.onnx", layout="packed", **fp32),
        describe(PORTABLE, layout="portable", **fp32),
    ]
    if (folder / "int8.onnx").is_file():
        records.append(describe("int8.onnx", layout="packed", precision="int8", provider="cpu"))
    if (folder / "fp16.onnx").is_file():
        proto = onnx.load(folder / "fp16.onnx", load_external_data=False)
        half = {
            "precision": "fp16",
            "provider": "cuda",
            "weights": bundle.describe_file(folder / HALF_WEIGHTS),
            "attention_bias": trace_graphs.has_attention_bias(proto),
        }
        records.append(describe("fp16.onnx", layout="packed", **half))
    return records


def attention_record(folder: Path, maps: Sequence[NDArray[np.float32]]) -> dict[str, Any]:
    """Return the manifest's record of the attention graph. maps: of texts, `[L, N, n, n]` each"""
    layers, heads = maps[0].shape[:2]
    portable = next(r for r in graph_records(folder) if r["layout"] == "portable")
    file = bundle.describe_file(folder / ATTENTION_FILE)
    return {**portable, **file, "layers": layers, "heads": heads}


def check_attention(
    draft: Bundle, windows: Sequence[Window], maps: Sequence[NDArray[np.float32]], show: Show
) -> None:
    """Compare the attention graph with PyTorch's attention weights of the same windows. Raises ParityError."""
    attend = open_attention(draft)
    assert attend is not None, "our bug: the draft has an attention graph"
    expected = [{ATTENTION: own} for own in maps]
    outputs = [{ATTENTION: attend(window)} for window in windows]
    worst = verify.check_parity(expected, outputs, "attention")
    show(f"attention weights: differ from PyTorch by {worst:.1e}")


def check_graphs(
    draft: Bundle, encodings: Sequence[Window], expected: Sequence[BatchOutputs], show: Show
) -> ExportReport:
    """Compare every graph with PyTorch, and its batched with its unbatched outputs. Raises ParityError.

    expected: what PyTorch computed for each encoding by itself
    """
    lines: dict[str, str] = {}
    tolerance: dict[str, dict[str, Any]] = {}
    for record in draft.manifest.graphs:
        run = verify.graph_runner(draft, record, threads=os.cpu_count() or 1)
        what = f"{record.precision} {record.layout}"
        outputs = run(encodings)
        if record.precision == "fp32":
            worst = verify.check_parity(expected, outputs, what)
            tolerance["fp32"] = {"max_difference": 10 * verify.FP32_TOLERANCE}
            lines[what] = f"differs from PyTorch by {worst:.1e}"
        else:
            digits = 6 if record.precision == "fp16" else 4
            lines[what] = describe_agreement(draft.manifest, expected, outputs, digits)
            if record.precision == "fp16":
                least = verify.check_half(expected, outputs, what)
                lines[what] += f"; {verify.check_on_gpu(draft, record, expected, encodings)}"
            else:
                least = verify.check_int8(expected, outputs, what)
            tolerance[record.precision] = {"min_cosine": least}
        worst = verify.check_batch_invariance(run, encodings, outputs, what)
        lines[what] += f"; alone and in a batch by {worst:.1e}"
        show(f"{what}: {lines[what]}")
    return ExportReport(lines, tolerance)


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
            part if head.gives_numbers else f"{part}, {agreement.same:.1%} the same decision"
        )
    return "against fp32 on the goldens: " + "; ".join(parts)


def write_encoder(request: ExportRequest, folder: Path, tokenizer: Path, show: Show) -> None:
    """Write the encoder of the exported checkpoint as a checkpoint of its own, in half precision."""
    source = read_source(request.checkpoint, request.task, request.adapter)
    with writer.replacing(folder) as partial:
        writer.save_encoder(partial, source.model.encoder, tokenizer, torch.float16)
        writer.save_provenance(partial, read_teachers(source.folder))
    show(f"{folder}: the encoder in half precision, which training can start from")
