"""Calibration of int8 graphs: the inputs of an encoder's matrix products for some text.

Without a file of texts, one half of the text is random entries of the vocabulary, and the other half is sentences with
random words: each half alone made the rounding of weights worse. It is the same for equal tokenizers, so that equal
checkpoints make equal bundles.

T tokens, K inputs of a product
"""

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import tokenizers
from numpy.typing import NDArray
from onnx import helper

from export import trace_graphs
from export.goldens import first_windows
from export.passes.fold import fold
from export.passes.graph_utils import TRUNK, WEIGHTS, is_trunk_product, replace_nodes
from service.core.cpu import CPU
from service.core.encode import Encoder, Window
from service.core.manifest import Head
from service.core.packing import pack, word_label_pairs
from service.core.session import SessionOptions, open_graph, packed_feeds, pair_feeds, trim

TOKENS = 8192  # in all; with less than 1,000, the rounding of weights becomes worse than without calibration
ENTRIES = 24  # of the vocabulary in a random text
LONGEST = 128  # tokens of a text
BATCH = 16  # texts of similar lengths in a batch
UNKNOWN = "word"  # for a vocabulary without words
PATTERNS = (
    "The {} of the {} was {} in {}, and the {} did not {}.",
    "She said that {} and {} were the first {} to {} with a {}.",
    "In {}, a {} from {} won the {}; it was {} than any {}.",
    "What is the {} of {}, and how does it {} for the {}?",
    "I have never {} such a {} {}, but they {} it on {}.",
    "He was born in {} ({}) and moved to {} at the age of {}.",
    "This {} is made of {} and {}, which can be {} by {}.",
    "According to {}, more than {} {} have been {} since {}.",
)

Floats = NDArray[np.float32]


def read_texts(file: Path | None) -> list[str]:
    """Return the texts of a file, one a line, without empty lines; none without a file. Raises OSError."""
    lines = file.read_text(encoding="utf-8").splitlines() if file else []
    return [line for line in lines if line.strip()]


def choose_windows(
    encoder: Encoder, texts: Sequence[str] = (), heads: Mapping[str, Head] | None = None
) -> list[Window]:
    """Return at least 8,192 tokens for calibration: of the texts from the first on, then of made ones."""
    short = Encoder(encoder.tokenizer, min(encoder.max_length, LONGEST))
    chosen: list[Window] = []
    tokens = 0
    for text in itertools.chain(texts, _made_texts(encoder.tokenizer)):
        (window,) = first_windows(short, [text], heads or {})
        chosen.append(window)
        tokens += len(window)
        if tokens >= TOKENS:
            break
    return chosen


def _made_texts(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield random entries of the vocabulary and sentences with random words in turn, without an end."""
    random = np.random.default_rng(0)
    entries = sorted(tokenizer.get_vocab(with_added_tokens=False).values())
    texts = (tokenizer.decode([entry]).strip() for entry in entries)
    words = [text for text in texts if text.isalpha() and len(text) > 1] or [UNKNOWN]
    for pattern in itertools.cycle(PATTERNS):
        yield tokenizer.decode(random.choice(entries, ENTRIES).tolist())
        yield pattern.format(*random.choice(words, pattern.count("{}")))


class Inputs(Mapping[str, Floats]):
    """Inputs [T, K] by name, each in a file, since the inputs of a large encoder take gigabytes together."""

    def __init__(self, folder: Path, widths: Mapping[str, int]) -> None:
        self._widths = widths
        self._files = {name: folder / f"inputs.{number}" for number, name in enumerate(widths)}
        for file in self._files.values():
            file.write_bytes(b"")

    def __getitem__(self, name: str) -> Floats:
        return np.fromfile(self._files[name], np.float32).reshape(-1, self._widths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def add(self, name: str, rows: Floats) -> None:
        """Append rows to the file of an input."""
        with self._files[name].open("ab") as file:
            rows.tofile(file)


def measure_inputs(model: onnx.ModelProto, windows: Sequence[Window], folder: Path) -> Inputs:
    """Return the inputs [T, K] of the encoder's matrix products in a packed fp32 graph, by name.

    folder: for the files of the inputs
    """
    measured = onnx.ModelProto()
    measured.CopyFrom(model)
    fold(measured)
    products = [n for n in measured.graph.node if is_trunk_product(n, TRUNK)]
    shapes = {tensor.name: tensor.dims for tensor in measured.graph.initializer}
    found = Inputs(folder, {n.input[0]: shapes[n.input[1]][1] for n in products})
    if not products:
        return found
    del measured.graph.output[:]
    measured.graph.output.extend(map(helper.make_empty_tensor_value_info, found))
    replace_nodes(measured.graph, measured.graph.node)
    ordered = sorted(windows, key=len)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "graph.onnx"
        trace_graphs.save_sharing_weights({file: measured}, Path(scratch) / WEIGHTS)
        session = open_graph(file, CPU, SessionOptions(threads=0))
        inputs = [each.name for each in session.get_inputs()]
        for start in range(0, len(ordered), BATCH):
            packed = pack(ordered[start : start + BATCH])
            feeds = packed_feeds(packed, inputs) | pair_feeds(word_label_pairs(packed))
            # The positions of masks, which no product of the encoder reads.
            feeds["positions"] = np.zeros(1, np.int64)
            feeds = {name: value for name, value in feeds.items() if name in inputs}
            for name, rows in zip(found, session.run([*found], feeds), strict=True):
                found.add(name, rows)
    del session
    trim()
    return found
