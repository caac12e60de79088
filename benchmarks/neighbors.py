"""Measure how many of the ten nearest neighbors of a sentence a quantized graph keeps.

    python -m benchmarks.neighbors BUNDLE... [--sentences 10000] [--rounds 5]

The sentences are of a Wikipedia file on which no embeddings are trained. (Questions made from it train the answers of
the default model.) For each bundle, all sentences are embedded with the packed fp32 graph and with the packed int8
graph. The overlap is the mean share of a sentence's ten nearest neighbors, among vectors of the fp32 graph, that are
also its ten nearest among vectors of the int8 graph: index and queries have the same precision. Times are processor
time of one thread; a round embeds a tenth of the sentences with each graph in turn.
"""

import argparse
import json
import lzma
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import machine
from benchmarks.lib.onnxruntime_baseline import packed_graph
from export.verify import RunGraph, graph_runner
from service.core import bundle
from service.core.encode import Encoder, Window

CORPUS = Path(__file__).parents[2] / "shared" / "data" / "pretrain" / "wiki_en_07.txt.xz"
PRECISIONS = ("fp32", "int8")
NEAREST = 10
BATCH = 32  # sentences of similar lengths
STEP = 7  # every seventh sentence, so that sentences of one article are few
CHARACTERS = range(40, 221)  # of a sentence

Vectors = NDArray[np.float32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", nargs="+", type=Path, help="bundles with one embedding head")
    parser.add_argument("--sentences", type=int, default=10_000)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="a text file, .xz")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sentences = read_sentences(options.corpus, options.sentences)
    print(f"{machine.describe()}; {len(sentences):,} sentences", flush=True)
    models = {str(folder): Embedder(folder, sentences) for folder in options.bundles}
    rows = {name: model.compare() for name, model in models.items()}
    for name, times in measure(models, options.rounds).items():
        rows[name] |= times
    for name, row in rows.items():
        print(f"{name}: " + "  ".join(f"{key} {value:.4f}" for key, value in row.items()))
    print(json.dumps(rows))


def read_sentences(corpus: Path, count: int) -> list[str]:
    """Return different sentences of a corpus, from its beginning."""
    found: dict[str, None] = {}
    with lzma.open(corpus, "rt", encoding="utf-8") as lines:
        for line in lines:
            for sentence in re.split(r"(?<=[.!?]) +", line.strip()):
                if len(sentence) in CHARACTERS and sentence[0].isupper():
                    found[sentence] = None
            if len(found) >= count * STEP:
                break
    return [*found][::STEP][:count]


class Embedder:
    """The graphs of a bundle, and the sentences as its tokens, in batches of similar lengths."""

    def __init__(self, folder: Path, sentences: Sequence[str]) -> None:
        full = bundle.load(folder)
        heads = full.manifest.heads
        (self.head,) = (name for name, head in heads.items() if head.task == "embedding")
        encoder = Encoder.from_file(full.file("tokenizer.json"), full.manifest.max_length)
        windows = [item.windows[0] for item in encoder.texts(sentences)]
        self.order = np.argsort([len(window) for window in windows], kind="stable")
        ordered = [windows[place] for place in self.order]
        self.batches = [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]
        self.graphs: dict[str, RunGraph] = {
            precision: graph_runner(full, packed_graph(full, precision), threads=1)
            for precision in PRECISIONS
        }

    def embed(self, precision: str, batches: Sequence[Sequence[Window]]) -> Vectors:
        """Return vectors of unit length, [sentences, dimensions], in the order of the batches."""
        run = self.graphs[precision]
        rows = [output[self.head] for batch in batches for output in run(batch)]
        vectors = np.stack([row.reshape(-1) for row in rows])
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))

    def compare(self) -> dict[str, float]:
        """Return the overlap of neighbors, and the mean and the smallest cosine of equal sentences."""
        exact, rounded = (self.embed(precision, self.batches) for precision in PRECISIONS)
        cosines = (exact * rounded).sum(axis=1)
        return {
            "overlap": overlap(exact, rounded),
            "mean_cosine": float(cosines.mean()),
            "min_cosine": float(cosines.min()),
        }


def overlap(exact: Vectors, other: Vectors, nearest: int = NEAREST) -> float:
    """Return the mean share of equal neighbors of the rows of two matrices of unit vectors."""
    pairs = zip(neighbors(exact, nearest), neighbors(other, nearest), strict=True)
    return float(np.mean([len({*a} & {*b}) / nearest for a, b in pairs]))


def neighbors(vectors: Vectors, nearest: int) -> NDArray[np.intp]:
    """Return the numbers of the rows with the largest cosines to each row but itself, [rows, nearest]."""
    found = []
    for start in range(0, len(vectors), 1000):
        cosines = vectors[start : start + 1000] @ vectors.T
        cosines[np.arange(len(cosines)), start + np.arange(len(cosines))] = -np.inf
        found.append(np.argpartition(-cosines, nearest, axis=1)[:, :nearest])
    return np.concatenate(found)


def measure(models: dict[str, Embedder], rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of processor time for a sentence, by model and precision: medians of interleaved rounds."""
    spent: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for name, model in models.items():
            part = model.batches[number % 10 :: 10]
            for precision in PRECISIONS:
                start = time.process_time()
                model.embed(precision, part)
                each = 1000 * (time.process_time() - start) / sum(map(len, part))
                spent.setdefault((name, precision), []).append(each)
    return {
        name: {f"{p}_ms": float(np.median(spent[name, p])) for p in PRECISIONS} for name in models
    }


if __name__ == "__main__":
    main()
