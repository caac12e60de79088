"""The cost of a batch is learnt from few measurements, and stays sane when they are poor."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.scheduling.cost_model import (
    GUESS,
    SURPRISE,
    Cost,
    Drain,
    Estimator,
    Sample,
    fit,
    measure,
)

CPU = Cost(per_run=2e-3, per_token=3e-5, per_slot=4e-9)
SHAPES = [(1, 16), (1, 128), (8, 32), (1, 512), (6, 128)]
seconds = st.floats(1e-5, 10)


def sample(size: int, length: int, cost: Cost = CPU, factor: float = 1.0) -> Sample:
    tokens = size * length
    return Sample(tokens, size, length, factor * cost.seconds(tokens, size, length))


def samples(cost: Cost = CPU) -> list[Sample]:
    return [sample(size, length, cost) for size, length in SHAPES]


def test_seconds_adds_run_tokens_and_attention_slots():
    """Attention works on B * S * S slots, so one long text makes every companion dear."""
    assert Cost(1.0, 0.1, 0.01).seconds(tokens=12, size=2, longest=10) == pytest.approx(4.2)


def test_seconds_adds_mask_tokens():
    """A fill-mask head computes logits of the vocabulary for each mask token."""
    cost = Cost(1.0, 0.1, 0.01, per_mask=0.5)
    assert cost.seconds(tokens=12, size=2, longest=10, masks=3) == pytest.approx(5.7)
    assert cost.tokens_per_second([5, 5], masks=4) == pytest.approx(10 / (1 + 1 + 0.5 + 2))


def test_the_cost_of_mask_tokens_is_found_by_one_sample_of_them():
    """Fitted to samples without masks and one with masks, the cost predicts batches with any number of masks."""
    line = Cost(2e-3, 3e-5, 4e-9, per_mask=2e-4)

    def masked(size, length, masks):
        shape = size * length, size, length
        return Sample(*shape, line.seconds(*shape, masks), masks)

    estimator = Estimator([*samples(), masked(1, 64, 64)])
    for taken in (masked(8, 64, 512), masked(8, 64, 8), masked(8, 64, 0)):
        found = estimator.cost.seconds(*taken[:3], taken.masks)
        assert found == pytest.approx(taken.seconds, rel=1e-3)


def test_batches_of_mask_tokens_do_not_change_the_cost_of_others():
    """After a hundred batches full of masks, batches without any cost what they did before."""
    estimator = Estimator(samples())
    shape = 8 * 64, 8, 64
    for _ in range(100):
        estimator.refine(Sample(*shape, CPU.seconds(*shape) + 512 * 2e-4, 512))
    assert estimator.cost.seconds(*shape, 512) == pytest.approx(
        CPU.seconds(*shape) + 512 * 2e-4, rel=1e-2
    )
    assert estimator.cost.seconds(*shape) == pytest.approx(CPU.seconds(*shape), rel=0.1)


def test_a_padded_batch_computes_its_padding():
    """Two texts of 2 and 10 tokens are 20 tokens to a graph that takes a rectangle."""
    cost = Cost(1.0, 0.1, 0.01, padded=True)
    assert cost.computed(tokens=12, size=2, longest=10) == 20
    assert cost.seconds(tokens=12, size=2, longest=10) == pytest.approx(5.0)
    assert cost.tokens_per_second([2, 10]) == pytest.approx(12 / 5.0)


@pytest.mark.parametrize(
    "cost",
    [CPU, Cost(1e-3, 1e-6, 0.0), Cost(0.0, 1e-5, 1e-8), Cost(5e-3, 0.0, 0.0)],
    ids=["cpu", "no attention term", "no fixed term", "only a fixed term"],
)
def test_fit_finds_the_line_that_made_the_samples(cost):
    """Five exact samples give back their own line, zero terms included."""
    fitted = fit(samples(cost))
    expected = [sample(size, length, cost).seconds for size, length in [(4, 64), (32, 256)]]
    found = [sample(size, length, fitted).seconds for size, length in [(4, 64), (32, 256)]]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@given(st.lists(seconds, min_size=5, max_size=5))
def test_fit_never_predicts_a_negative_term(measured):
    """Whatever was measured, more work never costs less."""
    odd = [taken._replace(seconds=value) for taken, value in zip(samples(), measured, strict=True)]
    cost = fit(odd)
    assert min(cost.per_run, cost.per_token, cost.per_slot) >= 0
    assert sample(8, 64, cost).seconds > 0


def test_fit_agrees_with_an_exhaustive_search():
    """No line on a fine grid around the fitted one has a smaller error."""
    noise = np.random.default_rng(0).normal(1, 0.2, len(SHAPES))
    noisy = [sample(*shape, factor=f) for shape, f in zip(SHAPES, noise, strict=True)]
    fitted = fit(noisy)

    def error(cost):
        predicted = [cost.seconds(*taken[:3]) / taken.seconds for taken in noisy]
        return sum((ratio - 1) ** 2 for ratio in predicted)

    steps = [0.9, 0.99, 1.0, 1.01, 1.1]
    around = [
        Cost(fitted.per_run * a, fitted.per_token * b, fitted.per_slot * c)
        for a in steps
        for b in steps
        for c in steps
    ]
    assert error(fitted) <= min(map(error, around)) + 1e-6


def test_one_sample_is_shared_evenly_by_the_terms():
    """Terms that one sample cannot separate share its cost, and the measured batch is predicted exactly."""
    cost = fit([Sample(tokens=100, size=2, longest=50, seconds=0.3)])
    assert cost.per_run == pytest.approx(0.1)
    assert cost.per_token * 100 == pytest.approx(0.1)
    assert cost.per_slot * 5000 == pytest.approx(0.1)


@pytest.mark.parametrize("none", [[], [Sample(10, 1, 10, 0.0)]], ids=["no sample", "no time"])
def test_without_evidence_the_cost_is_a_guess(none):
    """A duration of zero is no evidence."""
    assert fit(none) == GUESS
    assert Estimator(none).cost == GUESS


def test_estimator_starts_from_the_warm_up():
    """Before any batch ran, the estimate is the fit."""
    estimator = Estimator(samples())
    assert estimator.cost == fit(samples())


@pytest.mark.parametrize(("before", "after"), [(1.0, 2.0), (30.0, 1.0)], ids=["slower", "stalled"])
def test_estimator_follows_its_machine(before, after):
    """A few hundred batches at another speed outweigh the warm-up."""
    estimator = Estimator([sample(*shape, factor=before) for shape in SHAPES])
    for _ in range(50):
        for size, length in SHAPES:
            estimator.refine(sample(size, length, factor=after))
    expected = after * sample(8, 64).seconds
    assert sample(8, 64, estimator.cost).seconds == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("odd", "rel"), [(100, 0.15), (1e-6, 0.2)], ids=["stall", "no time"])
def test_estimator_shrugs_at_an_odd_batch(odd, rel):
    """One batch in eight that takes a hundred times as long, or no time, moves the line by little."""
    estimator = Estimator(samples())
    for _ in range(20):
        for size, length in SHAPES:
            for factor in (1, 1, 1, 1, 1, 1, 1, odd):
                estimator.refine(sample(size, length, factor=factor))
    assert sample(8, 64, estimator.cost).seconds == pytest.approx(sample(8, 64).seconds, rel=rel)


def test_estimator_of_padded_batches_learns_what_padding_costs():
    """Batches of mixed lengths take what their rectangles take, and teach just that."""
    line = Cost(per_run=2e-3, per_token=6e-5, per_slot=4e-9, padded=True)
    estimator = Estimator(samples(), padded=True)
    for _ in range(100):
        for tokens, size, longest in [(40, 8, 32), (300, 8, 128), (128, 1, 128), (90, 4, 64)]:
            seconds = line.seconds(tokens, size, longest)
            estimator.refine(Sample(tokens, size, longest, seconds))
    assert estimator.cost.padded
    for shape in [(60, 8, 48), (200, 2, 120)]:
        assert estimator.cost.seconds(*shape) == pytest.approx(line.seconds(*shape), rel=0.05)


def test_estimator_remembers_shapes_that_traffic_does_not_show():
    """Thousands of batches of one shape leave the prediction for the others alone."""
    estimator = Estimator(samples())
    for _ in range(2000):
        estimator.refine(sample(1, 32))
    for size, length in SHAPES:
        taken = sample(size, length)
        assert sample(size, length, estimator.cost).seconds == pytest.approx(
            taken.seconds, rel=0.02
        )


def test_estimator_ignores_a_batch_without_duration():
    """A duration of zero does not change the estimate."""
    estimator = Estimator(samples())
    for _ in range(100):
        estimator.refine(Sample(10, 1, 10, 0.0))
    assert estimator.cost == fit(samples())


class Model:
    """A model on a clock that moves only while it runs."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.now = 100.0
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, batch: Sequence[list[int]]) -> None:
        lengths = [len(ids) for ids in batch]
        self.shapes.append((len(lengths), max(lengths)))
        self.now += self.cost.seconds(sum(lengths), len(lengths), max(lengths))

    def measure(self, max_length: int = 512, **limits: float) -> list[Sample]:
        return measure(
            self,
            lambda length: [0] * length,
            max_length=max_length,
            clock=lambda: self.now,
            **limits,
        )


