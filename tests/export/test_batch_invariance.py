"""Batch invariance: results are the same alone, in batches, and next to extreme texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from export.verify import BATCH_TOLERANCE, RunGraph, graph_runner
from service.core import bundle, packing
from service.core.bundle import Bundle
from service.core.cpu import CPU
from service.core.encode import Encoder, Encoding, Window
from service.core.session import BatchOutputs, Session, SessionOptions
from tests import samples

SERVED = [
    ("tiny_bundle", "fp32"),
    ("tiny_bundle", "int8"),
    ("gpu_bundle", "fp16"),
    ("minilm_bundle", "fp32"),
    ("minilm_bundle", "int8"),
    ("mini_bundle", "int8"),
]

TEXTS, LONGEST = 5000, 512
HOSTILE = {
    "as long as can be": samples.text(600, seed=99),
    "outliers": f"{samples.OUTLIER} " * 40,
    "nothing": "",
    "one unknown sign": "\U0001f9ff",
    "one word on and on": "comet " * 300,
}


@dataclass(frozen=True)
class Served:
    """A packed graph with texts, and what it answers to each of them alone."""

    run: RunGraph
    encoder: Encoder
    encodings: Sequence[Encoding]
    alone: Sequence[BatchOutputs]

    def worst(self, found: Sequence[BatchOutputs]) -> float:
        """The largest difference of the first texts' answers from those that were given alone."""
        pairs = zip(self.alone[: len(found)], found, strict=True)
        return float(np.max([np.abs(a[name] - b[name]).max() for a, b in pairs for name in a]))


SLOW = {"minilm_bundle": pytest.mark.slow}  # it is exported first
PARAMS = [
    pytest.param(pair, id=" ".join(pair), marks=[SLOW[pair[0]]] if pair[0] in SLOW else [])
    for pair in SERVED
]


@pytest.fixture(scope="module", params=PARAMS)
def served(request: pytest.FixtureRequest, sentences: list[str]) -> Served:
    name, precision = request.param
    opened = bundle.load(request.getfixturevalue(name))
    (record,) = (
        g for g in opened.manifest.graphs if (g.precision, g.layout) == (precision, "packed")
    )
    run = graph_runner(opened, record, threads=2)
    encoder = Encoder.from_file(opened.file("tokenizer.json"), opened.manifest.max_length)
    encodings = [item.windows[0] for item in encoder.texts(sentences[:32])]
    return Served(run, encoder, encodings, [run([encoding])[0] for encoding in encodings])


@pytest.mark.parametrize("size", [2, 8, 32])
def test_batches(served: Served, size: int) -> None:
    """A text gets the same answer alone and in a batch of others, longer and shorter ones."""
    assert served.worst(served.run(served.encodings[:size])) <= BATCH_TOLERANCE


@pytest.mark.parametrize("neighbour", HOSTILE.values(), ids=HOSTILE)
def test_hostile_neighbours(served: Served, neighbour: str) -> None:
    """Nor does any neighbour change it: not by its length, its activations or its emptiness."""
    hostile = served.encoder.texts([neighbour])[0].windows[0]
    *others, _ = served.run([*served.encodings[:4], hostile])
    assert served.worst(others) <= BATCH_TOLERANCE


def test_place_in_the_batch(served: Served) -> None:
    """Nor does the place that it has in the batch."""
    backwards = served.run(served.encodings[::-1])
    assert served.worst(backwards[::-1]) <= BATCH_TOLERANCE


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "precision"),
    [("minilm_bundle", "fp32"), ("minilm_bundle", "int8"), ("mini_bundle", "int8")],
)
def test_thousands_of_texts(
    request: pytest.FixtureRequest, name: str, precision: str, threads: int
) -> None:
    """None of 5,000 texts differs between alone and three shuffles, in batches of 2, 8 and 32.

    Each length from 1 to 512 tokens occurs at least once, and most texts are short. Batches of 2 have texts of any
    lengths; the larger ones have similar lengths, as those of the planner do, because padding would cost hours.
    """
    opened = bundle.load(request.getfixturevalue(name))
    (record,) = (
        g for g in opened.manifest.graphs if (g.precision, g.layout) == (precision, "packed")
    )
    run = graph_runner(opened, record, threads)
    rng = np.random.default_rng(0)
    further = np.exp(rng.uniform(0, np.log(128), TEXTS - LONGEST)).round().astype(int)
    lengths = np.concatenate([np.arange(LONGEST) + 1, further])
    ids = [rng.integers(opened.manifest.vocabulary.size, size=length) for length in lengths]
    windows = [Window(each, np.zeros_like(each)) for each in ids]
    alone = [run([window])[0] for window in windows]
    for size, spread in ((2, 9), (8, 1), (32, 0.5)):
        order = np.argsort(np.log(lengths) + rng.normal(0, spread, TEXTS))
        differences = np.zeros(TEXTS)
        for rows in np.split(order, range(size, TEXTS, size)):
            found = run([windows[row] for row in rows])
            differences[rows] = [
                max(float(np.abs(answer[head] - alone[row][head]).max()) for head in answer)
                for row, answer in zip(rows, found, strict=True)
            ]
        worst = differences.argmax()
        print(f"batches of {size}: {differences[worst]:.1e}, of {lengths[worst]} tokens")
        assert differences.max() <= BATCH_TOLERANCE


def test_usual_int8_fails_this_test(tiny_bundle: Path, tmp_path: Path) -> None:
    """The runtime's own dynamic quantisation, with one scale for all tokens, would be found out here."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    opened = bundle.load(tiny_bundle)
    record = opened.manifest.graphs[0]
    model = onnx.load(opened.file(record.file))
    quantization.quantize_dynamic(
        model,
        tmp_path / record.file,
        per_channel=True,
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    usual = Bundle(tmp_path, opened.manifest, "", opened.golden)
    session = Session(usual, record, CPU, SessionOptions(threads=1))

    encoder = Encoder.from_file(opened.file("tokenizer.json"), opened.manifest.max_length)
    encoded = encoder.texts([samples.text(8), HOSTILE["outliers"]])
    first, hostile = (item.windows[0] for item in encoded)
    alone = session.run(packing.pack([first]))["embeddings"][0]
    together = session.run(packing.pack([first, hostile]))["embeddings"][0]
    assert np.abs(alone - together).max() > 1000 * BATCH_TOLERANCE
