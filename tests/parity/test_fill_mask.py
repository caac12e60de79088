"""Masks are filled in over HTTP as by transformers' pipeline, with the real MiniLM's encoder and a random head."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from service.core import bundle
from service.core.cpu import CPU
from service.core.encode import Encoder
from service.core.packing import each, pack
from service.core.session import Session, SessionOptions
from tests import samples
from tests.conftest import run_export
from tests.e2e.conftest import Server, serving
from tests.workers import BuiltOnce

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG = f"{samples.text(300, seed=1)} a [MASK] {samples.text(400, seed=2)} [MASK]"
TEXTS = [
    "Paris is the [MASK] of France.",
    "[MASK]",
    "[MASK], [MASK] and [MASK]!",
    "Isn't it [MASK]? I 'd say so , yes .",
    "Café owners in São Paulo paid 3,50 € for a [MASK] 😀.",
    "the [SEP] token stays [MASK]",
    samples.text(60, seed=3) + " [MASK]",
]


@pytest.fixture(scope="module")
def checkpoint(minilm_folder: Path, built_once: BuiltOnce) -> Path:
    """MiniLM as a BertForMaskedLM of transformers, whose head is random."""

    def build(folder: Path) -> None:
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM.from_pretrained(minilm_folder)
        with torch.no_grad():
            for name, parameter in model.cls.named_parameters():
                if "decoder.weight" not in name:
                    parameter.add_(0.3 * torch.randn(parameter.shape))
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(minilm_folder).save_pretrained(folder)

    return built_once("checkpoints/minilm-masked", build)


@pytest.fixture(scope="module")
def exported(checkpoint: Path, built_once: BuiltOnce) -> Path:
    """A full bundle of it, fp32 and int8."""
    return built_once(
        "bundles/minilm-masked", lambda path: run_export(checkpoint, path, "--max-length", "256")
    )


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[Server]:
    with serving(exported, "--precision", "fp32") as it:
        yield it


def check(expected: list[Any], found: list[Any]) -> None:
    """Check that texts have the same tokens for each mask token, in an order that rounding may change."""
    masks = [
        [tokens if isinstance(tokens[0], list) else [tokens] for tokens in results]
        for results in (expected, found)
    ]
    for one, other in zip(*(itertools.chain(*results) for results in masks), strict=True):
        scores = [token["score"] for token in one]
        assert scores == pytest.approx([token["score"] for token in other], abs=1e-4)
        known = {token["token"]: token for token in other}
        for token in one:
            if token["token"] in known:
                same = known[token["token"]]
                assert {**token, "score": pytest.approx(token["score"], abs=1e-4)} == same
            else:
                assert scores[-1] == pytest.approx(token["score"], abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 40}, {"targets": ["capital", "city", "##s", "CITY"], "top_k": 9}],
    ids=["default", "many", "targets"],
)
def test_answers(options: dict[str, Any], checkpoint: Path, server: Server) -> None:
    """Tokens, texts and scores are the pipeline's, together and each text alone."""
    pipeline = transformers.pipeline("fill-mask", model=str(checkpoint), device=-1)
    expected = [pipeline(text, **options) for text in TEXTS]
    check(expected, server.answer("/fill-mask", {"inputs": TEXTS, **options})["results"])
    for text, one in zip(TEXTS, expected, strict=True):
        check([one], server.answer("/fill-mask", {"inputs": text, **options})["results"])


def test_truncated_text(checkpoint: Path, server: Server) -> None:
    """A text that is cut is the pipeline's with truncation."""
    pipeline = transformers.pipeline("fill-mask", model=str(checkpoint), device=-1)
    text = TEXTS[0] + samples.text(400, seed=4)
    cut = {"truncation": True, "max_length": 256}
    expected = [pipeline(text, tokenizer_kwargs=cut)]
    answer = server.answer("/fill-mask", {"inputs": text, "truncate": True})
    assert [0] == answer["usage"]["truncated"]
    check(expected, answer["results"])


def test_windows(server: Server) -> None:
    """In a long text each mask token is filled in, and `sequence` is the whole text."""
    (masks,) = server.answer("/fill-mask", {"inputs": LONG, "top_k": 1})["results"]
    assert 2 == len(masks)
    assert all(len(found["sequence"]) > 0.9 * len(LONG) for (found,) in masks)


def test_lines_and_errors(server: Server) -> None:
    """NDJSON and `on_error` work as in the other tasks."""
    body = {"inputs": ["plain", TEXTS[0], "a <mask>"], "on_error": "null"}
    whole = server.answer("/fill-mask", body)
    assert [None, None] == [whole["results"][0], whole["results"][2]]
    assert [(0, "invalid"), (2, "invalid")] == [(e["index"], e["code"]) for e in whole["errors"]]
    assert "<mask> is the mask token of other models" in whole["errors"][1]["message"]
    reply = server.post("/fill-mask", body, headers={"Accept": "application/x-ndjson"})
    lines = [json.loads(line) for line in reply.body.splitlines()]
    by_index = {line["index"]: line["result"] for line in lines[:-1]}
    assert {0: None, 1: whole["results"][1], 2: None} == by_index
    assert whole["errors"] == lines[-1]["errors"]
    bad = server.post("/fill-mask", {"inputs": body["inputs"]})
    assert (422, "inputs[0]") == (bad.status, bad.json()["error"]["param"])


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_batches(precision: str, exported: Path) -> None:
    """Logits of a mask token are the same alone as in a batch."""
    opened = bundle.load(exported)
    (graph,) = [
        g for g in opened.manifest.graphs if (g.precision, g.layout) == (precision, "packed")
    ]
    session = Session(opened, graph, CPU, SessionOptions(1))
    encoder = Encoder.from_file(opened.file("tokenizer.json"), opened.manifest.max_length)
    packed = pack([item.windows[0] for item in encoder.texts([*TEXTS, LONG, "no mask"])])
    together = session.run(packed)["fill-mask"]
    alone = np.concatenate([session.run(one)["fill-mask"] for one in each(packed)])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5 * max(1, np.abs(alone).max()))
