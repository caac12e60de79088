"""What `capture` collects is complete, and the hooks end with the block."""

import torch

from model.bert import Bert
from model.training.capture import capture
from tests.model.helpers import batch, ours, shape


def test_nothing_is_captured_after_the_block():
    """Each pass inside the block adds hidden states, projections and weights; a later pass adds none."""
    encoder = Bert(shape(vocab_size=200)).eval()
    inputs = ours(batch([5, 3], vocab_size=200))
    layers = encoder.config.num_hidden_layers

    with torch.no_grad():
        with capture(encoder, projections=True, attention_weights=True) as captured:
            last = encoder(*inputs)
        encoder(*inputs)

    assert layers + 1 == len(captured.hidden_states)
    assert layers == len(captured.projections) == len(captured.attention_weights)
    assert captured.hidden_states[-1] is last


def test_hidden_states_alone_by_default():
    """Projections and attention weights are captured only where requested."""
    encoder = Bert(shape(vocab_size=200)).eval()

    with torch.no_grad(), capture(encoder) as captured:
        encoder(*ours(batch([5, 3], vocab_size=200)))

    assert [] == captured.projections == captured.attention_weights


def test_other_encoders_are_not_captured():
    """A pass of another encoder, such as a student's, adds nothing to the capture."""
    encoder, other = (Bert(shape(vocab_size=200)).eval() for _ in range(2))

    with torch.no_grad(), capture(encoder, projections=True, attention_weights=True) as captured:
        other(*ours(batch([5, 3], vocab_size=200)))

    assert [] == captured.hidden_states == captured.projections == captured.attention_weights