def test_measure_times_five_shapes_and_recovers_the_cost():
    """On a fast model all five shapes fit, twice each, and their fit is the model's own line."""
    model = Model(CPU)
    cost = fit(model.measure())
    assert len(model.shapes) == 10
    assert len(set(model.shapes)) == 5
    assert cost.per_token == pytest.approx(CPU.per_token, rel=1e-3)
    assert cost.per_slot == pytest.approx(CPU.per_slot, rel=1e-3)


@pytest.mark.parametrize("slower", [1, 3, 10, 30, 1000])
def test_measure_keeps_to_its_time(slower):
    """A slow model is measured on fewer shapes; only the very first run may pass the limit."""
    cost = Cost(slower * 1e-3, slower * 4e-5, 0.0)
    model = Model(cost)
    measured = model.measure()
    assert measured
    assert model.now - 100.0 <= max(0.3, measured[0].seconds)


def test_measure_stays_within_the_longest_window():
    """A model of 64 positions never sees more, and no shape is measured twice."""
    model = Model(CPU)
    measured = model.measure(max_length=64)
    assert max(taken.longest for taken in measured) == 64
    assert len({taken[:3] for taken in measured}) == len(measured)


def test_measure_stays_within_the_largest_batch():
    """Unbatched graphs are measured with single inputs only, others within the tokens of their largest batch."""
    measured = Model(CPU).measure(max_size=1)
    assert {taken.size for taken in measured} == {1}
    assert {taken.longest for taken in measured} == {16, 32, 128, 512}
    few_tokens = Model(CPU).measure(max_tokens=300)
    assert [(taken.size, taken.longest) for taken in few_tokens] == [
        (1, 16),
        (1, 128),
        (8, 32),
        (1, 512),
    ]


