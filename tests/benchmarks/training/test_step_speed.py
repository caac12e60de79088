"""What is compared is the same work, and as much of it as the figures say."""

import numpy as np
import pytest
import torch

from benchmarks.training import step_speed
from benchmarks.training.step_speed import Case
from model.data.pretraining_batches import Sampler
from model.pretrain import Trainer

CPU = torch.device("cpu")
TINY = {
    "pretrain": Case("pretrain", 2, 64, 4, 1.0),
    "finetune": Case("finetune", 2, 64, 4, 1.0, fine_tuning=True),
}


@pytest.mark.parametrize("name", TINY)
def test_measure(name):
    """Both sides take their steps, at speeds that make the ratio of each round."""
    found = step_speed.measure(TINY[name], "fp32", CPU, rounds=2, steps=1)

    for ours, theirs, ratio in zip(found["ours"], found["theirs"], found["ratios"], strict=True):
        assert ours / theirs == ratio > 0
    assert len(found["ratios"]) == 2
    assert found["flops"] > 6 * 2 * 12 * 64**2


def test_the_same_samples(monkeypatch):
    """What the peer is given, padded, are the samples that we learn from, packed; both learn something."""
    given, learnt = [], []
    step = step_speed.their_step

    def listen(peer, optimizer, precision, **inputs):
        before = [p.clone() for p in peer.parameters()]
        step(peer, optimizer, precision, **inputs)
        given.append(inputs)
        learnt.append(not all(map(torch.equal, before, peer.parameters())))

    taken = []
    own = Trainer.step
    monkeypatch.setattr(step_speed, "their_step", listen)
    monkeypatch.setattr(Trainer, "step", lambda t, s, *rest: taken.append(s) or own(t, s, *rest))
    ours, theirs = step_speed.pretraining(TINY["pretrain"], "fp32", CPU)

    assert ours(3) == theirs(3)

    [inputs], [samples] = given, taken
    assert torch.equal(inputs["input_ids"], samples.input_ids)
    assert inputs["attention_mask"].sum(1).tolist() == [*samples.lengths]
    assert (inputs["labels"] != -100).sum(1).tolist() == [*samples.predictions]
    assert torch.equal(inputs["labels"][samples.hidden], samples.original_ids[samples.hidden])
    assert torch.equal(inputs["next_sentence_label"], samples.is_next)
    assert learnt == [True]


def test_flops():
    """Six for each weight and token, twelve for each pair of tokens and number of a state; heads where tokens hide."""
    shape = TINY["pretrain"].shape

    one = step_speed.flops(shape, np.array([10]), 0)

    assert one == 6 * 10 * 2 * 12 * 64**2 + 12 * 2 * 64 * 10**2
    assert step_speed.flops(shape, np.array([10, 10]), 0) == 2 * one
    assert step_speed.flops(shape, np.array([10]), 3) - one == 6 * 3 * (64 * 8192 + 64**2)


def test_made_up_text_is_full():
    """Pairs drawn from it are nearly as long as there is room: little is padded."""
    sampler = Sampler(step_speed.made_up(), step_speed.SPECIALS, "nsp")
    samples = sampler.samples(seed=1, step=0, size=200, length=step_speed.LENGTH, rate=0.15)
    assert np.mean(samples.lengths) > 0.9 * step_speed.LENGTH
