"""The traced graphs: their names, what they are made of, and that they answer as PyTorch does."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import numpy_helper
from onnx.external_data_helper import uses_external_data

from export import trace_graphs
from export.cuda_emulator import emulated
from export.goldens import torch_outputs
from export.passes import fp16 as half
from export.passes import mask_free_attention, portable
from export.passes.graph_utils import WEIGHTS, check_model, read_tensor
from export.passes.portable import make_portable
from model.checkpoints.reader import load_model
from model.config import BertConfig
from model.families.modernbert import ModernBertConfig, rope_frequencies
from model.heads import EncoderWithHeads
from model.pooling import POOLINGS
from service.core.goldens import cosine
from service.core.manifest import Head
from tests.conftest import Traced
from tests.export.helpers import (
    SMALL,
    assert_same_as_torch,
    batch,
    copied,
    open_graph,
    run_graph,
    run_packed,
    run_portable,
    run_value,
)
from tests.model.helpers import perturb
from tests.tiny import HEADS

pytestmark = pytest.mark.slow

LENGTHS = {"one": [9], "equal": [6, 6, 6], "mixed": [1, 30, 2, 512, 7]}

# Values that a trace names so itself, graph inputs, and parts of our modules, in no order that sorting gives.
AWKWARD_HEADS = {
    "linear": Head(task="qa"),
    "embedding": Head(task="classification", labels=("a", "b", "c")),
    "gelu": Head(task="embedding", pooling="cls", dimensions=32),
    "add": Head(task="ner", labels=("O", "B-X", "I-X")),
    "encoder": Head(task="embedding", pooling="mean", dimensions=32),
}


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> EncoderWithHeads:
    return load_model(tiny_checkpoint)


@pytest.fixture(scope="module")
def awkward() -> EncoderWithHeads:
    """One layer, odd sizes, and heads named to collide with whatever they can."""
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=40,
        max_position_embeddings=512,
    )
    return perturb(EncoderWithHeads(config, AWKWARD_HEADS))


@pytest.fixture(scope="module")
def awkward_packed(awkward: EncoderWithHeads) -> onnx.ModelProto:
    return trace_graphs.export_packed(awkward)


@pytest.fixture(scope="module")
def pooled() -> EncoderWithHeads:
    """A head of each pooling, and one of several."""
    config = BertConfig(**{**SMALL, "max_position_embeddings": 512})
    modes = {name: Head(task="embedding", pooling=name, dimensions=32) for name in POOLINGS}
    several = Head(task="embedding", pooling=("max", "cls"), dimensions=64)
    return perturb(EncoderWithHeads(config, {**modes, "several": several}))


@pytest.fixture(scope="module")
def pooled_packed(pooled: EncoderWithHeads) -> onnx.ModelProto:
    return trace_graphs.export_packed(pooled)


def shapes(values: list) -> dict[str, list[str | int]]:
    return {value.name: value.shape for value in values}


def operators(proto: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in proto.graph.node]


class TestContract:
    def test_packed_inputs(self, traced):
        """The packed graph takes the packed arrays and the layout, by these names and shapes."""
        session = open_graph(traced.packed)
        expected = {
            "input_ids": ["T"],
            "token_type_ids": ["T"],
            "position_ids": ["T"],
            "lengths": ["B"],
            "unpack": ["B", "S"],
            "pack": ["T"],
        }
        assert expected == shapes(session.get_inputs())
        assert {"tensor(int64)"} == {value.type for value in session.get_inputs()}

    def test_portable_inputs(self, traced):
        """The portable graph takes what every runtime's users have: padded ids with their mask."""
        session = open_graph(traced.portable)
        names = ["input_ids", "attention_mask", "token_type_ids"]
        assert {name: ["B", "S"] for name in names} == shapes(session.get_inputs())

    def test_packed_outputs(self, traced):
        """Outputs are the heads, in their order; each has a row per sequence or per token."""
        expected = {
            "sentiment": ["B", 3],
            "topics": ["B", 4],
            "entities": ["T", 5],
            "answers": ["T", 2],
            "embeddings": ["B", 64],
        }
        found = shapes(open_graph(traced.packed).get_outputs())
        assert [*expected] == [*HEADS]
        assert [*expected.items()] == [*found.items()]

    def test_portable_outputs(self, traced):
        """The portable graph has the same outputs; those per token are padded."""
        found = shapes(open_graph(traced.portable).get_outputs())
        assert [*HEADS] == [*found]
        assert [["B", "S", 5], ["B", "S", 2]] == [found["entities"], found["answers"]]

    def test_packed_attention(self, traced):
        """Every layer's attention is one node of the runtime's own, and nothing else is."""
        foreign = [name for name in operators(traced.packed) if name[0] not in ("", "ai.onnx")]
        assert [("com.microsoft", "MultiHeadAttention")] * 2 == foreign

    def test_portable_operators(self, traced):
        """The portable graph holds operators of the ONNX standard alone."""
        assert {""} == {domain for domain, _ in operators(traced.portable)}
        assert [""] == [entry.domain for entry in traced.portable.opset_import]

    def test_opset(self, traced):
        """Both graphs have the opset that the manifest will state."""
        for proto in (traced.packed, traced.portable):
            assert trace_graphs.OPSET in [e.version for e in proto.opset_import if e.domain == ""]

    def test_no_traces_of_tracing(self, traced):
        """A graph contains no paths and no code of the machine that traced it."""
        for proto in (traced.packed, traced.portable):
            text = str(proto.graph.node)
            assert "metadata_props" not in text
            assert "/" not in "".join(node.doc_string for node in proto.graph.node)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
