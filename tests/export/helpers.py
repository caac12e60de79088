"""Running a graph as any client of ONNX Runtime would, and PyTorch on the same batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from export.goldens import torch_outputs
from model.heads import EncoderWithHeads
from service.core import packing
from service.core.packing import Packed
from service.core.session import ort

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}  # PyTorch and ONNX Runtime sum in different orders

Arrays = dict[str, NDArray[Any]]

# The shape of an encoder that is traced in a second, in the words of any family's configuration.
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def batch(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> Packed:
    """A packed batch of random ids and segments."""
    rng = np.random.default_rng(seed)
    layout = packing.make_layout(lengths)
    ids = rng.integers(vocab_size, size=sum(lengths))
    return Packed(ids, rng.integers(2, size=sum(lengths)), packing.positions(layout), layout)


def open_graph(proto: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def run_graph(proto: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Every output by name."""
    session = open_graph(proto)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def copied(proto: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(proto.SerializeToString())


def run_value(proto: onnx.ModelProto, name: str, packed: Packed) -> NDArray[Any]:
    """What a value within a packed graph is for this batch."""
    looking = copied(proto)
    looking.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    return run_packed(looking, packed)[name]


def run_packed(proto: onnx.ModelProto, packed: Packed) -> Arrays:
    layout = packed.layout
    return run_graph(
        proto,
        {
            "input_ids": packed.input_ids,
            "token_type_ids": packed.token_type_ids,
            "position_ids": packed.position_ids,
            "lengths": layout.lengths,
            "unpack": layout.unpack,
            "pack": layout.pack,
        },
    )


def padded_feeds(packed: Packed, padding: int = 0) -> Arrays:
    """The same batch as a `[B, S]` rectangle, with this many columns more than it needs; padding has id 0."""
    shape = len(packed.lengths), packed.layout.longest + padding
    mask = np.arange(shape[1]) < packed.lengths[:, None]
    feeds = {"attention_mask": mask.astype(np.int64)}
    for name in ("input_ids", "token_type_ids"):
        feeds[name] = np.zeros(shape, dtype=np.int64)
        feeds[name][mask] = getattr(packed, name)
    return feeds


def run_portable(
    proto: onnx.ModelProto, model: EncoderWithHeads, packed: Packed, padding: int = 0
) -> Arrays:
    """The portable graph's outputs, those per token packed again."""
    feeds = padded_feeds(packed, padding)
    real = feeds["attention_mask"].astype(bool)
    outputs = run_graph(proto, feeds)
    return {
        name: value[real] if model.described[name].per_token else value
        for name, value in outputs.items()
    }


def assert_close(expected: Arrays, found: Arrays) -> None:
    """The same outputs in the same order, and the same numbers but for rounding."""
    assert [*expected] == [*found]
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, **TOLERANCE, err_msg=name)


def assert_same_as_torch(model: EncoderWithHeads, found: Arrays, packed: Packed) -> None:
    assert_close(torch_outputs(model, packed), found)
