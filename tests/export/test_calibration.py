"""The text that int8 graphs are calibrated with, and the inputs of products that are measured with it."""

from pathlib import Path

import numpy as np
import pytest

from export import calibration
from export.passes.quantize import quantize
from service.core.encode import Encoder
from service.core.goldens import cosine
from service.core.packing import pack
from tests.export.helpers import run_packed, run_value


@pytest.fixture(scope="module")
def encoder(tiny_checkpoint: Path) -> Encoder:
    return Encoder.from_file(tiny_checkpoint / "tokenizer.json", 64)


def test_windows_are_the_same_each_time(encoder):
    """Equal tokenizers give equal text, so that exports are reproducible; there are as many tokens as are needed."""
    first, second = (pack(calibration.choose_windows(encoder)) for _ in range(2))
    np.testing.assert_array_equal(first.input_ids, second.input_ids)
    assert calibration.TOKENS <= len(first.input_ids) < calibration.TOKENS + calibration.LONGEST
    assert first.lengths.max() <= 64


def test_given_texts_come_first(encoder):
    """The texts of a file are used, and made ones only for what is missing."""
    texts = ["the old man walked", "to the station"]
    chosen = calibration.choose_windows(encoder, texts)
    for item, window in zip(encoder.texts(texts), chosen, strict=False):
        np.testing.assert_array_equal(item.windows[0].input_ids, window.input_ids)
    assert sum(map(len, chosen)) >= calibration.TOKENS
    many = calibration.choose_windows(encoder, texts * 10_000)
    assert len(many) < 20_000
    assert {len(window) for window in many} == {len(window) for window in chosen[:2]}


def test_texts_of_a_file(tmp_path):
    """A line is a text, and empty lines are none."""
    (tmp_path / "texts.txt").write_text("one\n\n two\n", encoding="utf-8")
    assert ["one", " two"] == calibration.read_texts(tmp_path / "texts.txt")
    assert [] == calibration.read_texts(None)


class TestInputs:
    def test_same_as_in_the_graph(self, traced, encoder, tmp_path):
        """Every input of the trunk's products is measured, for all tokens."""
        windows = sorted(calibration.choose_windows(encoder)[:5], key=len)
        inputs = calibration.measure_inputs(traced.packed, windows, tmp_path)
        assert 2 * 4 == len(inputs)
        for name, value in inputs.items():
            np.testing.assert_allclose(
                value, run_value(traced.packed, name, pack(windows)), rtol=0, atol=1e-5
            )

    def test_the_graph_is_untouched(self, traced, encoder, tmp_path):
        """Measuring copies: the fp32 graph is exported after it."""
        before = traced.packed.SerializeToString(deterministic=True)
        calibration.measure_inputs(traced.packed, calibration.choose_windows(encoder)[:2], tmp_path)
        assert before == traced.packed.SerializeToString(deterministic=True)

    def test_a_calibrated_graph_is_nearer_to_fp32(self, traced, encoder, tmp_path):
        """Outputs for texts that were not measured differ less from those of fp32 than without calibration."""
        windows = calibration.choose_windows(encoder)
        inputs = calibration.measure_inputs(traced.packed, windows[:-40], tmp_path)
        packed = pack(windows[-40:])
        exact = run_packed(traced.packed, packed)
        calibrated, plain = (
            np.mean([1 - cosine(exact[name], value) for name, value in found.items()])
            for found in (
                run_packed(quantize(traced.packed, inputs), packed),
                run_packed(quantize(traced.packed), packed),
            )
        )
        assert calibrated < 0.8 * plain

    def test_equal_graphs(self, traced, encoder, tmp_path):
        """Two calibrations of one model give equal int8 graphs."""
        windows = calibration.choose_windows(encoder)
        first, second = (
            quantize(traced.packed, calibration.measure_inputs(traced.packed, windows, tmp_path))
            for _ in range(2)
        )
        assert first.SerializeToString(deterministic=True) == second.SerializeToString(
            deterministic=True
        )
