"""Every lowering of attention computes what the definition says, and keeps sequences apart."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.attention import PackedLayout, ScaledDotProductAttention, attention
from service.core import packing
from tests.model.helpers import LENGTHS, TOLERANCE

HEADS, HIDDEN = 4, 24


def draw(lengths: list[int], seed: int = 0) -> tuple[Tensor, PackedLayout]:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(sum(lengths), 3 * HIDDEN, generator=generator)
    return qkv, PackedLayout.of(packing.make_layout(lengths))


def by_definition(
    qkv: Tensor, lengths: list[int], bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(Q Kᵀ / √D + bias) V, one sequence and one head after the other."""
    scale = scale or 1 / math.sqrt(HIDDEN // HEADS)
    contexts = []
    for i, rows in enumerate(qkv.split(lengths)):
        parts = (part.chunk(HEADS, dim=1) for part in rows.chunk(3, dim=1))
        heads = []
        for n, (query, key, value) in enumerate(zip(*parts, strict=True)):
            scores = query @ key.T * scale
            if bias is not None:
                own = bias[i % len(bias), n % bias.shape[1]]
                scores = scores + own[: len(rows), : len(rows)]
            heads.append(torch.softmax(scores, -1) @ value)
        contexts.append(torch.cat(heads, 1))
    return torch.cat(contexts)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_packed_is_the_definition(lengths: list[int], seed: int) -> None:
    """Packed attention is softmax attention within each sequence, whatever their lengths."""
    qkv, layout = draw(lengths, seed)

    context = attention(qkv, HEADS, layout)

    torch.testing.assert_close(context, by_definition(qkv, lengths), **TOLERANCE)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("each", [False, True], ids=["one scale", "each its own"])
def test_bias_and_scale(lengths: list[int], each: bool) -> None:
    """A bias for all sequences and heads, or for each, is added to scores that were scaled as told."""
    qkv, layout = draw(lengths)
    shape = (len(lengths) if each else 1, HEADS if each else 1, max(lengths), max(lengths))
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = by_definition(qkv, lengths, bias, 0.3)

    torch.testing.assert_close(
        attention(qkv, HEADS, layout, bias=bias, scale=0.3), expected, **TOLERANCE
    )


def test_full_layout_gathers_nothing() -> None:
    """Sequences of one length give the same without the gather that others need."""
    qkv, layout = draw([6, 6, 6])
    assert layout.full

    torch.testing.assert_close(
        attention(qkv, HEADS, layout),
        attention(qkv, HEADS, replace(layout, full=False)),
        **TOLERANCE,
    )


def test_sequences_do_not_see_each_other() -> None:
    """Changing one sequence leaves the others exactly as they were."""
    lengths = [5, 9, 3]
    qkv, layout = draw(lengths)
    changed = qkv.clone()
    changed[5:14] += 1

    before, after = (attention(x, HEADS, layout).split(lengths) for x in (qkv, changed))

    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    assert not torch.allclose(after[1], before[1])


@pytest.mark.parametrize("lengths", [[4, 1, 7], [6, 6, 6]], ids=["uneven", "full"])
@pytest.mark.parametrize("biased", [False, True], ids=["without bias", "with bias"])
def test_written_out_is_the_same(lengths: list[int], biased: bool) -> None:
    """Where a CPU trains in half precision attention is written out: to the precision of bfloat16 it is the same."""
    qkv, layout = draw(lengths)
    longest = max(lengths)
    bias = torch.randn(1, HEADS, longest, longest) if biased else None
    half = qkv.bfloat16().requires_grad_()

    context = attention(half, HEADS, layout, bias=bias)
    with torch.no_grad():
        fused = attention(half, HEADS, layout, bias=bias)

    rounded = half.detach().float()
    expected = by_definition(rounded, lengths, None if bias is None else bias.bfloat16().float())
    torch.testing.assert_close(context.float(), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(context, fused, rtol=0.02, atol=0.02)
    assert "Softmax" in str(graph_of(context))
    context.sum().backward()
    assert half.grad is not None
    assert half.grad.isfinite().all()


def graph_of(x: Tensor) -> set[str]:
    """The names of all operations that a tensor came from and that learn."""
    found, waiting = set(), [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.add(type(node).__name__)
            waiting += [previous for previous, _ in node.next_functions]
    return found


def test_dropout_written_out() -> None:
    """Dropout takes weights away there, too, and gives the others more: the mean stays."""
    qkv, layout = draw([8, 8])
    half = (0.01 * qkv).bfloat16().requires_grad_()

    torch.manual_seed(0)
    drawn = torch.stack([attention(half, HEADS, layout, dropout=0.5) for _ in range(300)])

    assert len({tuple(context.flatten().tolist()) for context in drawn[:10]}) == 10
    expected = attention(half, HEADS, layout).float()
    torch.testing.assert_close(drawn.float().mean(0), expected, rtol=0, atol=0.002)


def test_gradients() -> None:
    """The gradients of packed attention equal the gradients of its definition."""
    lengths = [4, 1, 7]
    qkv, layout = draw(lengths)
    weights = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(1))

    def gradient(context: Tensor, leaf: Tensor) -> Tensor:
        (context * weights).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    ours, theirs = (qkv.clone().requires_grad_() for _ in range(2))
    torch.testing.assert_close(
        gradient(attention(ours, HEADS, layout), ours),
        gradient(by_definition(theirs, lengths), theirs),
        **TOLERANCE,
    )


def test_dropout_drops_weights() -> None:
    """Dropout follows torch's seed, and changes what attention gives."""
    qkv, layout = draw([5, 3])

    def dropped(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return attention(qkv, HEADS, layout, dropout=0.5)

    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))
    assert not torch.allclose(dropped(1), attention(qkv, HEADS, layout))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_weights_are_those_of_attention(lengths: list[int]) -> None:
    """Attention weights sum to one, are zero on padding, and give attention's own context."""
    qkv, layout = draw(lengths)
    attend = ScaledDotProductAttention(HEADS, dropout=0.0)

    found = attend(qkv, layout)

    weights = attend.weights(qkv, layout)
    batch, longest = layout.unpack.shape
    assert weights.shape == (batch, HEADS, longest, longest)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    for row, length in enumerate(lengths):
        assert not weights[row, :, :, length:].any()
    value = qkv.chunk(3, dim=1)[2].index_select(0, layout.unpack.flatten())
    value = value.view(batch, longest, HEADS, -1).transpose(1, 2)
    context = (weights @ value).transpose(1, 2).reshape(batch * longest, -1)
    torch.testing.assert_close(context.index_select(0, layout.pack), found, **TOLERANCE)
