"""Hugging Face's Inference API over HTTP, where huggingface_hub's client does not reach."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.client_calls.records import TEXTS
from tests.e2e.conftest import Server, serving

pytestmark = pytest.mark.e2e

MASKED = ["Ada drew a [MASK].", "It [MASK] in [MASK]."]
QUESTION = {"question": "What did Ada draw?", "context": "In Turin, Ada drew a comet. It rained."}


@pytest.fixture(scope="module")
def server(tasks_bundle: Path) -> Iterator[Server]:
    with serving(tasks_bundle, "--max-inputs-per-request", 8) as running:
        yield running


def results(server: Server, path: str, **body: object) -> Any:
    return server.answer(path, body)["results"]


def test_lists(server):
    """A list of texts is answered by a list of what each text alone is answered by."""
    path = "/hf/pipeline/"
    labels = {"candidate_labels": "art, weather"}
    for task, inputs, parameters, nested in (
        ("text-classification", TEXTS, {"top_k": 2}, True),
        ("token-classification", TEXTS, {"aggregation_strategy": "max"}, False),
        ("feature-extraction", TEXTS, {"normalize": False}, True),
        ("fill-mask", MASKED, {"top_k": 2}, False),
        ("zero-shot-classification", TEXTS, labels, False),
    ):
        found = server.answer(path + task, {"inputs": inputs, "parameters": parameters})
        alone = [
            server.answer(path + task, {"inputs": one, "parameters": parameters}) for one in inputs
        ]
        if nested:
            alone = [one for (one,) in alone]
        assert len(TEXTS) == len(found), task
        if task == "feature-extraction":
            np.testing.assert_allclose(found, alone, atol=1e-6)
        else:
            assert _plain(alone) == _plain(found), task


def _plain(value: Any) -> Any:
    """Return a result with rounded numbers."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [*map(_plain, value)] if isinstance(value, list) else value


def test_masks(server):
    """A text with several mask tokens has a list of tokens for each."""
    found = server.answer("/hf/pipeline/fill-mask", {"inputs": MASKED[1]})
    assert [5, 5] == [len(tokens) for tokens in found]
    assert {"score", "token", "token_str", "sequence"} == set(found[0][0])


def test_ways_to_name_a_task(server):
    """The path, the head in the path or the body, the parameters, and the inputs name the task."""
    text, masked = {"inputs": TEXTS[0]}, {"inputs": MASKED[0]}
    (labels,) = results(server, "/classify", inputs=TEXTS[0])
    for path, body in (
        ("/hf/pipeline/text-classification", text),
        ("/hf/pipeline/sentiment-analysis/tasks", text),
        ("/hf/pipeline/text-classification/tasks@1/sentiment", text),
        ("/hf/models/tasks/sentiment", text),
        ("/hf/models/tasks/sentiment/pipeline/text-classification", text),
        ("/hf/models/tasks", {**text, "head": "sentiment"}),
        ("/hf", {**text, "model": "tasks@1", "head": "sentiment"}),
        ("/hf", {**text, "parameters": {"function_to_apply": "softmax"}}),
    ):
        assert [labels] == server.answer(path, body), path
    (entities,) = results(server, "/ner", inputs=TEXTS[0], aggregation_strategy="simple")
    for path in ("/hf/pipeline/ner", "/hf/models/tasks/entities"):
        assert entities == server.answer(path, text)
    assert entities == server.answer("/hf", {**text, "parameters": {"ignore_labels": ["O"]}})
    (tokens,) = results(server, "/fill-mask", inputs=MASKED[0])
    assert tokens == server.answer("/hf", masked)
    options = {"options": {"wait_for_model": True, "use_cache": False}}
    assert tokens == server.answer("/hf/models/tasks", masked | options)
    ((span,),) = results(server, "/qa", **QUESTION)
    assert span == server.answer("/hf", {"inputs": QUESTION})
    vectors = server.answer("/embed", {"inputs": TEXTS})["embeddings"]
    np.testing.assert_allclose(
        server.answer("/hf", {"inputs": TEXTS, "normalize": True}), vectors, atol=1e-6
    )
    cosines = results(server, "/similarity", source=TEXTS[0], inputs=TEXTS)
    sentences = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    np.testing.assert_allclose(server.answer("/hf", {"inputs": sentences}), cosines, atol=1e-6)


