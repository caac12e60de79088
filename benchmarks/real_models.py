"""Export models with real weights, and compare them: `python -m benchmarks.real_models [NAME...] [--write FILE]`.

NAME is a hub name, NAME@REVISION or a directory; by default, all of `real_models.toml`. Export compares every graph
with PyTorch, and each text unbatched with a batch. The vectors of embedding models are compared with
sentence-transformers, which reads the same files. The table goes to the standard output and, with --write, between the
two marks in a Markdown file.

    difference  largest difference of a vector from sentence-transformers', at fp32
    int8        mean share of a text's ten nearest of TEXTS texts that int8 and fp32 have in common
"""

import argparse
import asyncio
import contextlib
import io
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import traffic
from export.__main__ import main as export
from model.checkpoints import tables
from model.checkpoints.errors import CheckpointError
from model.checkpoints.reader import locate
from quartet.comparison.figures import overlap
from service.core.bundle import read_manifest
from service.embedded import EmbeddedService

LIST = Path(__file__).with_suffix(".toml")
TEXTS = 500
COLUMNS = ("model", "task", "state", "difference", "int8")


class Row(NamedTuple):
    """What the table states of a model; None where there is no such figure."""

    tasks: str
    state: str
    difference: float | None = None
    int8: float | None = None


def read_names(path: Path = LIST) -> list[str]:
    """Return NAME@REVISION of each hub name in a list, and the other names."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    revision = document["revision"]
    return [
        name if "@" in name or ":" in name else f"{name}@{revision}" for name in document["names"]
    ]


def measure(name: str, folder: Path, texts: Sequence[str], int8: bool = True) -> Row:
    """Export a model to a folder and compare it. A refusal is a row, too.

    int8: whether to export and compare int8, which takes most of the time
    """
    try:
        source = locate(name)
    except CheckpointError as error:
        return Row("", f"not read: {error}")
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        precisions = ["fp32", *(["int8"] if int8 else [])]
        failed = export([str(source), str(folder), "--no-memory", "--precision", *precisions])
    if failed:
        lines = errors.getvalue().strip().splitlines()
        return Row("", f"refused: {lines[-1].removeprefix('export: ') if lines else failed}")
    heads = read_manifest(folder).heads
    tasks = ", ".join(dict.fromkeys(head.task for head in heads.values()))
    if not any(head.task == "embedding" for head in heads.values()):
        return Row(tasks, "exported")
    fp32, *rest = (asyncio.run(embed(folder, texts, precision)) for precision in precisions)
    difference = float(np.abs(fp32 - reference(source, texts)).max())
    return Row(tasks, "served", difference, overlap([*fp32], [*rest[0]]) if rest else None)


async def embed(folder: Path, texts: Sequence[str], precision: str) -> NDArray[np.float32]:
    """Return the vectors of texts, which the service computes in this process, `[n, D]`."""
    async with EmbeddedService(folder, precision=precision, provider="cpu") as service:
        return np.stack(await service.embed([*texts], normalize=True))


def reference(source: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return the vectors of texts that sentence-transformers computes, `[n, D]`."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(source), device="cpu")
    vectors = model.encode([*texts], normalize_embeddings=True)
    return np.asarray(vectors, np.float32)


def table(rows: dict[str, Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for name, row in rows.items():
        figures = (
            "" if row.difference is None else f"{row.difference:.0e}",
            "" if row.int8 is None else f"{row.int8:.3f}",
        )
        lines.append([f"`{name}`", row.tasks, row.state.replace("|", "/"), *figures])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--texts", type=int, default=TEXTS, metavar="N")
    parser.add_argument("--fp32", action="store_true", help="no int8, which takes most of the time")
    parser.add_argument("--write", type=Path, metavar="FILE")
    given = parser.parse_args()
    texts = traffic.texts(traffic.MIXES["news"], given.texts)
    rows = {}
    for name in given.names or read_names():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = measure(name, Path(folder) / "bundle", texts, int8=not given.fp32)
        print(name, *rows[name], flush=True)
    print(f"\n{table(rows)}")
    if given.write:
        tables.write(given.write, "real models", table(rows))


if __name__ == "__main__":
    main()
