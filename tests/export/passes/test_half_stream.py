"""The fp16 residual stream: which norms compute in fp16 with their sums, and that the outputs stay right."""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto

from export import cuda_emulator, from_checkpoint, trace_graphs
from export.goldens import torch_outputs
from export.passes import fp16
from export.passes.graph_utils import attribute, producers
from export.passes.half_norm import skip_norm
from export.passes.half_stream import fitting_norms, fuse_norms
from model.config import BertConfig
from model.families.albert import AlbertConfig
from model.families.electra import ElectraConfig
from model.families.modernbert import ModernBertConfig
from model.families.mpnet import MPNetConfig
from model.families.nomic_bert import NomicBertConfig
from model.heads import EncoderWithHeads
from service.core.goldens import cosine
from service.core.manifest import Head
from service.core.packing import Packed
from tests.export.helpers import SMALL, batch, copied, open_graph
from tests.model.helpers import perturb

pytestmark = pytest.mark.slow

HEADS = {"vectors": Head(task="embedding", pooling="mean", dimensions=32)}
PACKED = batch([1, 30, 2, 56, 7], 50)
NORMS = 5  # two layers, embeddings
POST_NORM = {
    "bert": BertConfig(**SMALL),
    "shared layers, narrow embeddings": AlbertConfig(**SMALL, embedding_size=16),
    "narrow embeddings": ElectraConfig(**SMALL, embedding_size=16),
    "with a bias of scores": MPNetConfig(**SMALL),
    "with a gate and rotation": NomicBertConfig(**SMALL),
}
PRE_NORM = ModernBertConfig(**SMALL)


def make_model(config: BertConfig) -> EncoderWithHeads:
    return perturb(EncoderWithHeads(config, HEADS))


def trace(model: EncoderWithHeads) -> onnx.ModelProto:
    return trace_graphs.export_cuda(fp16.halved(model))


def fused(model: EncoderWithHeads) -> onnx.ModelProto:
    graph = trace(model)
    fuse_norms(graph, fitting_norms(model, PACKED))
    onnx.checker.check_model(graph)
    return graph


@cache
def post_norm(kind: str) -> tuple[EncoderWithHeads, onnx.ModelProto]:
    """A model and its graph, traced once."""
    model = make_model(POST_NORM[kind])
    return model, fused(model)


def count(graph: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in graph.graph.node)


def emulate(graph: onnx.ModelProto, folder: Path, packed: Packed = PACKED) -> np.ndarray:
    onnx.save(graph, folder / "fp16.onnx")
    return cuda_emulator.emulated(folder / "fp16.onnx")(packed)["vectors"]


def loss(model: EncoderWithHeads, outputs: np.ndarray, packed: Packed = PACKED) -> float:
    """One minus the cosine with PyTorch in fp32."""
    return 1 - cosine(torch_outputs(model, packed)["vectors"], outputs)


# -- post-norm layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", POST_NORM)
class TestPostNorm:
    def test_nodes(self, kind):
        """Each norm is one node with its sum, and between two norms no number is widened to fp32."""
        _, graph = post_norm(kind)
        found = count(graph)
        assert (NORMS, 0) == (found["SkipLayerNormalization"], found["LayerNormalization"])
        made = producers(graph.graph)
        for norm in (n for n in graph.graph.node if n.op_type == "SkipLayerNormalization"):
            for name in norm.input[:2]:
                casts = [made[name]] if made[name].op_type == "Cast" else []
                widened = [c for c in casts if attribute(c, "to") != TensorProto.FLOAT16]
                assert not widened, norm.output[0]

    def test_same_as_torch(self, kind, tmp_path):
        """The outputs differ from PyTorch's in fp32 by rounding."""
        model, graph = post_norm(kind)
        assert loss(model, emulate(graph, tmp_path)) < 2e-5

    def test_alone_and_in_a_batch(self, kind, tmp_path):
        """In the emulation, a text's output is bitwise the same in any batch."""
        _, graph = post_norm(kind)
        own = batch([30], 50)
        with_another = Packed(
            np.concatenate([own.input_ids, own.input_ids]),
            np.concatenate([own.token_type_ids, own.token_type_ids]),
            np.concatenate([own.position_ids, own.position_ids]),
            batch([30, 30], 50).layout,
        )
        together = emulate(graph, tmp_path, with_another)
        alone = emulate(graph, tmp_path, own)
        np.testing.assert_array_equal(together, np.concatenate([alone, alone]))