def test_ignored_labels(server):
    """Entities of an ignored label have no result."""
    path, text = "/hf/pipeline/token-classification", " ".join(TEXTS * 8)
    found = server.answer(path, {"inputs": text})
    groups = sorted({one["entity_group"] for one in found})
    assert 2 == len(groups)
    parameters = {"ignore_labels": ["O", groups[0]]}
    kept = server.answer(path, {"inputs": text, "parameters": parameters})
    assert [one for one in found if one["entity_group"] != groups[0]] == kept


def test_answer_lengths(server):
    """`max_answer_len` limits the tokens of an answer, `max_question_len` the tokens read of the question."""
    path, long = "/hf/pipeline/question-answering", {**QUESTION, "question": "What rained? " * 8}

    def ask(**parameters):
        return server.answer(path, {"inputs": long, "parameters": parameters})

    assert len(ask(max_answer_len=1, top_k=1)["answer"].split()) == 1
    assert ask()["score"] != ask(max_question_len=2)["score"]
    assert ask()["score"] == ask(max_question_len=24)["score"]
    assert isinstance(ask(top_k=2), list)


@pytest.mark.parametrize(
    ("path", "more", "status", "named"),
    [
        ("text-classification", {"inputs": []}, 400, "inputs"),
        ("text-classification", {"inputs": ["a"] * 9}, 413, "inputs"),
        ("text-classification", {"parameters": {"padding": 1}}, 400, "padding"),
        ("text-classification", {"parameters": []}, 400, "an object"),
        ("text-classification", [], 400, "JSON object"),
        ("token-classification", {"parameters": {"ignore_labels": []}}, 400, '"O"'),
        ("question-answering", {}, 400, "inputs"),
        ("question-answering", {"inputs": QUESTION, "parameters": {"max_seq_len": 9}}, 400, "max_seq_len"),
        ("question-answering", {"inputs": QUESTION, "parameters": {"align_to_words": False}}, 400, "whole"),
        ("feature-extraction", {"prompt_name": "other"}, 400, "prompt"),
        ("feature-extraction", {"encoding_format": "base64"}, 400, "base64"),
        ("feature-extraction", {"truncation_direction": "left"}, 400, "right"),
        ("feature-extraction", {"normalize": True, "parameters": {"normalize": True}}, 400, "normalize"),
        ("fill-mask", {"inputs": "a [MASK]", "parameters": {"targets": ["zebra"]}}, 400, "targets"),
        ("zero-shot-classification", {}, 400, "parameters"),
        ("zero-shot-classification", {"parameters": {"candidate_labels": ","}}, 400, "labels"),
        (
            "zero-shot-classification",
            {"inputs": ["a"] * 5, "parameters": {"candidate_labels": ["b", "c"]}},
            413,
            "10 texts",
        ),
        ("translation", {}, 404, "feature-extraction"),
        ("fill-mask/huge", {"inputs": "a [MASK]"}, 404, "huge"),
        ("/models/tasks/huge", {"inputs": "a [MASK]"}, 404, "huge"),
        ("/models/tasks/masks", {"inputs": "a [MASK]", "model": "huge"}, 400, "model"),
        ("/models/tasks", {}, 400, "/hf/pipeline/TASK"),
        ("", "text", 400, "JSON object"),
        ("/nothing", {}, 404, "nothing"),
    ],
)  # fmt: skip
def test_errors(server, path, more, status, named):
    """They have the API's form, with our messages."""
    body = {"inputs": "a", **more} if isinstance(more, dict) else more
    response = server.post(f"/hf{path}" if path[:1] in ("", "/") else f"/hf/pipeline/{path}", body)
    assert (status, ["error"]) == (response.status, [*response.json()])
    assert named in response.json()["error"]
