"""Every lowering of attention computes its definition, for every mask and any heads, and keeps sequences apart."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.attention import Mask, PackedLayout, ScaledDotProductAttention, attention
from service.core import packing
from tests.model.helpers import LENGTHS, TOLERANCE, Heads, by_definition, shape

HEADS = 4
EQUAL = Heads(HEADS, HEADS, 6)
HALF = {"rtol": 0.02, "atol": 0.02}
MASKS = {
    "full": Mask(),
    "window": Mask(reach=2),
    "causal": Mask(causal=True),
    "causal window": Mask(causal=True, reach=2),
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
any_heads = pytest.mark.parametrize(
    "heads", [EQUAL, Heads(4, 2, 6), Heads(4, 1, 10)], ids=["equal", "grouped", "one of keys"]
)
Parts = tuple[Tensor, Tensor, Tensor]


def draw(lengths: list[int], seed: int = 0, heads: Heads = EQUAL) -> tuple[Parts, PackedLayout]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), width, generator=generator) for width in heads.widths)
    return (q, k, v), PackedLayout.of(packing.make_layout(lengths))


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_packed_is_the_definition(lengths, seed):
    """Packed attention is softmax attention within each sequence, for any lengths."""
    qkv, layout = draw(lengths, seed)

    context = attention(*qkv, layout, HEADS)

    torch.testing.assert_close(context, by_definition(*qkv, lengths, EQUAL), **TOLERANCE)


@every_mask
@any_heads
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
class TestLowerings:
    def test_fused(self, lengths, heads, mask):
        qkv, layout = draw(lengths, heads=heads)
        context = attention(*qkv, layout, *heads[:2], mask)
        expected = by_definition(*qkv, lengths, heads, mask)
        torch.testing.assert_close(context, expected, **TOLERANCE)

    def test_written_out(self, lengths, heads, mask):
        """In half precision, with and without gradients."""
        qkv, layout = draw(lengths, heads=heads)
        half = [part.bfloat16().requires_grad_() for part in qkv]
        expected = by_definition(*(part.detach().float() for part in half), lengths, heads, mask)
        context = attention(*half, layout, *heads[:2], mask)
        assert "SoftmaxBackward0" in graph_of(context)
        torch.testing.assert_close(context.float(), expected, **HALF)
        context.sum().backward()
        assert all(part.grad is not None and part.grad.isfinite().all() for part in half)

    def test_weights(self, lengths, heads, mask):
        """Attention weights sum to one, are zero on padding, and give attention's own context."""
        qkv, layout = draw(lengths, heads=heads)
        attend = ScaledDotProductAttention(shape(num_attention_heads=HEADS), mask)
        attend.num_key_heads = heads.keys

        weights = attend.weights(*qkv, layout)

        batch, longest = layout.unpack.shape
        assert weights.shape == (batch, HEADS, longest, longest)
        for row, length in enumerate(lengths):
            own = weights[row, :, :length]
            torch.testing.assert_close(own.sum(-1), torch.ones(own.shape[:-1]))
            assert not own[:, :, length:].any()
        value = qkv[2].index_select(0, layout.unpack.flatten())
        value = value.view(batch, longest, heads.keys, -1).transpose(1, 2)
        value = value.repeat_interleave(heads.queries // heads.keys, dim=1)
        context = (weights @ value).transpose(1, 2).reshape(batch * longest, -1)
        found = attend.eval()(*qkv, layout)
        torch.testing.assert_close(context.index_select(0, layout.pack), found, **TOLERANCE)

    def test_varlen(self, lengths, heads, mask, monkeypatch):
        """CUDA's kernel gets the boundaries, the window and the groups of heads."""
        from model import attention as module

        def kernel(*tensors, window_size, enable_gqa, scale):
            q, k, v, starts, ends, *longest = tensors
            assert torch.equal(starts, ends)
            assert longest == [max(lengths)] * 2
            assert enable_gqa == (heads.keys < heads.queries)
            before, after = (math.inf if size < 0 else size for size in window_size)
            flat = (part.flatten(1) for part in (q, k, v))
            own = by_definition(*flat, ends.diff().tolist(), heads, (before, after), scale=scale)
            return own.view_as(q)

        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
        qkv, layout = draw(lengths, heads=heads)
        x = module.Inputs(*qkv, layout, *heads[:2], mask, bias=None, scale=0.3, dropout=0.0)
        expected = by_definition(*qkv, lengths, heads, mask, scale=0.3)
        torch.testing.assert_close(module._varlen(x), expected, **TOLERANCE)


@every_mask
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("each", [False, True], ids=["one bias", "a bias each"])
def test_bias_and_scale(lengths, each, mask):
    """A bias for all sequences and heads, or for each, is added to the scores after they are scaled."""
    qkv, layout = draw(lengths)
    size = (len(lengths) if each else 1, HEADS if each else 1, max(lengths), max(lengths))
    bias = torch.randn(size, generator=torch.Generator().manual_seed(1))

    context = attention(*qkv, layout, HEADS, mask=mask, bias=bias, scale=0.3)

    expected = by_definition(*qkv, lengths, EQUAL, mask, bias, 0.3)
    torch.testing.assert_close(context, expected, **TOLERANCE)


def test_groups_are_whole():
    qkv, layout = draw([3])
    with pytest.raises(ValueError, match="4 heads are not a multiple of 3 heads of keys"):
        attention(*qkv, layout, HEADS, num_key_heads=3)


def test_full_layout_gathers_nothing():
    """Sequences of one length give the same without the gather that others need."""
    qkv, layout = draw([6, 6, 6])
    assert layout.full

    torch.testing.assert_close(
        attention(*qkv, layout, HEADS),
        attention(*qkv, replace(layout, full=False), HEADS),
        **TOLERANCE,
    )


def test_sequences_do_not_see_each_other():
    """Changing one sequence leaves the others exactly as they were."""
    lengths = [5, 9, 3]
    qkv, layout = draw(lengths)
    changed = [part.clone() for part in qkv]
    for part in changed:
        part[5:14] += 1

    before, after = (attention(*x, layout, HEADS).split(lengths) for x in (qkv, changed))

    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    assert not torch.allclose(after[1], before[1])


def graph_of(x: Tensor) -> set[str]:
    """The names of all operations that a tensor came from and that learn."""
    found, waiting = set(), [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.add(type(node).__name__)
            waiting += [previous for previous, _ in node.next_functions]
    return found


def test_dropout_written_out():
    """Dropout takes weights away there, too, and gives the others more: the mean stays."""
    qkv, layout = draw([8, 8])
    half = [(0.01 * part).bfloat16().requires_grad_() for part in qkv]

    torch.manual_seed(0)
    drawn = torch.stack([attention(*half, layout, HEADS, dropout=0.5) for _ in range(300)])

    assert len({tuple(context.flatten().tolist()) for context in drawn[:10]}) == 10
    expected = attention(*half, layout, HEADS).float()
    torch.testing.assert_close(drawn.float().mean(0), expected, rtol=0, atol=0.002)


@every_mask
def test_gradients(mask):
    """The gradients of packed attention equal the gradients of its definition."""
    lengths = [4, 1, 7]
    heads = Heads(4, 2, 6)
    qkv, layout = draw(lengths, heads=heads)
    ours, theirs = ([part.clone().requires_grad_() for part in qkv] for _ in range(2))
    contexts = (
        attention(*ours, layout, *heads[:2], mask),
        by_definition(*theirs, lengths, heads, mask),
    )
    weights = torch.randn(12, 24, generator=torch.Generator().manual_seed(1))
    for context in contexts:
        (context * weights).sum().backward()

    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, **TOLERANCE)


def test_dropout_drops_weights():
    """Dropout follows torch's seed, and changes what attention gives."""
    qkv, layout = draw([5, 3])

    def dropped(seed):
        torch.manual_seed(seed)
        return attention(*qkv, layout, HEADS, dropout=0.5)

    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))
    assert not torch.allclose(dropped(1), attention(*qkv, layout, HEADS))
