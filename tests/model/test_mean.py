"""A mean of two checkpoints has their mean weights, shifted biases, and the requested threshold and temperature."""

import json
import sys
from pathlib import Path

import pytest
import torch

from model import mean
from model.checkpoints import writer
from model.checkpoints.source import read_source
from tests.model.helpers import perturb


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["mean", *map(str, arguments)])
    mean.main()


def test_a_mean_of_weights_is_calibrated(tiny_checkpoint, tmp_path, monkeypatch):
    later = read_source(tiny_checkpoint)
    perturb(later.model, seed=3)
    writer.save_joint(tmp_path / "later", later.model, tiny_checkpoint / "tokenizer.json")
    rows = tmp_path / "rows.jsonl"
    labels = ("negative", "neutral", "positive") * 8
    rows.write_text("\n".join(json.dumps({"text": f"a {n}", "label": n}) for n in labels))
    out: Path = tmp_path / "out"
    shares = ("--head-share", "sentiment=0.5")
    shifts = ("--shift", "sentiment.neutral=-1.5", "entities.O=2")
    fitted = ("--null-threshold", "answers=-3", "--calibrate", f"sentiment={rows}")
    run(
        monkeypatch,
        tiny_checkpoint,
        tmp_path / "later",
        out,
        "--share",
        0.75,
        *shares,
        *shifts,
        *fitted,
    )

    found = read_source(out).model
    weights = [each.state_dict() for each in (read_source(tiny_checkpoint).model, later.model)]
    for name, tensor in found.state_dict().items():
        share = 0.5 if name.startswith("heads.sentiment.") else 0.75
        expected = (1 - share) * weights[0][name] + share * weights[1][name]
        if name == "heads.sentiment.classifier.bias":
            expected[1] -= 1.5
        if name == "heads.entities.classifier.bias":
            expected[0] += 2
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-5)
    assert found.described["answers"].null_threshold == -3
    assert found.described["sentiment"].calibration_temperature not in (None, 1.0)


@pytest.mark.parametrize("target", ["sentiment.mixed=1", "mood.positive=1"])
def test_an_unknown_label_is_an_error(target, tiny_checkpoint, tmp_path, monkeypatch):
    both = (tiny_checkpoint, tiny_checkpoint, tmp_path / "out")
    with pytest.raises(SystemExit, match=r"no head of the checkpoint has this label"):
        run(monkeypatch, *both, "--share", 0.5, "--shift", target)
    assert not (tmp_path / "out").exists()
