"""Calibration of int8 graphs: the inputs of an encoder's matrix products for some text.

Without a file of texts, one half of the text is random entries of the vocabulary, and the other half is sentences with
random words: each half alone made the rounding of weights worse. It is the same for equal tokenizers, so that equal
checkpoints make equal bundles.

T tokens, K inputs of a product
"""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import tokenizers
from numpy.typing import NDArray
from onnx import helper

from export import trace_graphs
from export.passes.fold import fold
from export.passes.graph_utils import TRUNK, is_trunk_product, replace_nodes
from service.core.cpu import CPU
from service.core.encode import Encoder, Window
from service.core.packing import pack
from service.core.session import SessionOptions, open_graph, packed_feeds, trim

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


def choose_windows(encoder: Encoder, texts: Sequence[str] = ()) -> list[Window]:
    """Return at least 8,192 tokens for calibration: of the texts from the first on, then of made ones."""
    short = Encoder(encoder.tokenizer, min(encoder.max_length, LONGEST))
    chosen: list[Window] = []
    tokens = 0
    for text in itertools.chain(texts, _made_texts(encoder.tokenizer)):
        (item,) = short.texts([text])
        chosen.append(item.windows[0])
        tokens += len(item.windows[0])
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


def measure_inputs(model: onnx.ModelProto, windows: Sequence[Window]) -> dict[str, Floats]:
    """Return the inputs [T, K] of the encoder's matrix products in a packed fp32 graph, by name."""
    measured = onnx.ModelProto()
    measured.CopyFrom(model)
    fold(measured)
    names = sorted({n.input[0] for n in measured.graph.node if is_trunk_product(n, TRUNK)})
    del measured.graph.output[:]
    measured.graph.output.extend(map(helper.make_empty_tensor_value_info, names))
    replace_nodes(measured.graph, measured.graph.node)
    ordered = sorted(windows, key=len)
    tokens = sum(map(len, ordered))
    found: dict[str, Floats] = {}
    end = 0
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "graph.onnx"
        trace_graphs.save_sharing_weights({file: measured}, Path(scratch) / trace_graphs.WEIGHTS)
        session = open_graph(file, CPU, SessionOptions(threads=0))
        inputs = [each.name for each in session.get_inputs()]
        for start in range(0, len(ordered), BATCH):
            feeds = packed_feeds(pack(ordered[start : start + BATCH]), inputs)
            # The positions of masks, which no product of the encoder reads.
            feeds["positions"] = np.zeros(1, np.int64)
            feeds = {name: value for name, value in feeds.items() if name in inputs}
            begin, end = end, end + len(feeds["input_ids"])
            for name, rows in zip(names, session.run(names, feeds), strict=True):
                if name not in found:
                    found[name] = np.empty((tokens, rows.shape[1]), rows.dtype)
                found[name][begin:end] = rows
    del session
    trim()
    return found
