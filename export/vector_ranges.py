"""The ranges of quantized vectors: the smallest and the largest number of each dimension over calibration texts.

int8 and uint8 vectors divide each range into 256 steps (`service.core.decode.quantize`).

n texts, D dimensions
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export import verify
from service.core import decode
from service.core.bundle import Bundle
from service.core.cpu import CPU
from service.core.encode import Encoder
from service.core.manifest import PROMPT_NAMES, Head, Ranges

FEWEST = 2  # texts; with one, every range is empty
PART = 1000  # texts whose vectors are in memory at once


def add_ranges(
    draft: Bundle, encoder: Encoder, file: Path | None, show: Callable[[str], None]
) -> Bundle:
    """Return the bundle with the ranges of its embedding heads. The embedding space becomes another one.

    file: with a text per line; None changes nothing, as for a bundle without embedding heads
    Raises OSError for a file that cannot be read, and ValueError for one with less than two texts.
    """
    if file is None:
        return draft
    from export import calibration  # which imports torch

    texts = calibration.read_texts(file)
    if len(texts) < FEWEST:
        raise ValueError(
            f"--calibrate: {file} has {len(texts)} texts, at least {FEWEST} are needed"
        )
    manifest = draft.manifest
    if all(head.task != "embedding" for head in manifest.heads.values()):
        return draft
    graph = manifest.graphs_for(CPU, manifest.default_precision)[0]
    run, heads, ranges = verify.graph_runner(draft, graph, threads=0), dict(manifest.heads), {}
    for name, head in heads.items():
        if head.task == "embedding":
            ranges[name] = measure_ranges(run, encoder, name, head, texts)
            fields = {**head.model_dump(), "quantization_ranges": ranges[name]}
            heads[name] = Head.model_validate(fields)
            sizes = ", ".join(map(str, ranges[name]))
            show(f"{name}: ranges of {len(texts)} texts, for int8 vectors of {sizes} dimensions")
    space = f"{manifest.embedding_space}{json.dumps(ranges)}"
    fields = {
        **manifest.model_dump(),
        "heads": {name: head.model_dump() for name, head in heads.items()},
        "embedding_space": hashlib.sha256(space.encode()).hexdigest()[:16],
    }
    return replace(draft, manifest=type(manifest).model_validate(fields))


def measure_ranges(
    run: verify.RunGraph, encoder: Encoder, name: str, head: Head, texts: Sequence[str]
) -> dict[int, Ranges]:
    """Return the ranges of a head's vectors by their number of dimensions: all, and those that it was trained for.

    The texts are encoded with each prompt that a request gets without a prompt of its own.
    """
    sizes = sorted({*head.matryoshka_dimensions, head.dimensions or 0})
    low, high = (
        {size: np.full(size, sign * np.inf, np.float32) for size in sizes} for sign in (1, -1)
    )
    for prompt in _prompts(head):
        for start in range(0, len(texts), PART):
            for output in _outputs(run, encoder, name, prompt, texts[start : start + PART]):
                for size in sizes:
                    vector = decode.embed([output], [1], normalize=head.normalize, dimensions=size)
                    low[size] = np.minimum(low[size], vector)
                    high[size] = np.maximum(high[size], vector)
    return {size: (_shortest(low[size]), _shortest(high[size])) for size in sizes}


def _prompts(head: Head) -> list[str]:
    """Return the texts of the default prompt, and of those for the head's input types, each once."""
    types = PROMPT_NAMES if head.input_type is None else (head.input_type,)
    return [
        *dict.fromkeys([head.default_prompt_text, *(head.named_prompts[name] for name in types)])
    ]


def _outputs(
    run: verify.RunGraph, encoder: Encoder, name: str, prompt: str, texts: Sequence[str]
) -> list[NDArray[np.float32]]:
    from model.evaluate import run_sorted  # which imports torch and scikit-learn

    encoded = encoder.texts([prompt + text for text in texts])
    return [output[name] for output in run_sorted(run, [item.windows[0] for item in encoded])]


def _shortest(numbers: NDArray[np.float32]) -> tuple[float, ...]:
    """Return float32 numbers as the shortest decimals that are read back as the same float32."""
    return tuple(float(str(number)) for number in numbers)
