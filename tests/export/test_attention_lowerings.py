"""The graphs of attention compute its definition, for every mask and any heads, and a new family needs one file."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from export import cuda_emulator, trace_graphs
from export.passes.first_token_only import narrow
from export.passes.graph_utils import attribute
from export.passes.mask_free_attention import drop_masks
from export.passes.portable import make_portable
from export.passes.quantize import quantize
from export.passes.three_products import split_products
from model.attention import Mask, PackedLayout, ScaledDotProductAttention, attention
from model.bert import Bert, Layer, SelfAttention
from model.checkpoints import writer
from model.checkpoints.reader import load_model
from model.config import BertConfig
from model.families.bert_names import BERT
from model.families.registry import FAMILIES
from model.heads import EncoderWithHeads
from service.core.manifest import Head
from tests.export.helpers import (
    SMALL,
    Arrays,
    assert_close,
    assert_same_as_torch,
    batch,
    copied,
    run_packed,
    run_portable,
)
from tests.model.helpers import Heads, by_definition, perturb

pytestmark = pytest.mark.slow

PACKED = batch([1, 9, 2, 16, 7], 50)
MASKS = {
    "full": Mask(),
    "window": Mask(reach=3),
    "causal": Mask(causal=True),
    "causal_window": Mask(causal=True, reach=3),
}
WIDTH = 32
SIZES = {
    "equal": Heads(4, 4, 8),
    "equal_free": Heads(4, 4, 6),
    "grouped": Heads(4, 2, 8),
    "grouped_free": Heads(4, 1, 12),
}
CASES = {
    f"{mask}.{sizes}": (MASKS[mask], SIZES[sizes], sizes == "grouped")
    for mask in MASKS
    for sizes in SIZES
}


class Attentions(nn.Module):
    """An output for each case: the attention of projections of the tokens' embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.described = {case: Head(task="ner", labels=("O",)) for case in CASES}
        self.words = nn.Embedding(50, WIDTH)
        self.qkv = nn.ModuleList(
            nn.Linear(WIDTH, sum(heads.widths)) for _, heads, _ in CASES.values()
        )

    def projections(self, ids: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for qkv, (_, heads, _) in zip(self.qkv, CASES.values(), strict=True):
            yield qkv(self.words(ids)).split(heads.widths, dim=-1)

    def forward(
        self,
        ids: Tensor,
        types: Tensor,
        places: Tensor,
        layout: PackedLayout,
        positions: None,
        of: None = None,
    ) -> dict[str, Tensor]:
        columns = torch.arange(layout.unpack.shape[1])
        bias = far_from(columns)
        return {
            case: attention(q, k, v, layout, *heads[:2], mask, bias if biased else None)
            for (q, k, v), (case, (mask, heads, biased)) in zip(
                self.projections(ids), CASES.items(), strict=True
            )
        }


def far_from(columns: Tensor) -> Tensor:
    """A bias that differs for each pair of tokens, `[1, 1, S, S]`."""
    return torch.sin(columns[None, :] - 0.3 * columns[:, None])[None, None]


@pytest.fixture(scope="module")
def attentions() -> Attentions:
    torch.manual_seed(0)
    return Attentions()


@pytest.fixture(scope="module")
def expected(attentions: Attentions) -> Arrays:
    lengths = PACKED.lengths.tolist()
    with torch.no_grad():
        every = [*attentions.projections(torch.as_tensor(PACKED.input_ids))]
    bias = far_from(torch.arange(max(lengths)))
    return {
        case: by_definition(*qkv, lengths, heads, mask, bias if biased else None).numpy()
        for qkv, (case, (mask, heads, biased)) in zip(every, CASES.items(), strict=True)
    }


@pytest.fixture(scope="module")
def trace(attentions: Attentions) -> onnx.ModelProto:
    return trace_graphs.trace_packed(attentions)


@pytest.mark.parametrize("dropped", [0, 1], ids=["key lengths", "mask-free"])
def test_packed(trace, expected, dropped):
    """ONNX Runtime's operator; a full mask on equal heads, of the first such size, needs no key lengths."""
    proto = copied(trace)
    if dropped:
        drop_masks(proto)
    nodes = [node for node in proto.graph.node if node.op_type == "MultiHeadAttention"]
    assert len(CASES) == len(nodes)
    assert sum(attribute(node, "unidirectional") for node in nodes) == len(CASES) / 2
    assert dropped == sum(len(node.input) == 3 for node in nodes)
    assert_close(expected, run_packed(proto, PACKED))


@pytest.mark.parametrize("padding", [0, 3])
def test_portable(trace, attentions, expected, padding):
    """Standard operators."""
    assert_close(expected, run_portable(make_portable(trace), attentions, PACKED, padding))


def test_cuda(attentions, expected, tmp_path):
    """CUDA's operator, emulated, with one product and with three for queries, keys and values."""
    one = trace_graphs.export_cuda(attentions)
    three = copied(one)
    split_products(three)
    for proto in (one, three):
        onnx.save(proto, tmp_path / "graph.onnx")
        assert_close(expected, cuda_emulator.emulated(tmp_path / "graph.onnx")(PACKED))


# -- a causal encoder with grouped heads of a free size, as a family of its own


@dataclass(frozen=True)
class ToyConfig(BertConfig):
    model_type: ClassVar[str] = "toy"

    num_key_value_heads: int = 2
    head_dim: int = 12

    @property
    def head_size(self) -> int:
        return self.head_dim

    @property
    def num_key_heads(self) -> int:
        return self.num_key_value_heads


class CausalAttention(SelfAttention):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.attend = ScaledDotProductAttention(config, Mask(causal=True))


class CausalLayer(Layer):
    make_attention = CausalAttention


class Toy(Bert):
    make_layer = CausalLayer


TOY = replace(BERT, config=ToyConfig, encoder=Toy, architecture="Toy")
HEADS = {
    "last": Head(task="embedding", pooling="lasttoken", dimensions=WIDTH),
    "first": Head(task="embedding", pooling="cls", dimensions=WIDTH),
    "entities": Head(task="ner", labels=("O", "B-X", "I-X")),
}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> EncoderWithHeads:
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    return perturb(EncoderWithHeads(ToyConfig(**SMALL), HEADS))


def test_toy_family(toy):
    """Its graphs give PyTorch's outputs, and int8 is close to them."""
    proto = trace_graphs.export_packed(toy)
    found = run_packed(proto, PACKED)
    assert_same_as_torch(toy, found, PACKED)
    assert_same_as_torch(toy, run_portable(make_portable(proto), toy, PACKED), PACKED)
    for name, value in run_packed(quantize(proto), PACKED).items():
        cosines = (value * found[name]).sum(-1) / np.linalg.norm(value, axis=-1)
        assert (cosines / np.linalg.norm(found[name], axis=-1)).min() > 0.95


def test_toy_is_causal(toy):
    """A token's vector does not depend on the tokens after it."""
    ids = torch.tensor([1, 2, 3, 4])
    vectors = []
    for last in (4, 5):
        layout = PackedLayout.of(batch([4], 50).layout)
        inputs = (torch.cat([ids[:3], torch.tensor([last])]), 0 * ids, torch.arange(4), layout)
        vectors.append(toy.encoder(*inputs))
    assert torch.equal(vectors[0][:3], vectors[1][:3])
    assert not torch.allclose(vectors[0][3], vectors[1][3])


def test_toy_first_tokens(toy):
    """First-token pruning does not shorten the queries of a causal attention."""
    model = perturb(EncoderWithHeads(toy.config, {"first": HEADS["first"]}))
    proto = trace_graphs.export_packed(model)
    narrow(proto)
    assert_same_as_torch(model, run_packed(proto, PACKED), PACKED)


def test_toy_checkpoint(toy, tiny_checkpoint, tmp_path):
    """Queries, keys and values are written apart, each with its width, and read again."""
    model = EncoderWithHeads(replace(toy.config, vocab_size=600), HEADS)
    writer.save_joint(tmp_path / "toy", model, tiny_checkpoint / "tokenizer.json")
    again = load_model(tmp_path / "toy")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
