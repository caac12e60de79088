"""Zero-shot labels: the logits of GLiClass's own code for checkpoints of its layouts, which were recorded.

`gliclass_checkpoints` makes the checkpoints and recorded the logits.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.goldens import run_torch
from model.checkpoints.errors import CheckpointError
from model.checkpoints.source import read_source
from service.core.encode import Encoder
from service.core.label_prompts import classified_texts, label_ids, label_scores
from service.errors import InvalidInput
from service.tasks.zero_shot import ZeroShot
from tests.conftest import run_export
from tests.e2e.conftest import serving
from tests.json_files import edit_json
from tests.parity.gliclass_checkpoints import CASES, LABELS, RECORDED, TEXTS, save
from tests.parity.test_gliner import compute

ALL = json.loads(RECORDED.read_text(encoding="utf-8"))
CASE = "deberta-segments"
EXPORTED = (CASE, "bert-factors", "bert-attention")


def checkpoint(folder: Path, case: str = CASE, **settings: Any) -> Path:
    save(folder, case, ALL[case]["shapes"])
    edit_json(folder / "config.json", **settings)
    return folder


def scores(logits: list[float], labels: list[str]) -> dict[str, float]:
    """Return GLiClass's scores of a text with one label each, or with several."""
    row = np.array(logits)
    found = 1 / (1 + np.exp(-row)) if len(row) == 1 else np.exp(row) / np.exp(row).sum()
    return dict(zip(labels, found.tolist(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_logits_of_the_reference(tmp_path, name):
    """Texts with several sets of labels in one batch of PyTorch have the logits that GLiClass computes unbatched."""
    source = read_source(checkpoint(tmp_path / "checkpoint", name))
    encoder, prompt = (
        Encoder(source.tokenizer, source.max_length),
        source.model.described["scores"].label_prompt,
    )
    windows, expected = [], []
    for labels, rows in zip(LABELS, ALL[name]["logits"], strict=True):
        ids = [own.ids for own in label_ids(encoder, labels, prompt)]
        windows += [item.windows[0] for item in classified_texts(encoder, [*TEXTS], ids, prompt)]
        expected += rows
    found = run_torch(source.model, windows)
    for row, own in zip(expected, found, strict=True):
        np.testing.assert_allclose(own["scores"][:, 0], row, atol=1e-5)  # float32, rounded to 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_served(tmp_path, name):
    """Requests with different labels share batches and have the reference's scores, also over HTTP."""
    run_export(
        checkpoint(tmp_path / "checkpoint", name),
        tmp_path / "bundle",
        "--precision",
        "fp32",
        "int8",
    )
    expected = [
        [scores(row, labels) for row in rows]
        for labels, rows in zip(LABELS, ALL[name]["logits"], strict=True)
    ]
    tasks = [ZeroShot(inputs=[text], labels=labels) for labels in LABELS for text in TEXTS]
    many = ZeroShot(inputs=["a"], labels=[f"label {number}" for number in range(99)])
    long = ZeroShot(inputs=[TEXTS[4] * 20], labels=["b"], truncate=False)
    cut = ZeroShot(inputs=[TEXTS[4] * 20], labels=["b"])
    *replies, refused, too_long, truncated = compute(
        tmp_path / "bundle", *tasks, many, long, cut, precision="fp32"
    )
    assert max(reply.timing.batch_size for reply in replies) > 2
    for own, reply in zip([one for rows in expected for one in rows], replies, strict=True):
        found = {one.label: one.score for one in reply.results[0]}
        assert own == pytest.approx(found, abs=1e-5)
        assert [*found.values()] == sorted(found.values(), reverse=True)
    assert isinstance(refused, InvalidInput)
    assert "name fewer or shorter labels" in refused.message
    assert "truncate is false" in too_long.message
    assert [0] == [*truncated.usage.truncated]

    with serving(
        tmp_path / "bundle", "--provider", "cpu", "--threads", "1", "--precision", "fp32"
    ) as server:
        body = {"inputs": [*TEXTS], "labels": LABELS[0]}
        found = server.answer("/zero-shot", body)
        assert "scores" == found["head"]
        for own, results in zip(expected[0], found["results"], strict=True):
            assert own == pytest.approx({one["label"]: one["score"] for one in results}, abs=1e-4)
        several = server.answer("/zero-shot", {**body, "multi_label": True})["results"][0]
        logits = dict(zip(LABELS[0], ALL[name]["logits"][0][0], strict=True))
        for one in several:
            assert 1 / (1 + np.exp(-logits[one["label"]])) == pytest.approx(one["score"], abs=1e-4)
        reworded = server.answer(
            "/zero-shot",
            {"inputs": TEXTS[0], "labels": ["late"], "hypothesis_template": "a {} ferry"},
        )
        plain = server.answer("/zero-shot", {"inputs": TEXTS[0], "labels": ["a late ferry"]})
        assert plain["results"][0][0]["score"] == reworded["results"][0][0]["score"]
        assert 404 == server.post("/classify", {"inputs": "a"}).status


def test_multi_label_scores():
    """Each label has a score of its own, and a single label always."""
    row = np.array([[0.0], [2.0]], np.float32)
    found = label_scores(row, ["a", "b"], multi_label=True)
    assert [("b", pytest.approx(0.880797)), ("a", 0.5)] == [(o.label, o.score) for o in found]
    (single,) = label_scores(row[:1], ["a"], multi_label=False)
    assert 0.5 == single.score


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architecture_type": "bi-encoder"}, "architecture_type"),
        ({"scorer_type": "hopfield"}, "scorer_type"),
        ({"pooling_strategy": "rms"}, "pooling_strategy"),
        ({"pooling_strategy": "pass"}, "cross-attn"),
        ({"scorer_type": "cross-attn"}, "pooling_strategy = pass"),
        ({"use_lstm": True}, "use_lstm"),
        ({"use_calibrator": True}, "use_calibrator"),
        ({"class_token_index": 3}, "class_token_index"),
        ({"encoder_config": None}, "save_pretrained"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"encoder_config": {"model_type": "modernbert"}}, "use_segment_embeddings"),
    ],
)
def test_checkpoints_that_are_refused(tmp_path, settings, named):
    with pytest.raises(CheckpointError, match=named):
        read_source(checkpoint(tmp_path / "checkpoint", **settings))
