"""Each head gives its task's outputs, from packed tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model.heads import EncoderWithHeads, MaskedLM, Pretraining, SentenceEmbedding, make_head
from service.core.manifest import Head
from service.core.packing import each
from tests.model.helpers import LENGTHS, TOLERANCE, batch, ours, perturb, shape

HEADS = {
    "sentiment": Head(task="classification", labels=("bad", "good", "so-so")),
    "entities": Head(task="ner", labels=("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
    "answers": Head(task="qa"),
    "vectors": Head(task="embedding", pooling="mean", dimensions=32),
    "firsts": Head(task="embedding", pooling="cls", dimensions=32),
}


@pytest.fixture
def joint() -> EncoderWithHeads:
    """One encoder with heads of every task."""
    model = perturb(EncoderWithHeads(shape(), HEADS))
    assert isinstance(model, EncoderWithHeads)
    return model


@torch.no_grad()
def test_outputs(joint):
    """A model answers by head name, with a row per sequence or per token."""
    outputs = joint(*ours(batch([4, 6])))

    assert {name: tuple(output.shape) for name, output in outputs.items()} == {
        "sentiment": (2, 3),
        "entities": (10, 5),
        "answers": (10, 2),
        "vectors": (2, 32),
        "firsts": (2, 32),
    }


@torch.no_grad()
def test_some_heads(joint):
    """Only the requested heads are computed, with the same results as among all heads."""
    arguments = ours(batch([4, 6]))

    some = joint(*arguments, heads=["answers", "sentiment"])

    assert list(some) == ["answers", "sentiment"]
    assert all(torch.equal(output, joint(*arguments)[name]) for name, output in some.items())


@torch.no_grad()
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packed_is_alone(joint, lengths):
    """Every head's outputs are the same packed with others and alone."""
    packed = batch(lengths)

    together = joint(*ours(packed))

    alone = [joint(*ours(one)) for one in each(packed)]
    for name, output in together.items():
        by_itself = torch.cat([outputs[name] for outputs in alone])
        torch.testing.assert_close(output, by_itself, **TOLERANCE)


def test_dense_layers_follow_pooling():
    """Dense layers, where a checkpoint has them, work on the pooled vector."""
    dense = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    hidden_states = torch.arange(18.0).view(9, 2)
    layout = ours(batch([3, 1, 5]))[-1]

    vectors = SentenceEmbedding("cls", dense)(hidden_states, layout)

    assert torch.equal(vectors, dense(hidden_states[[0, 3, 4]]))


def test_unknown_pooling():
    """A pooling that is not ours is refused."""
    with pytest.raises(ValueError, match="'median': one of mean, cls"):
        SentenceEmbedding(["max", "median"])


def test_masked_lm_is_tied():
    """The output matrix is the word embeddings: no parameter of its own, and both roles teach it."""
    model = Pretraining(shape(hidden_dropout_prob=0.0))
    hidden_states = torch.randn(3, 32)
    words = model.encoder.embeddings.word.weight

    assert {name for name, _ in MaskedLM(shape()).named_parameters()} == {
        "dense.weight",
        "dense.bias",
        "norm.weight",
        "norm.bias",
        "bias",
    }
    F.cross_entropy(model.masked_lm(hidden_states, words), torch.tensor([1, 2, 3])).backward()
    assert words.grad is not None
    assert words.grad.abs().sum(dim=1).all()


@torch.no_grad()
def test_masked_positions_only():
    """Token logits at given positions are those that all positions would have had there."""
    model = perturb(Pretraining(shape()))
    arguments = ours(batch([5, 7]))
    masked = torch.tensor([0, 4, 5, 11])

    some, next_logits = model(*arguments, masked)
    everywhere, _ = model(*arguments)

    assert next_logits.shape == (2, 2)
    assert everywhere.shape == (12, 96)
    torch.testing.assert_close(some, everywhere[masked], **TOLERANCE)


@torch.no_grad()
def test_next_sentence_is_a_switch():
    """Without next sentence prediction there is no pooler, and no logits of it."""
    model = Pretraining(shape(), next_sentence=False).eval()

    _, next_logits = model(*ours(batch([5, 7])))

    assert next_logits is None
    assert not [name for name in model.state_dict() if "pooler" in name]


def test_dropout_of_classifiers():
    """Classification heads drop of what they read in training, and only there."""
    config = shape(hidden_dropout_prob=0.5)
    hidden_states, layout = torch.randn(8, 32), ours(batch([5, 3]))[-1]

    for name in ("sentiment", "entities"):
        head = make_head(config, HEADS[name])
        assert not torch.equal(head(hidden_states, layout), head(hidden_states, layout))
        head.eval()
        assert torch.equal(head(hidden_states, layout), head(hidden_states, layout))