class TestParity:
    def test_packed(self, lengths, tiny, traced):
        """The packed graph gives PyTorch's outputs, whatever lengths ride together."""
        packed = batch(lengths, tiny.config.vocab_size)
        assert_same_as_torch(tiny, run_packed(traced.packed, packed), packed)

    @pytest.mark.parametrize("padding", [0, 3], ids=["", "more padding than needed"])
    def test_portable(self, padding, lengths, tiny, traced):
        """So does the portable graph, however much padding its mask hides."""
        packed = batch([min(length, 500) for length in lengths], tiny.config.vocab_size)
        found = run_portable(traced.portable, tiny, packed, padding)
        assert_same_as_torch(tiny, found, packed)

    def test_awkward_heads(self, lengths, awkward, awkward_packed):
        """Heads named as the trace names its own values keep their names, order and numbers."""
        packed = batch(lengths, 50)
        assert_same_as_torch(awkward, run_packed(awkward_packed, packed), packed)


def test_awkward_portable(awkward):
    """The portable graph, too, bears heads that are named as its own values."""
    packed = batch([4, 9], 50)
    found = run_portable(make_portable(trace_graphs.trace_packed(awkward)), awkward, packed)
    assert_same_as_torch(awkward, found, packed)


@pytest.mark.parametrize(
    "name", sorted({*trace_graphs.PACKED_INPUTS, *trace_graphs.CUDA_INPUTS, *portable.INPUTS})
)
def test_head_named_as_an_input(name, awkward):
    """A head cannot bear an input's name; it is refused before anything is traced."""
    model = EncoderWithHeads(awkward.config, {name: Head(task="qa")})
    with pytest.raises(ValueError, match=f"{name}.*input"):
        trace_graphs.export_packed(model)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(1, 48, 3), (3, 64, 1)])
def test_other_shapes(layers, hidden, heads):
    """Any shape of encoder agrees with PyTorch, packed."""
    config = BertConfig(
        vocab_size=40,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=80,
        max_position_embeddings=64,
        layer_norm_eps=1e-5,
    )
    model = perturb(
        EncoderWithHeads(config, {"entities": HEADS["entities"], "sentiment": HEADS["sentiment"]})
    )
    packed = batch([3, 64, 17], 40)
    assert_same_as_torch(model, run_packed(trace_graphs.export_packed(model), packed), packed)


def test_rotations_far_from_the_beginning():
    """Are PyTorch's to the last bit: sharp attention makes much of a little."""
    config = ModernBertConfig(
        vocab_size=50,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=40,
        max_position_embeddings=8192,
        pad_token_id=0,
        global_rope_theta=10_000.0,
    )
    proto = trace_graphs.export_packed(EncoderWithHeads(config, {"answers": Head(task="qa")}))
    (angles,) = (node.input[0] for node in proto.graph.node if node.op_type == "Cos")

    packed = batch([8192], 50)
    found = run_value(proto, angles, packed)

    speeds = rope_frequencies(64, 10_000.0).numpy()
    expected = packed.position_ids[:, None].astype(np.float32) * speeds
    np.testing.assert_array_equal(found.squeeze(), expected)


