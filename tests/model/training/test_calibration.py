"""A fitted temperature is the one that the labels were drawn with, and its scores are shares of right answers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.training import calibration
from model.training.calibration import FEWEST_ROWS, Bin, calibrate, fit_temperature
from service.core.decode import classify, softmax

SINGLE, SEVERAL = "single_label_classification", "multi_label_classification"


def drawn(n: int, factor: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits [n, 4] that are too large by a factor, and labels drawn by the right ones."""
    rng = np.random.default_rng(seed)
    right = rng.normal(size=(n, 4)).astype(np.float32) * 2
    labels = (softmax(right).cumsum(axis=1) > rng.random((n, 1))).argmax(axis=1)
    return right * np.float32(factor), labels


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_temperature_is_found(factor):
    """Logits that are three times too large need a temperature of 3, and are calibrated by it."""
    found = calibrate(*drawn(20_000, factor), SINGLE)

    assert factor == pytest.approx(found.temperature, rel=0.05)
    assert found.error_after < 0.02
    assert found.error_before > (0.1 if factor != 1 else 0)


def test_the_cross_entropy_is_smallest():
    """No temperature nearby has a smaller cross-entropy, as PyTorch computes it."""
    logits, labels = drawn(500, 2.0)
    found = fit_temperature(logits, labels, SINGLE)

    def loss(temperature):
        scaled = torch.from_numpy(logits).double() / temperature
        return F.cross_entropy(scaled, torch.from_numpy(labels), label_smoothing=1 / 502).item()

    assert loss(found) < min(loss(found * 0.99), loss(found * 1.01))


def test_several_labels():
    """Labels that may hold together are calibrated one by one."""
    rng = np.random.default_rng(0)
    right = rng.normal(size=(5000, 3)).astype(np.float32)
    gold = (1 / (1 + np.exp(-right)) > rng.random(right.shape)).astype(np.float32)

    found = calibrate(right * np.float32(2.5), gold, SEVERAL)

    assert 2.5 == pytest.approx(found.temperature, rel=0.05)
    assert found.error_after < 0.02 < found.error_before


def test_right_answers_alone():
    """Where every answer is right, the temperature stays above the smallest one."""
    logits, _ = drawn(200, 1.0)
    found = calibrate(logits * 3, logits.argmax(axis=1), SINGLE)
    assert 2 * calibration.RANGE[0] < found.temperature < 1.5


def test_few_rows():
    """Nothing is fitted to a few rows."""
    logits, labels = drawn(FEWEST_ROWS - 1, 1.0)
    assert calibrate(logits, labels, SINGLE) is None


def test_expected_error():
    """The error is the mean difference, by the number of answers."""
    confidence = np.array([0.95, 0.95, 0.95, 0.95, 0.5, 0.5])
    bins = calibration.reliability(confidence, np.array([1.0, 1, 1, 0, 1, 0]))

    assert [Bin(0.5, 0.5, 2), Bin(pytest.approx(0.95), 0.75, 4)] == bins
    assert 0.2 * 4 / 6 == pytest.approx(calibration.expected_error(bins))


def test_the_service_applies_it():
    """The service's calibrated scores have the calibrated confidence, label by label."""
    logits, labels = drawn(100, 3.0)
    served = [
        classify([row], [5], labels="abcd", problem_type=SINGLE, top_k=1, temperature=3.0)[0]
        for row in logits
    ]
    expected, is_right = calibration.confidences(logits / np.float32(3.0), labels, SINGLE)
    assert expected.tolist() == [one.score for one in served]
    assert is_right.tolist() == [
        "abcd"[label] == one.label for label, one in zip(labels, served, strict=True)
    ]
