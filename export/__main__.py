"""Export a checkpoint to a verified bundle: `python -m export CHECKPOINT OUT [--precision fp32 int8 fp16]`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from export import arguments
from model.checkpoints.errors import INSTALL_HUB, INSTALL_TRAIN
from service.core.bundle_versions import next_version
from service.core.manifest import Manifest

if TYPE_CHECKING:
    from export.drafts import ExportRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Export, and print each step. Returns the exit status."""
    checkpoint = arguments.parser().parse_args(argv).checkpoint  # before slow imports
    try:
        return export(argv)
    except ModuleNotFoundError as error:
        if error.name == "huggingface_hub":
            reason = f"a name on the hub needs huggingface_hub: {INSTALL_HUB}"
        else:
            reason = f"a checkpoint needs {error.name}, an ONNX graph does not: {INSTALL_TRAIN}"
        print(f"export: {checkpoint}: {reason}", file=sys.stderr)
        return 1


def export(argv: Sequence[str] | None) -> int:
    """Export as the command line describes it. Returns the exit status. Raises ModuleNotFoundError."""
    from export import pipeline
    from export.comparison import compare_graphs
    from export.drafts import one_line

    try:
        request = read_request(argv)
        lines: list[str] = []

        def show(line: str) -> None:
            print(line)
            lines.append(line)

        manifest = pipeline.export(request, show)
        agreement = dict(line.split(": ", 1) for line in reversed(lines) if ": " in line)
        print(compare_graphs(request.out, agreement))
        print(summary(request.out, manifest))
    except pipeline.EXPECTED_ERRORS as error:
        print(f"export: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


def read_request(argv: Sequence[str] | None) -> "ExportRequest":
    """Return the export that the command line describes. Exits with status 2 for bad arguments."""
    from export import provenance
    from export.drafts import ExportRequest
    from export.external.onnx_source import is_external
    from model.checkpoints.hub_download import join_name

    parser = arguments.parser()
    options = parser.parse_args(argv)
    source = join_name(options.checkpoint, options.revision)
    onnx = options.onnx or is_external(source)
    if options.revision and Path(options.checkpoint).exists():
        parser.error(f"--revision: {options.checkpoint} is a local path")
    if onnx and options.precisions:
        parser.error("--precision: an ONNX graph keeps the precision of its weights; leave it out")
    for flag, value in (("--states", options.states), ("--attention", options.attention)):
        if onnx and value:
            parser.error(f"{flag}: an ONNX graph keeps its outputs; export a checkpoint")
    if onnx and options.encoder:
        parser.error("--encoder: training cannot start from an ONNX graph")
    if onnx and options.adapter:
        parser.error("--adapter: an ONNX graph keeps its weights; export a checkpoint")
    precisions = () if onnx else options.precisions or ("fp32", "int8")
    default = options.default_precision
    if default and default not in precisions:
        parser.error(f"--default-precision: there is no {default} graph")
    if default:
        precisions = (default, *precisions)  # the first one is the default
    evaluations = dict(part.split("=", 1) for part in options.eval if "=" in part)
    if len(evaluations) != len(options.eval):
        parser.error("--eval takes HEAD=FILE, each head once")
    version, out = options.version, options.out
    if options.next_version:
        number, out = next_version(out)
        version = str(number)
    return ExportRequest(
        checkpoint=source,
        onnx=onnx,
        out=out,
        precisions=tuple(dict.fromkeys(precisions)),
        name=options.name or options.out.resolve().name,
        version=version,
        max_length=options.max_length,
        evaluations={head: Path(file) for head, file in evaluations.items()},
        max_changed=options.max_changed,
        metadata=provenance.read_metadata(options.provenance) if options.provenance else {},
        replace=options.replace,
        task=options.task,
        memory=options.memory,
        dimensions=tuple(options.dimensions),
        calibration=options.calibrate,
        encoder=options.encoder,
        pooling=options.pooling,
        outputs=tuple(options.output),
        states=options.states,
        attention=options.attention,
        adapter=options.adapter,
    )


def summary(out: Path, manifest: Manifest) -> str:
    total = sum(path.stat().st_size for path in out.iterdir()) / 1e6
    return f"{out}: {manifest.id}, {', '.join(manifest.precisions)}, {total:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