@pytest.fixture(scope="module")
def saved(traced: Traced, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both graphs next to their weight file."""
    folder = tmp_path_factory.mktemp("saved")
    graphs = {
        folder / name: copied(proto)
        for name, proto in (("a.onnx", traced.packed), ("b.onnx", traced.portable))
    }
    trace_graphs.save_sharing_weights(graphs, folder / WEIGHTS)
    return folder


def external(saved: Path) -> dict[str, set[tuple[int, int]]]:
    """The offset and length of each graph's large tensors in the weight file."""
    places: dict[str, set[tuple[int, int]]] = {}
    for name in ("a.onnx", "b.onnx"):
        proto = onnx.load(saved / name, load_external_data=False)
        told = [
            {entry.key: entry.value for entry in tensor.external_data}
            for tensor in proto.graph.initializer
            if uses_external_data(tensor)
        ]
        assert {WEIGHTS} == {entry["location"] for entry in told}
        places[name] = {(int(entry["offset"]), int(entry["length"])) for entry in told}
    return places


class TestSharedWeights:
    def test_every_weight_stands_once(self, saved, traced):
        """The file holds each large weight of either graph once, and nothing that a graph has besides."""
        content = (saved / WEIGHTS).read_bytes()
        places = set.union(*external(saved).values())
        pieces = [content[offset : offset + length] for offset, length in places]
        tensors = [*traced.packed.graph.initializer, *traced.portable.graph.initializer]
        weights = [t for t in tensors if not t.name.startswith(mask_free_attention.PREFIX)]
        large = {numpy_helper.to_array(tensor).tobytes() for tensor in weights}
        large = {raw for raw in large if len(raw) >= trace_graphs.SMALL}
        assert len(pieces) == len(set(pieces))
        assert large == set(pieces)
        assert len(content) < sum(map(len, pieces)) + trace_graphs.ALIGNMENT * len(pieces)

    def test_both_graphs_use_the_same_weights(self, saved):
        """The model's matrices are in both graphs, at one place each."""
        places = external(saved)
        total = sum(length for _, length in places["a.onnx"] | places["b.onnx"])
        shared = sum(length for _, length in places["a.onnx"] & places["b.onnx"])
        assert shared > 0.9 * total

    def test_weights_begin_at_pages(self, saved):
        """Tensors begin at page boundaries, so that a runtime may map the file."""
        starts = [offset for offset, _ in set.union(*external(saved).values())]
        assert [0] * len(starts) == [start % trace_graphs.ALIGNMENT for start in starts]

    def test_saved_graph_answers_the_same(self, saved, tiny, traced):
        """The place of the weights does not change the graph's results."""
        from service.core.session import ort

        session = ort.InferenceSession(saved / "b.onnx", providers=["CPUExecutionProvider"])
        ids = np.arange(12).reshape(2, 6)
        feeds = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
        expected = run_graph(traced.portable, feeds)
        for name, value in zip(expected, session.run([*expected], feeds), strict=True):
            np.testing.assert_array_equal(value, expected[name])


class TestPooling:
    @pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
    def test_packed(self, pooled, pooled_packed, lengths):
        """Each pooling of the packed graph is PyTorch's."""
        packed = batch(lengths, vocab_size=50)
        assert_same_as_torch(pooled, run_packed(pooled_packed, packed), packed)

    def test_portable(self, pooled):
        """Each pooling of the portable graph is PyTorch's, with more padding than needed, too."""
        proto = make_portable(trace_graphs.trace_packed(pooled))
        assert {""} == {domain for domain, _ in operators(proto)}
        for padding in (0, 5):
            packed = batch([1, 30, 2, 7], vocab_size=50)
            assert_same_as_torch(pooled, run_portable(proto, pooled, packed, padding), packed)

    def test_cuda(self, pooled, tmp_path):
        """Each pooling of the fp16 graph for CUDA is PyTorch's but for the rounding of fp16."""
        packed = batch([1, 30, 2, 7], vocab_size=50)
        onnx.save(trace_graphs.export_cuda(half.halved(pooled)), tmp_path / "fp16.onnx")
        found = emulated(tmp_path / "fp16.onnx")(packed)
        for name, expected in torch_outputs(pooled, packed).items():
            assert cosine(found[name], expected) > 0.9999, name


def test_large_weights_outside_the_graph(tmp_path):
    """The graph has their places, from which passes read them."""
    arrays = {"large": np.random.rand(200, 100), "small": np.arange(3)}
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = onnx.helper.make_graph([], "graph", [], [], tensors)
    model = onnx_ir.from_proto(onnx.helper.make_model(graph))
    trace_graphs.move_weights(model, tmp_path / "weights")
    proto = onnx_ir.to_proto(model)
    assert proto.ByteSize() < 4000
    check_model(proto)
    for tensor in proto.graph.initializer:
        np.testing.assert_array_equal(arrays[tensor.name], read_tensor(tensor))