def test_a_surprise_corrects_at_once():
    """A cost that was measured in a bad moment, of batches that are seldom seen, does not stay wrong."""
    wrong = [Sample(tokens, 1, tokens, 1e-3 * tokens) for tokens in (16, 128, 512)]
    estimator = Estimator(wrong)
    estimator.refine(Sample(200, 1, 200, 0.02))
    assert estimator.cost.seconds(200, 1, 200) < 0.15
    estimator.refine(Sample(200, 1, 200, 0.02))
    estimator.refine(Sample(200, 1, 200, 0.02))
    assert estimator.cost.seconds(200, 1, 200) < 0.08


@pytest.mark.parametrize("times", [0.5, 0.9, 1.1, 2.0])
def test_what_is_about_as_expected_waits_for_others(times):
    """To fit costs as much as a tenth of a lone text's run: eight are learnt from together, unless one surprises."""
    estimator = Estimator(samples())
    before = estimator.cost
    taken = sample(1, 128)
    refits = []
    for _ in range(8):
        estimator.refine(taken._replace(seconds=times * taken.seconds))
        refits.append(estimator.cost != before)
    surprised = not 1 / SURPRISE < times < SURPRISE
    assert refits[0] is surprised
    assert refits[6] is surprised
    assert refits[7]


def test_a_short_batch_causes_no_fit():
    """A fit would take longer than such a batch; eight are learnt from together."""
    estimator = Estimator([Sample(tokens, 1, tokens, 1e-7 * tokens) for tokens in (16, 128, 512)])
    before = estimator.cost
    for _ in range(7):
        estimator.refine(Sample(128, 1, 128, 4e-4))
        assert before == estimator.cost
    estimator.refine(Sample(128, 1, 128, 4e-4))
    assert before != estimator.cost


def test_what_takes_twice_as_long_as_expected_drains_at_half_the_speed():
    """Soon, whatever it was before; and as soon back again."""
    drain = Drain()
    assert drain.speed == 1.0
    for _ in range(40):
        drain.observe(0.1, 0.2)
    assert drain.speed == pytest.approx(0.5, abs=0.02)
    for _ in range(80):
        drain.observe(0.1, 0.1)
    assert drain.speed == pytest.approx(1.0, abs=0.02)
