"""An external ONNX graph with a head of ours, compared with the graph alone. No module here imports torch."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from export import goldens, provenance, verify
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
    one_line,
    show_assumptions,
)
from export.external import attach_head, onnx_source
from export.passes.graph_utils import WEIGHTS
from model.checkpoints.head_config import declares_pooling
from service.core.bundle import Bundle
from service.core.encode import Encoder
from service.core.session import BatchOutputs

BATCH_CHECK_LENGTH = 256  # tokens of the longest text in the batch that an external graph computes: padding costs time


def draft_bundle(
    request: ExportRequest, folder: Path, show: Show
) -> tuple[ExportRequest, Encoder, Bundle, ExportReport]:
    """Attach a head to an external graph, and check it: a bundle of that one graph in `folder`.

    Returns the request with the metadata of the graph's directory, too.
    """
    external = onnx_source.read_external(request.checkpoint, request.task)
    metadata = provenance.with_commit(request.metadata, request.checkpoint, external.folder)
    request = replace(request, metadata=provenance.with_training(metadata, external.folder))
    encoder = Encoder(external.tokenizer, choose_max_length(request, external.max_length))
    encodings = goldens.golden_encodings(encoder, {})
    outputs = onnx_source.run_external(external, encodings)
    recipe = onnx_source.read_recipe(external, encodings, outputs, request.pooling, request.outputs)
    name: str = recipe.head.task
    heads = choose_dimensions(request, {name: recipe.head})
    check_evaluations(request, heads)
    show(describe_source(external.folder, heads, encoder))
    pools_here = bool(recipe.pooling)
    assumed = pools_here and not (request.pooling or declares_pooling(external.folder))
    show_assumptions(external.folder, heads, assumed, show)
    record = attach_head.write_graph(external.graph, recipe, folder)
    external.tokenizer.save(str(folder / TOKENIZER))
    expected = [{name: recipe.apply(own)} for own in outputs]
    files = [folder / file for file in (record["file"], WEIGHTS, TOKENIZER)]
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
    return request, encoder, *check_external(draft, expected, encoder, show)


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
    found = run(encodings)
    line += f" {verify.check_parity(expected, found, what, reference):.1e}"
    tolerance: dict[str, Any] = {"max_difference": 10 * verify.FP32_TOLERANCE}
    if record.precision == "fp16":
        tolerance = {"min_cosine": verify.check_half(expected, found, what)}
    elif record.precision == "int8":
        tolerance = {"min_cosine": verify.check_int8(expected, found, what, reference)}
    short = Encoder(encoder.tokenizer, min(encoder.max_length, BATCH_CHECK_LENGTH))
    try:
        run = verify.graph_runner(draft, record, threads)
        encodings = goldens.golden_encodings(short, {})
        worst = verify.check_batch_invariance(run, encodings, run(encodings), record.precision)
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
