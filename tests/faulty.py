"""The tiny bundle with a fault built into its graph, for tests of what a service makes of it.

The faults of an input show in texts that hold one word, which no golden does: the bundle opens as any other.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import tokenizers
from onnx import TensorProto, helper, numpy_helper

from service.core.bundle import describe_file
from tests.json_files import editing
from tests.samples import OUTLIER

WORD = OUTLIER
GRAPH = "fp32.onnx"
EMBEDDING = "embedding"  # the graph's value that holds each token's word vector, [T, H]
LARGE = 24 * 1024 * 1024  # floats: more than a C library keeps for the next time

Fault = Callable[
    [], list[onnx.NodeProto]
]  # nodes that make `fault` ([1] or [T, 1]) of `input_ids` and `bad` ([T])


def constant(name: str, value: object, kind: type = np.int64) -> onnx.NodeProto:
    tensor = numpy_helper.from_array(np.array(value, kind), name)
    return helper.make_node("Constant", [], [name], value=tensor)


def not_a_number() -> list[onnx.NodeProto]:
    """Each text that holds the word gets no numbers; its neighbours do."""
    return [
        constant("nothing", 0, np.float32),
        constant("nan", np.nan, np.float32),
        constant("last", [-1]),
        helper.make_node("Where", ["bad", "nan", "nothing"], ["each"]),
        helper.make_node("Unsqueeze", ["each", "last"], ["fault"]),
    ]


def any_bad(factor: int) -> list[onnx.NodeProto]:
    """`found`: the factor when the batch holds the word, and else 0."""
    return [
        constant("factor", factor),
        helper.make_node("Cast", ["bad"], ["numbers"], to=TensorProto.INT64),
        helper.make_node("ReduceMax", ["numbers"], ["highest"], keepdims=0),
        helper.make_node("Mul", ["highest", "factor"], ["found"]),
    ]


def failure() -> list[onnx.NodeProto]:
    """A batch that holds the word cannot be computed."""
    return [
        *any_bad(7),
        constant("nothing", [0], np.float32),
        helper.make_node("Gather", ["nothing", "found"], ["fault"]),
    ]


def endless_loop() -> list[onnx.NodeProto]:
    """A batch that holds the word is never done."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["goes_on"]),
            helper.make_node("Identity", ["value"], ["same"]),
        ],
        "forever",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, []),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("same", TensorProto.FLOAT, []),
        ],
    )
    return [
        *any_bad(2**62),
        constant("nothing", 0, np.float32),
        constant("true", True, np.bool_),
        helper.make_node("Loop", ["found", "true", "nothing"], ["fault"], body=body),
    ]


def endless_operator() -> list[onnx.NodeProto]:
    """A single operator compares 400,000 boxes with each other, which takes minutes in the opening of the session."""
    limits = {"first": 0.0, "end": 400_000.0, "step": 1.0, "half": 0.5, "most_overlap": 0.9}
    return [
        *(constant(name, value, np.float32) for name, value in limits.items()),
        *(constant("most", [400_000]), constant("axes", [0, 2]), constant("flat", [0, 1])),
        constant("no_word", 0, np.float32),
        helper.make_node("Range", ["first", "end", "step"], ["starts"]),
        helper.make_node("Add", ["starts", "half"], ["ends"]),
        helper.make_node("Unsqueeze", ["starts", "axes"], ["low"]),
        helper.make_node("Unsqueeze", ["ends", "axes"], ["high"]),
        helper.make_node("Concat", ["low", "low", "high", "high"], ["boxes"], axis=2),
        helper.make_node("Unsqueeze", ["starts", "flat"], ["scores"]),
        helper.make_node(
            "NonMaxSuppression", ["boxes", "scores", "most", "most_overlap"], ["chosen"]
        ),
        helper.make_node("Cast", ["chosen"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["numbers"], ["number"], keepdims=0),
        helper.make_node("Mul", ["number", "no_word"], ["fault"]),
    ]


def greed() -> list[onnx.NodeProto]:
    """Each batch needs a hundred megabytes, and fails if they are not available."""
    return [
        constant("large", [LARGE]),
        constant("zero", 0),
        helper.make_node(
            "Shape", ["input_ids"], ["tokens"]
        ),  # or it would all be computed once, at the start
        helper.make_node("Mul", ["tokens", "zero"], ["none"]),
        helper.make_node("Add", ["none", "large"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["much"]),
        helper.make_node("ReduceMax", ["much"], ["fault"], keepdims=0),
    ]


def with_fault(bundle: Path, path: Path, fault: Fault) -> Path:
    """A copy of the tiny bundle whose fp32 graph has the fault."""
    shutil.copytree(bundle, path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    model = onnx.load(path / GRAPH, load_external_data=False)
    (vectors,) = (node for node in model.graph.node if EMBEDDING in node.output)
    vectors.output[0] = "sound"
    added = [
        constant("word", tokenizer.token_to_id(WORD)),
        helper.make_node("Equal", ["input_ids", "word"], ["bad"]),
        *fault(),
        helper.make_node("Add", ["sound", "fault"], [EMBEDDING]),
    ]
    where = 1 + [*model.graph.node].index(vectors)
    nodes = [*model.graph.node[:where], *added, *model.graph.node[where:]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path / GRAPH)
    with editing(path / "manifest.json") as manifest:
        (described,) = (graph for graph in manifest["graphs"] if graph["file"] == GRAPH)
        described |= describe_file(path / GRAPH)
    return path
