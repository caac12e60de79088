"""Heads that begin by looking at equal tokens do so, and only they are touched."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.attention_map import attention_maps
from model.config import preset
from model.families.registry import FAMILIES
from model.training.token_matching_init import REACH, init_token_matching
from service.core.encode import Encoding

LENGTH = 100  # tokens
TWICE = (5, 5 + REACH // 2)  # where the only one stands that is there twice
CHANCE = 1 / LENGTH


def encoder_of(model_type: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = preset("mini", FAMILIES[model_type].config, vocab_size=LENGTH, **fields)
    return FAMILIES[model_type].encoder(config, pooler=False).eval()


def first_maps(encoder: Any) -> Tensor:
    """The attention weights of the first layer, `[N, S, S]`."""
    ids, none = np.arange(LENGTH), np.zeros(LENGTH, dtype=np.int64)
    ids[TWICE[1]] = ids[TWICE[0]]
    offsets = np.zeros((LENGTH, 2), dtype=np.int32)
    read = Encoding(ids, none, offsets, none.astype(np.int32), none.astype(np.int8))
    return attention_maps(encoder, read)[0]


@pytest.mark.parametrize("model_type", ["modernbert", "nomic_bert"])
def test_half_of_the_heads_look_at_equal_tokens(model_type):
    """At where the same token stands, far away, more than at any other; the other heads are as before."""
    encoder = encoder_of(model_type)
    before = first_maps(encoder)
    assert before[:, TWICE[0], TWICE[1]].max() < 2 * CHANCE
    init_token_matching(encoder, 2, seed=1)
    after = first_maps(encoder)
    half = len(after) // 2
    for here, there in (TWICE, TWICE[::-1]):
        assert after[:half, here, there].min() > 8 * CHANCE
        for head in range(half):
            assert {*after[head, here].topk(2).indices.tolist()} == {here, there}
    torch.testing.assert_close(after[half:], before[half:])


def test_values_and_later_layers_stay():
    """It changes the selected matrices, in the selected layers; the seed decides how."""
    encoders = [encoder_of("nomic_bert") for _ in range(4)]
    for encoder, seed in zip(encoders[1:], (1, 1, 2), strict=True):
        init_token_matching(encoder, 2, seed)
    untouched, first, again, another = (encoder.state_dict() for encoder in encoders)
    changed = {name for name in untouched if not torch.equal(first[name], untouched[name])}
    assert changed == {f"layers.{layer}.attention.qkv.weight" for layer in (0, 1)}
    for name in changed:
        asks, asked, values = first[name].chunk(3)
        half = len(asks) // 2
        assert not torch.equal(asks[:half], untouched[name].chunk(3)[0][:half])
        torch.testing.assert_close(asks[:half], asked[:half], rtol=0, atol=0.02)
        assert torch.equal(values, untouched[name].chunk(3)[2])
        assert torch.equal(asks[half:], untouched[name].chunk(3)[0][half:])
        assert torch.equal(asked[half:], untouched[name].chunk(3)[1][half:])
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], another[name])


@pytest.mark.parametrize(
    ("model_type", "layers", "fields"),
    [
        ("nomic_bert", 5, {}),
        ("nomic_bert", 1, {"num_attention_heads": 1}),
        ("nomic_bert", 1, {"rope_theta": 2.0}),
        ("bert", 1, {}),
        ("deberta", 1, {}),
        ("albert", 1, {}),
    ],
)
def test_an_encoder_that_cannot_is_refused(model_type, layers, fields):
    """One that has fewer layers, a single head, nothing that hardly turns, or does not rotate at all."""
    encoder = encoder_of(model_type, **fields)
    with pytest.raises(ValueError, match=rf"layer {layers} of this {model_type} has no heads that"):
        init_token_matching(encoder, layers, seed=1)


def test_missing_layers_are_not_captured():
    """Any family may have none."""
    encoder = encoder_of("bert")
    init_token_matching(encoder, 0, seed=1)
