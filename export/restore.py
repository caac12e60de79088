"""Restore a checkpoint from the int8 graph of a bundle: `python -m export.restore BUNDLE SETTINGS OUT`.

Training can go on from this checkpoint if nobody kept the fp32 one. It has the graph's weights, which are rounded to 8
bits, and its outputs agree with the bundle's goldens as the graph's do. It reads models like quartet-mini only: a norm
before each product, and no biases in the encoder.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import Tokenizer

from export.goldens import join_golden, run_torch
from model import pretrain
from model.checkpoints import writer
from model.distill import DistillSettings
from model.heads import EncoderWithHeads
from model.run_settings import read_config
from service.core import bundle
from service.core.packing import golden_windows

ROUNDED, SCALE, FACTOR, NORM = ".int8", ".scale", ".factor", ".norm.weight"


def read_weights(graph: onnx.GraphProto, names: Sequence[str]) -> Mapping[str, NDArray[np.float32]]:
    """Return the weights of an int8 graph by their names in the model. Raises ValueError for a missing one.

    A norm's weight contains the factors that smooth the input of the next product, whose weights are divided by them.
    The embeddings' norm keeps its weight, and its factors are a tensor, because other nodes read its output too.
    names: of the model's tensors, in the order of its layers
    """
    arrays = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    found = {name.removeprefix("model."): array for name, array in arrays.items()}
    products = {node.input[1]: node.input[0] for node in graph.node if "MatMul" in node.op_type}
    for name in [name for name in arrays if name.endswith(ROUNDED)]:
        weight = name.removesuffix(ROUNDED)
        exact = arrays[name] * arrays[weight + SCALE]
        if name in products:
            factor = arrays.get(products[name].partition(".")[0] + FACTOR)
            exact = (exact if factor is None else exact * factor[:, None]).T
        found[weight.removeprefix("model.")] = exact
    norms = [name for name in names if name not in found]
    folded = {name for name in arrays if name.endswith(NORM)} - {f"model.{name}" for name in names}
    smoothed = [name for node in graph.node for name in node.input if name in folded]
    if len(norms) != len(smoothed):
        raise ValueError(f"the graph has {len(smoothed)} smoothed norms for {norms}")
    found |= {name: arrays[own] for name, own in zip(norms, smoothed, strict=True)}
    return {name: found[name] for name in names}


def restore(folder: Path, settings: Path, out: Path) -> None:
    """Write the checkpoint of a bundle's int8 graph. Raises BundleError where its outputs differ from the goldens."""
    read = bundle.load(folder)
    manifest = read.manifest
    tokenizer = folder / manifest.vocabulary.file
    values = DistillSettings(**read_config(settings))
    _, shape = pretrain.read_shape(values, Tokenizer.from_file(str(tokenizer)))
    model = EncoderWithHeads(shape, manifest.heads)
    graph = next((each for each in manifest.graphs if each.precision == "int8"), None)
    if graph is None:
        raise ValueError(f"{folder} has no int8 graph; an fp32 one comes from a checkpoint")
    state = read_weights(onnx.load(folder / graph.file).graph, [*model.state_dict()])
    for name, tensor in model.state_dict().items():
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"{settings}: {name} of the graph is of another shape than {[*tensor.shape]}"
            )
        tensor.copy_(torch.tensor(state[name]))
    windows = golden_windows(read.golden)
    outputs = join_golden(windows, run_torch(model, windows)).outputs
    tolerance = manifest.goldens.tolerance["int8"]
    bundle.check_goldens(read, "int8", tolerance, outputs, manifest.provenance.runtime)
    with writer.replacing(out) as partial:
        writer.save_joint(partial, model, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m export.restore", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("settings", type=Path, help="of the run that made the encoder: its shape")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    try:
        restore(given.bundle, given.settings, given.out)
    except (OSError, ValueError, bundle.BundleError) as error:
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()