def test_product_is_the_first_input():
    """Only the first input takes the bias of a product."""
    _, graph = post_norm("bert")
    made = producers(graph.graph)
    norms = [n for n in graph.graph.node if n.op_type == "SkipLayerNormalization"]
    assert {"Gemm"} == {made[norm.input[0]].op_type for norm in norms[1:]}


def test_runtime_kernel(tmp_path):
    """ONNX Runtime's kernel for a CPU, which computes in fp32, gives the emulated node's output but for rounding."""
    rng = np.random.default_rng(0)
    x, skip = (rng.standard_normal((7, 48)).astype(np.float16) for _ in range(2))
    weights = [rng.standard_normal(48).astype(np.float16) for _ in range(3)]
    names = ["x", "skip", "scale", "shift", "bias"]
    shapes = [["T", 48], ["T", 48], [48], [48], [48]]
    node = onnx.helper.make_node(
        "SkipLayerNormalization", names, ["y"], domain="com.microsoft", epsilon=1e-5
    )
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "norm",
        [value(n, TensorProto.FLOAT16, s) for n, s in zip(names, shapes, strict=True)],
        [value("y", TensorProto.FLOAT16, ["T", 48])],
    )
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    feeds = dict(zip(names, [x, skip, *weights], strict=True))
    (expected,) = open_graph(model).run(None, feeds)
    onnx.save(model, tmp_path / "norm.onnx")
    (found,) = cuda_emulator.evaluator(tmp_path / "norm.onnx").run(None, feeds)
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=5e-3)


# -- norms that stay in fp32 ----------------------------------------------------------------------


def test_pre_norm_is_unchanged():
    """The sum that a pre-norm layer normalizes is also the residual stream, and stays in fp32."""
    model = make_model(PRE_NORM)
    before = trace(model)
    after = copied(before)
    every = {name for name, _ in model.encoder.named_modules(prefix="encoder")}
    fuse_norms(after, every)
    assert count(before) == count(after)
    assert "SkipLayerNormalization" not in count(after)


def large_channel(model: EncoderWithHeads) -> None:
    """Let a layer add 40,000 to a channel: its square does not fit."""
    model.encoder.layers[0].feed_forward.down.bias[3] = 40_000


def small_embeddings(model: EncoderWithHeads) -> None:
    """Let all embeddings be so small that their squares have no digits in fp16."""
    for table in (model.encoder.embeddings.word, model.encoder.embeddings.position):
        table.weight *= 1e-3
    model.encoder.embeddings.token_type.weight *= 1e-3


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (large_channel, "encoder.layers.0.feed_forward_norm"),
        (small_embeddings, "encoder.embeddings.norm"),
    ],
)
def test_norms_that_do_not_fit(change, name, tmp_path):
    """A norm that fp16 arithmetic would get wrong stays in fp32, alone, and the outputs are right."""
    model = make_model(POST_NORM["bert"])
    with torch.no_grad():
        change(model)
    norms = {
        norm
        for norm, module in model.encoder.named_modules(prefix="encoder")
        if isinstance(module, torch.nn.LayerNorm)
    }
    assert norms - {name} == fitting_norms(model, PACKED)
    graph = fused(model)
    assert (NORMS - 1, 1) == (
        count(graph)["SkipLayerNormalization"],
        count(graph)["LayerNormalization"],
    )
    assert loss(model, emulate(graph, tmp_path)) < 2e-5


def test_hooks_are_removed():
    """Measuring a model leaves it as it was."""
    model = make_model(POST_NORM["bert"])
    fitting_norms(model, PACKED)
    assert not any(module._forward_pre_hooks for module in model.modules())


# -- the kernel's arithmetic ----------------------------------------------------------------------


def test_norm_in_fp16():
    """The emulated kernel normalizes but for rounding, and returns the shift where a mean square passes 65,504."""
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    scale, shift = torch.full((96,), 2.0), torch.full((96,), -1.0)
    expected = F.layer_norm(x, (96,), scale, shift, 1e-5)
    found = skip_norm(x.half(), scale.half(), shift.half(), 1e-5)
    torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=5e-3)
    large = skip_norm(300 * x.half(), scale.half(), shift.half(), 1e-5)
    torch.testing.assert_close(large, shift.half().expand_as(large))


def test_pipeline_applies_it():
    """The pipeline's graph for CUDA has all three rewrites."""
    graph = from_checkpoint.trace_cuda(make_model(POST_NORM["bert"]), PACKED)
    found = count(graph)
    assert (NORMS, 0) == (found["SkipLayerNormalization"], found["Split"])
    assert 4 == sum(
        n.op_type == "SkipLayerNormalization" and len(n.input) == 5 for n in graph.graph.node
    )
