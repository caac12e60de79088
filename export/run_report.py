"""What an export found, as a section of the page of the run that trained the checkpoint."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model.report import page
from model.report.page import Report, Section
from service.core.manifest import Manifest


def add_export(
    checkpoint: str,
    out: Path,
    manifest: Manifest,
    checks: Mapping[str, str],
    show: Callable[[str], None],
) -> None:
    """Add parity, quantization and sizes to the page next to a checkpoint; nothing where it has none.

    checks: the result of the checks as a line of text, by graph
    """
    folder = Path(checkpoint).resolve().parent
    report = Report.read(folder)
    if report is None:
        return
    report.add(describe(out, manifest, checks))
    try:
        report.write(folder)
    except OSError as error:
        show(f"{folder / page.PAGE}: not updated: {error.strerror}")
    else:
        show(f"{folder / page.PAGE}: parity and quantization were added")


def describe(out: Path, manifest: Manifest, checks: Mapping[str, str]) -> Section:
    """Return the section: the checks of each graph, the metrics by precision, and the sizes of files."""
    parts = ["<h3>Parity</h3>", page.table(["graph", "check"], [*checks.items()])]
    rows: list[list[Any]] = []
    for name, metrics in manifest.metrics.items():
        exact = metrics.get("fp32", {})
        for precision, values in metrics.items():
            for metric, value in values.items():
                change = f"{value - exact[metric]:+.2f}" if metric in exact else ""
                rows.append([name, metric, precision, value, change])
    if rows:
        head = ["head", "metric", "precision", "points", "difference to fp32"]
        parts += ["<h3>Quantization</h3>", page.table(head, rows)]
    sizes = {
        name: f"{(out / name).stat().st_size / 1e6:.1f} MB"
        for name in manifest.files()
        if (out / name).is_file()
    }
    parts += ["<h3>Files</h3>", page.facts(sizes)]
    return Section(f"export {manifest.name}", f"Export {manifest.id}", "\n".join(parts))
