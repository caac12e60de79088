"""Heads on the last hidden states of an encoder: pooling and dense layers, computed with NumPy.

A head computes the rows of one text at a time, so its output cannot depend on the other texts of a batch.

n tokens of a text, H hidden, D outputs of a layer, C outputs of a head
"""

import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service.core.bundle import Bundle, BundleError
from service.core.manifest import Activation, Layers

Floats = NDArray[np.float32]
Dense = tuple[Floats, Floats]  # weight `[D, in]` and bias `[D]`

GELU = math.sqrt(2 / math.pi)


def gelu(x: Floats) -> Floats:
    """Return the approximation with tanh (Hendrycks and Gimpel 2016), because NumPy has no error function."""
    inner: Floats = x + np.float32(0.044715) * x**3
    factor: Floats = 1 + np.tanh(np.float32(GELU) * inner)
    return 0.5 * x * factor


ACTIVATIONS: Mapping[Activation, Callable[[Floats], Floats]] = {
    "none": lambda x: x,
    "tanh": np.tanh,
    "gelu": gelu,
}
POOLINGS: Mapping[str, Callable[[Floats], Floats]] = {
    "mean": lambda states: states.mean(axis=0),
    "cls": lambda states: states[0],
    "max": lambda states: states.max(axis=0),
}


@dataclass(frozen=True, slots=True)
class StateHead:
    """A head with its weights."""

    layers: Layers
    dense: Sequence[Dense]

    def __call__(self, states: Floats) -> Floats:
        """Return the head's output for the states of one text: `[n, H]` -> `[C]`, or `[n, C]` per token."""
        return self.compute(self.pool(states))

    def pool(self, states: Floats) -> Floats:
        """Return the input of the dense layers: the states themselves, or one row of pooled states."""
        if not self.layers.pooling:
            return states
        return np.concatenate([POOLINGS[mode](states) for mode in self.layers.pooling])

    def compute(self, x: Floats) -> Floats:
        """Return the output of the dense layers."""
        for (weight, bias), activation in zip(self.dense, self.layers.activations, strict=True):
            x = ACTIVATIONS[activation](x @ weight.T + bias)
        return x


def read_heads(bundle: Bundle, hidden_size: int) -> dict[str, StateHead]:
    """Read the heads of a bundle by name. Raises BundleError for weights that do not fit the states of `[n, H]`."""
    shared = bundle.manifest.encoder
    assert shared is not None, "our bug: this bundle has its own encoder"
    file = shared.weights.file
    try:
        with np.load(bundle.file(file), allow_pickle=False) as arrays:
            heads = {
                name: StateHead(
                    shared.layers[name],
                    [
                        (arrays[f"{name}.{i}.weight"], arrays[f"{name}.{i}.bias"])
                        for i in range(len(shared.layers[name].activations))
                    ],
                )
                for name in bundle.manifest.heads
            }
    except (KeyError, ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise BundleError(bundle.path, f"{file} cannot be read: {error}") from None
    for name, head in heads.items():
        width = hidden_size * max(len(head.layers.pooling), 1)
        for number, (weight, bias) in enumerate(head.dense):
            if weight.dtype != np.float32 or weight.shape != (len(bias), width):
                found = f"{weight.dtype} {weight.shape}"
                reason = f"{file}: {name}.{number}.weight is {found}, its rows should have {width} float32"
                raise BundleError(bundle.path, reason)
            width = len(bias)
        if width != bundle.manifest.heads[name].width:
            expected = bundle.manifest.heads[name].width
            raise BundleError(bundle.path, f"{file}: {name} gives {width} numbers, not {expected}")
    return heads


def save_heads(path: Path, heads: Mapping[str, StateHead]) -> None:
    """Write the weights of heads, which `read_heads` reads."""
    arrays = {
        f"{name}.{number}.{part}": value
        for name, head in heads.items()
        for number, dense in enumerate(head.dense)
        for part, value in zip(("weight", "bias"), dense, strict=True)
    }
    np.savez(path, **arrays)  # type: ignore[arg-type]


class StateOutputs(Mapping[str, Floats]):
    """The outputs of one window. Outputs of heads on its hidden states are computed when they are read.

    rows: the outputs of the graph, with the states
    heads: by the names of their outputs
    """

    def __init__(
        self, rows: Mapping[str, Floats], states: str, heads: Mapping[str, StateHead]
    ) -> None:
        self._rows = rows
        self._states = rows[states]
        self._heads = heads

    def __getitem__(self, name: str) -> Floats:
        return self._rows[name] if name in self._rows else self._heads[name](self._states)

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self._heads

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def output_name(bundle_id: str, head: str) -> str:
    """Return the name of the output of a head in another bundle; no head of the encoder has a slash."""
    return f"{bundle_id}/{head}"


def graph_outputs(names: Iterable[str], states: str) -> tuple[str, ...]:
    """Return the outputs of the graph that heads need: the states in place of outputs of other bundles."""
    return tuple({states if "/" in name else name for name in names})
