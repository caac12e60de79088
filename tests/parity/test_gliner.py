"""Zero-shot entities: the entities of GLiNER's own code for checkpoints of its layouts, which were recorded.

`gliner_checkpoints` makes the checkpoints and recorded the entities.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.__main__ import main as export
from export.goldens import run_torch
from model.checkpoints.errors import CheckpointError
from model.checkpoints.source import read_source
from service.core.decode import EntitySpan
from service.core.encode import Encoder
from service.core.labelled_entities import label_windows, labelled_entities, word_ids
from service.engines.engine import Engine, Reply
from service.errors import InvalidInput, QuartetError, TooLarge
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.labelled_entities import LabelledEntities
from tests.conftest import run_export
from tests.e2e.conftest import serving
from tests.json_files import edit_json
from tests.parity.gliner_checkpoints import CASES, LABELS, RECORDED, TEXTS, THRESHOLDS, save
from tests.served import engine_of
from tests.service.fakes import ticket

ALL = json.loads(RECORDED.read_text(encoding="utf-8"))
CASE = "spans-deberta-lstm"
EXPORTED = (CASE, "tokens-modernbert")
Results = list[list[Any]]


def checkpoint(folder: Path, case: str = CASE, **settings: Any) -> Path:
    save(folder, case, ALL[case]["shapes"])
    edit_json(folder / "gliner_config.json", **settings)
    return folder


@pytest.fixture(scope="module", params=EXPORTED)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def bundle(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gliner")
    run_export(checkpoint(folder / "checkpoint", case), folder / "bundle", "--precision", "fp32")
    return folder / "bundle"


def compute(bundle: Path, *tasks: Any, **settings: Any) -> list[Reply[Any] | QuartetError]:
    """Return the replies of tasks that run at the same time, or their errors."""

    async def run(engine: Engine, task: Any) -> Reply[Any] | QuartetError:
        try:
            return await engine.answer(task, ticket())
        except QuartetError as error:
            return error

    async def run_all() -> list[Reply[Any] | QuartetError]:
        async with engine_of(bundle, **settings) as engine:
            return [*await asyncio.gather(*(run(engine, task) for task in tasks))]

    return asyncio.run(run_all())


def check(text: str, expected: Results, found: Sequence[EntitySpan]) -> None:
    spans = [[one.entity, one.start, one.end] for one in found]
    assert [[label, start, end] for label, _, start, end in expected] == spans
    scores = [one.score for one in found]
    np.testing.assert_allclose(scores, [score for _, score, _, _ in expected], atol=1e-4)
    assert all(one.word == text[one.start : one.end] for one in found)


def recorded(case: str) -> Iterator[tuple[str, list[str], bool, Results]]:
    """Yield a text, labels, whether entities nest, and the entities of the reference."""
    options = itertools.product(LABELS, (False, True))
    for (labels, nested), results in zip(options, ALL[case]["results"], strict=True):
        for text, expected in zip(TEXTS, results, strict=True):
            yield text, labels, nested, expected


@pytest.mark.parametrize("name", CASES)
def test_entities_of_the_reference(tmp_path, name):
    """Flat and nested entities of several sets of labels, in one batch of PyTorch: GLiNER's spans, scores to 1e-4."""
    source = read_source(checkpoint(tmp_path / "checkpoint", name))
    encoder, cases = Encoder(source.tokenizer, source.max_length), [*recorded(name)]
    prompt = source.model.described["entities"].label_prompt
    items = [
        label_windows(encoder, [text], word_ids(encoder, labels), prompt)[0]
        for text, labels, _, _ in cases
    ]
    outputs = run_torch(source.model, [item.windows[0] for item in items])
    for (text, labels, nested, expected), item, own in zip(cases, items, outputs, strict=True):
        options = {"threshold": THRESHOLDS[name[:5]], "nested": nested}
        found = labelled_entities(
            item.windows,
            [own["entities"]],
            text,
            labels=labels,
            max_width=prompt.max_width,
            **options,
        )
        check(text, expected, found)


@pytest.mark.slow
def test_sets_of_labels_share_a_batch(case, bundle):
    """Requests with different labels at the same time have the reference's entities."""
    cases, threshold = [*recorded(case)], THRESHOLDS[case[:5]]
    replies = compute(
        bundle,
        *(
            LabelledEntities(inputs=[text], labels=labels, nested=nested, threshold=threshold)
            for text, labels, nested, _ in cases
        ),
    )
    assert max(reply.timing.batch_size for reply in replies) > 2
    for (text, _, _, expected), reply in zip(cases, replies, strict=True):
        check(text, expected, reply.results[0])


