"""A head that is trained on the states of a bundle: it learns, and its bundle is served with the encoder's."""

import csv
import sys

import pytest

from export import head_bundle
from service.core import bundle
from service.embedded import EmbeddedService
from tests import samples

KINDS = {"tools": "The old hammer and the saw. ", "weather": "Rain, wind and then a little sun. "}


@pytest.fixture
def rows(tmp_path):
    """Sixty rows of two labels, which differ in one sentence."""
    path = tmp_path / "notes.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(60):
            label = [*KINDS][number % 2]
            writer.writerow([KINDS[label] + samples.text(4, seed=number), label])
    return path


def train(monkeypatch, states_bundle, rows, out, *more: str) -> int:
    arguments = ["--init-from", str(states_bundle), "--data", str(rows), "--out", str(out)]
    arguments += ["--output", str(rows.parent / "run"), *more]
    monkeypatch.setattr(sys, "argv", ["export.head_bundle", *arguments])
    return head_bundle.main()


async def test_a_head_learns_and_is_served(monkeypatch, states_bundle, rows, tmp_path, capsys):
    """The bundle has goldens for both precisions, the metric of the held-out rows, and kilobytes."""
    out = tmp_path / "notes"
    assert train(monkeypatch, states_bundle, rows, out) == 0, capsys.readouterr().err
    manifest = bundle.load(out).manifest
    assert ("fp32", "int8") == manifest.precisions
    assert manifest.metrics["classification"]["fp32"]["accuracy"] == 100
    assert sum(file.stat().st_size for file in out.iterdir()) < 200_000
    for precision in manifest.precisions:
        async with EmbeddedService(states_bundle, out, precision=precision) as service:
            for label, text in KINDS.items():
                assert label == (await service.classify(text * 2, model="notes"))[0][0].label


def test_a_bundle_without_states_trains_no_head(monkeypatch, tiny_bundle, rows, tmp_path, capsys):
    """The message says how to export it."""
    assert train(monkeypatch, tiny_bundle, rows, tmp_path / "notes") == 1
    assert "give no hidden states: export it again with --states" in capsys.readouterr().err
