"""Bi-encoders and cross-encoders that sentence-transformers wrote are exported and served with its answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from export.__main__ import main as export
from tests import hub, samples
from tests.conftest import chosen
from tests.e2e.conftest import Server, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
TEXTS = [samples.text(words, seed=words) for words in (1, 3, 9, 20, 50, 200)]
TEXTS.append("the <pad> <pad> sea [PAD] [PAD] at night")  # tokens of padding that are text
PAIRS = [*zip(TEXTS, reversed(TEXTS), strict=True), (TEXTS[-1], TEXTS[-1])]
BI = ("roberta", "distilbert", "mpnet", "modernbert", "nomic_bert", "gte", "eurobert")
CROSS = {"bert": torch.nn.Sigmoid(), "modernbert": torch.nn.Identity()}


@dataclass(frozen=True)
class Served:
    server: Server
    bi: dict[str, SentenceTransformer]
    cross: dict[str, CrossEncoder]


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """All that this run tests in one service, at fp32; of one layer each, for tracing takes its time."""
    saved, bundles = (tmp_path_factory.mktemp(name) for name in ("saved", "bundles"))
    one: dict[str, Any] = {"num_hidden_layers": 1}
    bi = {
        name: hub.save_sentence_transformer(name, saved / f"bi-{name}", **one)
        for name in sorted(chosen(request, "bi"))
    }
    cross = {
        name: hub.save_cross_encoder(name, saved / f"cross-{name}", CROSS[name], **one)
        for name in sorted(chosen(request, "cross"))
    }
    folders = [saved / f"bi-{name}" for name in bi] + [saved / f"cross-{name}" for name in cross]
    for folder in folders:
        made = [str(folder), str(bundles / folder.name), "--no-memory", "--precision", "fp32"]
        assert 0 == export(made), folder.name
    with serving(*(bundles / folder.name for folder in folders)) as server:
        yield Served(server, bi, cross)


@pytest.mark.parametrize("bi", BI)
def test_vectors_are_those_of_encode(served, bi):
    """Of texts of every length, longer ones than are read, too."""
    found = served.server.answer("/embed", {"inputs": TEXTS, "model": f"bi-{bi}"})
    expected = served.bi[bi].encode(TEXTS)
    np.testing.assert_allclose(found["embeddings"], expected, **TOLERANCE)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2


@pytest.mark.parametrize("cross", CROSS)
def test_scores_are_those_of_predict(served, cross):
    """One label for each pair, with the score that its activation makes of it."""
    firsts, seconds = ([*side] for side in zip(*PAIRS, strict=True))
    asked = {"inputs": firsts, "text_pair": seconds, "model": f"cross-{cross}"}
    results = served.server.answer("/classify", asked)["results"]
    expected = served.cross[cross].predict(PAIRS)
    assert {label["label"] for result in results for label in result} == {"LABEL_0"}
    found = [label["score"] for result in results for label in result]
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    assert np.ptp(expected) > 1e-2
