"""Export a checkpoint to a verified bundle: `python -m export CHECKPOINT OUT [--precision fp32 int8 fp16]`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from export import arguments
from service.core.bundle import Manifest
from service.core.bundle_versions import next_version

if TYPE_CHECKING:
    from export.pipeline import ExportRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Export, and print each step. Returns the exit status."""
    arguments.parser().parse_args(argv)  # help and bad arguments need no package of the extra
    try:
        from export import pipeline
        from export.comparison import compare_graphs
    except ModuleNotFoundError as error:
        extra = "install the extra train: pip install 'quartet-serving[train]'"
        print(f"export: the package {error.name} is missing: {extra}", file=sys.stderr)
        return 1
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
        print(f"export: {pipeline.one_line(error)}", file=sys.stderr)
        return 1
    return 0


def read_request(argv: Sequence[str] | None) -> "ExportRequest":
    """Return the export that the command line describes. Exits with status 2 for bad arguments."""
    from export import provenance
    from export.external.onnx_source import is_external
    from export.pipeline import ExportRequest
    from model.checkpoints.hub_download import join_name

    parser = arguments.parser()
    options = parser.parse_args(argv)
    onnx = options.onnx or is_external(options.checkpoint)
    if onnx and options.revision:
        parser.error("--revision: an ONNX graph is a local file")
    if onnx and options.precisions:
        parser.error("--precision: an ONNX graph keeps the precision of its weights; leave it out")
    if onnx and options.encoder:
        parser.error("--encoder: training cannot start from an ONNX graph")
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
        checkpoint=join_name(options.checkpoint, options.revision),
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
    )


def summary(out: Path, manifest: Manifest) -> str:
    total = sum(path.stat().st_size for path in out.iterdir()) / 1e6
    return f"{out}: {manifest.id}, {', '.join(manifest.precisions)}, {total:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