@pytest.mark.slow
def test_a_long_text_is_read_in_windows(case, bundle):
    """Entities of a text's parts are found at their places in the whole, each once, with offsets of the whole."""
    text = " ".join([TEXTS[0], TEXTS[4]] * 12) + " 😀 " + TEXTS[0]
    (labels, *_), threshold = LABELS, THRESHOLDS[case[:5]]
    tasks = [
        LabelledEntities(inputs=[text], labels=labels, threshold=threshold, offset_unit=unit)
        for unit in ("code_point", "utf16")
    ]
    code_points, utf16 = compute(bundle, *tasks)

    (found,) = code_points.results
    assert code_points.usage.windows > 3
    assert all(one.word == text[one.start : one.end] for one in found)
    assert found
    assert all(a.end <= b.start for a, b in itertools.pairwise(found))
    assert len(text) * 0.9 < found[-1].end <= len(text)
    moved = [
        (b.start - a.start, b.end - a.end) for a, b in zip(found, utf16.results[0], strict=True)
    ]
    assert {(0, 0), (1, 1)} <= {*moved}


def one_label(count: int) -> LabelledEntities:
    return LabelledEntities(inputs=["a"], labels=[f"label {number}" for number in range(count)])


@pytest.mark.slow
def test_requests_that_are_refused(bundle):
    """Missing labels, labels for a model with its own, and too many of them are refused with what to do."""
    plain = EntityRecognition(inputs=["a"])
    without, many, costly, short = compute(
        bundle,
        plain,
        one_label(100),
        LabelledEntities(inputs=["a"], labels=["b" * 2000]),
        LabelledEntities(inputs=[TEXTS[4] * 20], labels=["b"], truncate=False),
        max_characters_per_input=1900,
    )
    assert isinstance(without, InvalidInput)
    assert '"labels": [' in without.message
    assert isinstance(many, InvalidInput)
    assert "name fewer or shorter labels" in many.message
    assert isinstance(costly, TooLarge)
    assert "labels[0]" in costly.message
    assert isinstance(short, InvalidInput)
    assert "truncate is false" in short.message


@pytest.mark.slow
def test_http(bundle, case, tasks_bundle):
    """`/ner` with labels, its faults, and the label set of each request."""
    with serving(bundle, "--provider", "cpu", "--threads", "1") as server:
        body = {"inputs": [*TEXTS], "labels": LABELS[0], "threshold": THRESHOLDS[case[:5]]}
        answer = server.answer("/ner", body)
        assert "entities" == answer["head"]
        found = [
            [EntitySpan(**{"entity": one.pop("entity_group"), **one}) for one in entities]
            for entities in answer["results"]
        ]
        for text, expected, own in zip(TEXTS, ALL[case]["results"][0], found, strict=True):
            check(text, expected, own)
        for change, named in (
            ({"labels": None}, "threshold needs labels"),
            ({"labels": []}, "labels"),
            ({"labels": ["a", " "]}, "labels[1]"),
            ({"threshold": 2}, "threshold"),
            ({"aggregation_strategy": "none"}, "aggregation_strategy"),
        ):
            reply = server.post("/ner", {**body, **change})
            assert 422 == reply.status, reply.body
            assert named in reply.body.decode(), reply.body
        reply = server.post("/ner", {"inputs": "a"})
        assert 422 == reply.status
        assert "labels" == reply.json()["error"]["param"]
    if case == CASE:
        with serving(tasks_bundle, "--provider", "cpu", "--threads", "1") as server:
            reply = server.post("/ner", {"inputs": "a", "labels": ["city"]})
            assert 404 == reply.status
            assert "leave out labels" in reply.body.decode()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"span_mode": "conv_share"}, "span_mode"),
        ({"subtoken_pooling": "mean"}, "subtoken_pooling"),
        ({"words_splitter_type": "spacy"}, "words_splitter_type"),
        ({"labels_encoder": "x"}, "labels_encoder"),
        ({"encoder_config": None}, "save_pretrained"),
        ({"max_width": 0}, "max_width"),
        ({"max_width": 65}, "max_width"),
        ({"class_token_index": 3}, "class_token_index"),
        ({"num_rnn_layers": 0}, "rnn"),
    ],
)
def test_checkpoints_that_are_refused(tmp_path, settings, named):
    with pytest.raises(CheckpointError, match=named):
        read_source(checkpoint(tmp_path / "checkpoint", **settings))


def test_no_graph_for_cuda(tmp_path, capsys):
    folder = checkpoint(tmp_path / "checkpoint")
    assert 0 != export([str(folder), str(tmp_path / "out"), "--precision", "fp32", "fp16"])
    assert "leave out fp16" in "".join(capsys.readouterr())
