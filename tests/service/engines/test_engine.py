"""One engine on the tiny bundle: what each task answers, counts and refuses."""

import asyncio
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import Split

from service.api.json_responses import JsonResponse
from service.api.responses import ModelsResponse
from service.core import bundle, decode
from service.core.encode import Cut, Encoded, Encoder, parse_tokenizer
from service.core.session import SessionOptions, open_session
from service.engines import engine
from service.engines.device import Device, RunsOn
from service.engines.engine import INLINE_CHARACTERS, Engine, EngineTask, Ticket
from service.engines.local_device import Runner
from service.engines.model_state import ServedModel
from service.engines.task_plan import Limits
from service.errors import InferenceFailed, InvalidInput, Overloaded, TooLarge, UnknownHead
from service.scheduling.entries import Entry, EntryOutcome, OnOutcome, Outcome
from service.scheduling.load import Load
from service.scheduling.text_threads import THREADS, TextThreads
from service.settings import Settings
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.question_answering import QuestionAnswering
from tests import samples
from tests.json_files import editing
from tests.served import engine_of
from tests.service.fakes import ticket

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHORT = [samples.text(words, seed=words) for words in (1, 9, 30)]
LONG = samples.text(700, seed=3)


def classify(inputs: list[str], **options: Any) -> Classification:
    return Classification(inputs=inputs, **options)


def ner(inputs: list[str], **options: Any) -> EntityRecognition:
    fields = {"aggregation_strategy": "simple", "stride": 16, **options}
    return EntityRecognition(inputs=inputs, **fields)


def qa(questions: list[str], contexts: list[str], **options: Any) -> QuestionAnswering:
    fields = {"top_k": 3, "stride": 16, **options}
    return QuestionAnswering(questions=questions, contexts=contexts, **fields)


def embed(inputs: list[str], **options: Any) -> Embedding:
    return Embedding(inputs=inputs, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny(tiny_bundle: Path) -> AsyncIterator[Engine]:
    """The tiny bundle's engine, open."""
    async with engine_of(tiny_bundle) as engine:
        yield engine


@pytest.fixture(scope="module")
def runner(tiny_bundle: Path) -> Runner:
    """The tiny bundle's session, without a batcher."""
    opened = bundle.load(tiny_bundle)
    return Runner(opened, {1: open_session(opened, provider="cpu", options=SessionOptions(1))})


def outputs(runner: Runner, encoded: Encoded, head: str) -> list[NDArray[np.float32]]:
    """The outputs of a head for each window, computed alone."""
    return [runner.run(1, [window])[0][head] for window in encoded.windows]


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=0, abs_tol=1e-5)


def alike(one: Any, other: Any) -> bool:
    """The same, but for the last digits of numbers, however deep these are."""
    if isinstance(one, float | np.floating):
        return close(one, other)
    if isinstance(one, list | tuple | np.ndarray):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


# -- answers --------------------------------------------------------------------------------------


async def test_classify(tiny, runner):
    """Each text gets every label, as decoded from its own logits."""
    reply = await tiny.answer(classify(SHORT), ticket())
    head = tiny.manifest.heads["sentiment"]
    assert (("sentiment",), len(SHORT)) == (reply.heads, len(reply.results))
    for found, encoded in zip(reply.results, tiny.encoder.texts(SHORT), strict=True):
        logits = outputs(runner, encoded, "sentiment")
        expected = decode.classify(logits, [1], labels=head.labels, problem_type=None, top_k=None)
        assert [label.label for label in expected] == [label.label for label in found]
        assert all(close(a.score, b.score) for a, b in zip(expected, found, strict=True))
        assert close(1, sum(label.score for label in found))


async def test_a_faster_graph(tiny, monkeypatch):
    """Where a bundle has an int8 graph and a CPU computes another one, the log names the setting."""
    for precision, expected in (("fp32", {"faster": "precision=int8"}), ("int8", {})):
        runs_on = replace(tiny.runs_on, precision=precision)
        monkeypatch.setattr(tiny, "model", replace(tiny.model, runs_on=runs_on))
        assert expected == tiny.faster


@pytest.mark.parametrize("repetitions", [60, 2 * INLINE_CHARACTERS])
async def test_a_tokenizer_that_panics(tiny, repetitions, monkeypatch):
    """A regular expression that gives up, on the loop or in a thread, is an error of the service."""
    plain = tiny.encoder.tokenizer
    broken = Tokenizer.from_str(plain.to_str())
    broken.pre_tokenizer = Split(Regex("(x+x+)+y"), "isolated")
    monkeypatch.setattr(tiny, "encoder", Encoder(broken, tiny.encoder.max_length))
    text = "x" * repetitions
    with pytest.raises(InferenceFailed, match=r"the tokenizer .* fails on a text: .*limit"):
        await tiny.tokenize([text], None, ticket())
    with pytest.raises(InferenceFailed, match="fails on a text"):
        await tiny.answer(classify([text]), ticket())


async def test_calibrated(tiny, tiny_bundle, tmp_path):
    """Calibrated scores follow from logits divided by the head's temperature; other scores stay the same."""
    folder = tmp_path / "calibrated"
    shutil.copytree(tiny_bundle, folder)
    with editing(folder / "manifest.json") as manifest:
        manifest["heads"]["sentiment"]["calibration_temperature"] = 2.0
    logits = classify(SHORT, function_to_apply="none")
    raw = classify(SHORT)
    async with engine_of(folder) as engine:
        halved = await engine.answer(logits.model_copy(update={"calibrated": True}), ticket())
        scores = await engine.answer(raw.model_copy(update={"calibrated": True}), ticket())
        same = await engine.answer(raw, ticket())

    whole, before = await tiny.answer(logits, ticket()), await tiny.answer(raw, ticket())
    assert [[(a.label, a.score / 2) for a in labels] for labels in whole.results] == halved.results
    assert alike(before.results, same.results)
    assert not alike(before.results, scores.results)
    assert all(close(1, sum(a.score for a in labels)) for labels in scores.results)


async def test_the_description_has_the_memory_of_the_graph_that_runs(tiny_bundle, tmp_path):
    """`GET /models` can show it as JSON, which has only strings as keys."""
    folder = tmp_path / "stated"
    shutil.copytree(tiny_bundle, folder)
    with editing(folder / "manifest.json") as manifest:
        for graph in manifest["graphs"]:
            graph["memory"] = {"opened": 5, "batches": {"128": 7, "1024": 9}}
    async with engine_of(folder) as engine:
        response = JsonResponse({"models": [engine.describe()], "devices": []})
        response.finish()
    (model,) = ModelsResponse.model_validate_json(response.body).models
    assert model.memory is not None
    assert model.memory.model_dump() == manifest["graphs"][0]["memory"]


async def test_pairs(tiny, runner):
    """A text with its pair is one sequence of two segments, and another text than either."""
    reply = await tiny.answer(classify(SHORT, text_pair=SHORT[::-1], top_k=1), ticket())
    encoded = tiny.encoder.pairs(SHORT, SHORT[::-1])
    logits = [outputs(runner, item, "sentiment")[0] for item in encoded]
    best = [tiny.manifest.heads["sentiment"].labels[row.argmax()] for row in logits]
    assert [[label] for label in best] == [
        [found.label for found in labels] for labels in reply.results
    ]
    assert sum(item.tokens for item in encoded) == reply.usage.tokens


async def test_named_head(tiny):
    """A head that is named answers: here labels that do not exclude each other."""
    reply = await tiny.answer(classify(SHORT), ticket(), ("topics",))
    assert ("topics",) == reply.heads
    assert {"sea", "sky", "trade", "craft"} == {label.label for label in reply.results[0]}
    assert not close(1, sum(label.score for label in reply.results[0]))


async def test_ner(tiny):
    """Entities of a text in windows are words of that text, in its order, once each."""
    reply = await tiny.answer(ner([*SHORT, LONG]), ticket())
    for text, entities in zip([*SHORT, LONG], reply.results, strict=True):
        assert [e.word for e in entities] == [text[e.start : e.end] for e in entities]
        edges = [edge for e in entities for edge in (e.start, e.end)]
        assert edges == sorted(edges)
    assert max(entity.end for entity in reply.results[-1]) > 0.9 * len(LONG)


@pytest.mark.parametrize("name", samples.STRANGE)
async def test_spans_count_code_points(name, tiny):
    """Whatever a text is written in, spans are slices of it as the client sent it."""
    text = samples.STRANGE[name]
    entities = (await tiny.answer(ner([text]), ticket())).results[0]
    answers = (await tiny.answer(qa(["Who?"], [text]), ticket())).results[0]
    assert entities
    assert [e.word for e in entities] == [text[e.start : e.end] for e in entities]
    assert answers
    assert [a.answer for a in answers] == [text[a.start : a.end] for a in answers]


async def test_qa(tiny, runner):
    """Answers are spans of the context, best first, as decoded from all its windows at once."""
    reply = await tiny.answer(qa(["Who sold it?"] * 2, [SHORT[2], LONG]), ticket())
    head = tiny.manifest.heads["answers"]
    encoded = tiny.encoder.questions(
        ["Who sold it?"], [LONG], stride=16, max_query_tokens=head.max_query_tokens
    )[0]
    expected = decode.qa(
        encoded.windows,
        outputs(runner, encoded, "answers"),
        LONG,
        top_k=3,
        handle_impossible_answer=False,
        null_threshold=0,
        max_answer_tokens=head.max_answer_tokens,
    )
    assert [a.answer for a in expected] == [a.answer for a in reply.results[1]]
    assert all(close(a.score, b.score) for a, b in zip(expected, reply.results[1], strict=True))
    assert [3, 3] == [len(answers) for answers in reply.results]


async def test_embed(tiny, runner):
    """Vectors have length one, or the head's setting, or the request's."""
    unit = np.stack((await tiny.answer(embed(SHORT), ticket())).results)
    plain = np.stack((await tiny.answer(embed(SHORT, normalize=False), ticket())).results)
    expected = [outputs(runner, item, "embeddings")[0] for item in tiny.encoder.texts(SHORT)]
    np.testing.assert_allclose(plain, expected, rtol=0, atol=1e-5)
    norms = np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, plain / norms, rtol=0, atol=1e-6)
    assert np.float32 == unit.dtype


# -- windows --------------------------------------------------------------------------------------


def weighted(rows: Sequence[NDArray[np.float32]], encoded: Encoded) -> NDArray[np.float64]:
    """The mean of the windows' outputs, by hand: each counts with its tokens."""
    lengths = [len(window) for window in encoded.windows]
    total = sum(row.astype(float) * n for row, n in zip(rows, lengths, strict=True))
    return total / sum(lengths)


async def test_windows_of_a_label(tiny, runner):
    """A text in windows is labelled by the mean of their logits, weighted by their tokens."""
    work = classify([LONG, SHORT[0]], truncate="window", stride=20)
    reply = await tiny.answer(work, ticket())
    encoded = tiny.encoder.texts([LONG], truncate="window", stride=20)[0]
    logits = weighted(outputs(runner, encoded, "sentiment"), encoded)
    scores = np.exp(logits) / np.exp(logits).sum()
    expected = dict(zip(tiny.manifest.heads["sentiment"].labels, scores, strict=True))
    assert len(encoded.windows) > 1
    assert all(close(expected[label.label], label.score) for label in reply.results[0])


async def test_usage(tiny):
    """Tokens and windows are of all inputs, special tokens included; texts that were cut are named."""
    texts = [LONG, SHORT[0], LONG]
    windows = tiny.encoder.texts(texts, truncate="window", stride=16)
    whole = (await tiny.answer(ner(texts), ticket())).usage
    cut = (await tiny.answer(ner(texts, truncate=True), ticket())).usage
    tokens = sum(item.tokens for item in windows)
    assert (tokens, sum(len(item.windows) for item in windows), []) == (
        whole.tokens,
        whole.windows,
        whole.truncated,
    )
    assert (2 * 512 + len(windows[1].windows[0]), 3, [0, 2]) == (
        cut.tokens,
        cut.windows,
        cut.truncated,
    )


async def test_timing(tiny):
    """A reply knows where its time went, and the batch that it rode in."""
    timing = (await tiny.answer(embed(SHORT), ticket())).timing
    assert min(timing.encode_s, timing.queue_s, timing.inference_s, timing.decode_s) > 0
    assert 0 < timing.return_s < 1
    assert 1 <= timing.batch_size <= 3
    assert timing.batch_tokens >= 3


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "head", "said", "param"),
    [
        (classify(SHORT), "mood", "no classification head 'mood'.* it has: sentiment, topics", "head"),
        (embed(SHORT), "entities", "no embedding head 'entities'", "head"),
        (classify(SHORT, calibrated=True), None, "head sentiment has no calibration_temperature", "calibrated"),
        (classify(SHORT, text_pair=SHORT, truncate="window"), None, "pairs have no windows", "truncate"),
        (ner(SHORT, stride=256), None, "tiny@1 takes strides of at most 255", "stride"),
        (embed(SHORT, dimensions=65), None, "embeddings has 64 dimensions, 65 were", "dimensions"),
    ],
    ids=["head", "task", "calibrated", "pairs", "stride", "dimensions"],
)  # fmt: skip
async def test_refused(tiny, task, head, said, param):
    """The error has the field and what the model has."""
    kind = UnknownHead if head else InvalidInput
    with pytest.raises(kind, match=said) as caught:
        await tiny.answer(task, ticket(), *[(head,)] if head else [])
    assert param == caught.value.param


async def test_too_long(tiny):
    """If truncation is off, the error has every text that is too long, and nothing is computed."""
    said = r"inputs\[1\], inputs\[3\]: longer than 512 tokens"
    with pytest.raises(InvalidInput, match=said) as caught:
        await tiny.answer(classify([SHORT[0], LONG, SHORT[1], LONG], truncate=False), ticket())
    assert "inputs[1]" == caught.value.param
    asked = replace(ticket(), place="context")
    with pytest.raises(InvalidInput, match=r"^context: longer than 512 tokens") as caught:
        await tiny.answer(qa(["Who?"], [LONG], truncate=False), asked)
    assert "context" == caught.value.param


# -- what it hands on -----------------------------------------------------------------------------


NO_LOAD = Load()
RUNS_ON = RunsOn("fp32", "packed", "CPUExecutionProvider", None, "onnxruntime 1")


def device(submit: Any, max_queue_tokens: int = 10_000, load: Load = NO_LOAD) -> Device:
    """A device that does with entries what a test says."""
    fields = {"submit": submit, "max_queue_tokens": max_queue_tokens, "load": lambda: load}
    return cast(Device, SimpleNamespace(**fields))


def engine_before(path: Path, device: Device) -> Engine:
    """A bundle's engine in front of some device."""
    texts = bundle.read_texts(bundle.load(path))
    encoder = Encoder(parse_tokenizer(texts.tokenizer), texts.manifest.max_length)
    model = ServedModel("tiny@1", str(path), texts.sha256, "current", 0.0, RUNS_ON)
    return Engine(texts, encoder, model, device, TextThreads(), Limits.of(Settings()))


def zeros(entry: Entry) -> Outcome:
    return Outcome({entry.heads[0]: np.zeros(64, np.float32)}, 0.0, 0.0, 1, 1, 1.0)


def submit(failed: dict[int, EntryOutcome]) -> Any:
    """Make a device's function that has zeros for all entries but some, by index, which fail."""

    async def submit(
        entries: Sequence[Entry], on_outcome: OnOutcome = lambda *_: None
    ) -> list[EntryOutcome]:
        outcomes = [failed.get(index) or zeros(entry) for index, entry in enumerate(entries)]
        for entry, outcome in zip(entries, outcomes, strict=True):
            on_outcome(entry, outcome)
        return outcomes

    return submit


async def test_entries(tiny_bundle):
    """An entry for each window, with all that the ticket says."""
    submitted = []
    told_before = []

    async def submit(entries):
        assert [(0, sum(entry.tokens for entry in entries))] == told_before
        submitted.extend(entries)
        return [*map(zeros, entries)]

    def tell():
        told_before.append((len(submitted), asked.tokens))

    engine = engine_before(tiny_bundle, device(submit))
    asked = Ticket("r", deadline=12.5, priority=1, tenant="t", on_submit=tell)
    await engine.answer(embed([SHORT[0], LONG], truncate="window", stride=0), asked)
    windows = [
        w for e in engine.encoder.texts([SHORT[0], LONG], truncate="window") for w in e.windows
    ]
    assert [len(window) for window in windows] == [entry.tokens for entry in submitted]
    told = {(e.bundle, e.request_id, e.deadline, e.priority, e.tenant, e.heads) for e in submitted}
    assert {("tiny@1", "r", 12.5, 1, "t", ("embeddings",))} == told


def rows(entry: Entry) -> Outcome:
    """The first numbers of the vector of each text are the number of its tokens and the text's first id."""
    lengths, start, vectors = entry.window.lengths or [entry.tokens], 0, []
    for length in lengths:
        vectors.append([length, entry.window.input_ids[start + 1], *[0] * 62])
        start += length
    found = np.array(vectors, np.float32)
    return Outcome({"embeddings": found if entry.window.lengths else found[0]}, 0.0, 0.0, 1, 1, 1.0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_short_texts_are_submitted_together(tiny_bundle, streamed):
    """A request's texts of one window are in entries of similar lengths, which give the results of each text alone.

    Each slot gets an entry, of no more texts and tokens than the device allows.
    """
    submitted = []

    async def submit(entries, on_outcome=lambda *_: None):
        submitted[:] = entries
        outcomes = [*map(rows, entries)]
        for entry, outcome in zip(entries, outcomes, strict=True):
            on_outcome(entry, outcome)
        return outcomes

    texts = [SHORT[0], LONG, *(SHORT[1] + " more" * count for count in range(9)), LONG]
    on_result = (lambda *_: None) if streamed else None

    async def answers(load):
        engine = engine_before(tiny_bundle, device(submit, load=load))
        task = embed(texts, truncate="window", normalize=True)
        found = await engine.answer(task, ticket(), on_result=on_result)
        return found.results, [entry.window.lengths for entry in submitted]

    alone, windows = await answers(Load())
    assert [()] == [*dict.fromkeys(windows)]
    for slots, sizes in ((1, [8, 2]), (2, [6, 3])):
        together, windows = await answers(
            Load({"tiny@1": 1e9}, slots=slots, entry_size=8, batch_tokens=999)
        )
        assert sizes == [len(own) for own in windows if own]
        np.testing.assert_array_equal(alone, together)
    for rate, tokens in ((50_000.0, 999), (1e9, 50)):
        few, windows = await answers(Load({"tiny@1": rate}, entry_size=8, batch_tokens=tokens))
        assert 1 < len([own for own in windows if own])
        assert all(sum(own) <= 50 for own in windows)
        np.testing.assert_array_equal(alone, few)


async def test_a_text_that_fails_among_others_fails_alone(tiny_bundle):
    """The other texts of its entry have results, and it has the error."""

    async def submit(entries):
        (entry,) = entries
        assert 3 == len(entry.window.lengths)
        return [replace(rows(entry), failed={0: InferenceFailed("not finite")})]

    load = Load({"tiny@1": 1e9}, entry_size=8, batch_tokens=999)
    engine = engine_before(tiny_bundle, device(submit, load=load))
    texts = [SHORT[1] + " more", SHORT[1], SHORT[1] + " more words"]
    found = await engine.answer(embed(texts), replace(ticket(), isolate_errors=True))
    assert ([1], [False, True, False]) == ([*found.errors], [one is None for one in found.results])
    with pytest.raises(InferenceFailed, match="not finite"):
        await engine.answer(embed(texts), ticket())


async def test_results_are_reported_as_they_come(tiny_bundle):
    """An input's result is reported when its last window is done, in any order, and the reply has all results."""
    told = []

    async def submit(entries, on_outcome):
        backwards = [*entries][::-1]
        for number, entry in enumerate(backwards, 1):
            on_outcome(
                entry, Outcome({"embeddings": np.full(64, number, np.float32)}, 0, 0, 1, 1, 1)
            )
        return [*map(zeros, entries)]

    engine = engine_before(tiny_bundle, device(submit))
    windows = len(engine.encoder.texts([LONG], truncate="window")[0].windows)
    assert windows > 1
    reply = await engine.answer(
        embed([SHORT[0], LONG, SHORT[1]], truncate="window", normalize=False),
        ticket(),
        on_result=lambda index, vector: told.append((index, float(vector[0]))),
    )
    assert [2, 1, 0] == [index for index, _ in told]
    assert (1.0, windows + 2.0) == (told[0][1], told[2][1])
    assert [value for _, value in sorted(told)] == [float(row[0]) for row in reply.results]


TASKS: dict[str, Callable[..., EngineTask[Any]]] = {
    "classify": classify,
    "ner": ner,
    "qa": lambda inputs, **options: qa(["Who drew a comet?"] * len(inputs), inputs, **options),
    "embed": embed,
}
each_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


@each_task
async def test_reported_and_returned_results_are_equal(task, tiny):
    """The callback gets the same results as the caller gets at the end."""
    told = {}
    work = task([*SHORT, LONG])
    plain = await tiny.answer(work, ticket())
    streamed = await tiny.answer(work, ticket(), on_result=told.__setitem__)
    assert [0, 1, 2, 3] == sorted(told)
    assert plain.usage == streamed.usage
    for index, result in enumerate(plain.results):
        np.testing.assert_equal(told[index], streamed.results[index])
        if task is embed:
            np.testing.assert_allclose(told[index], result, rtol=0, atol=1e-5)
        else:
            assert len(result) == len(told[index])


@pytest.mark.parametrize("in_lines", [False, True], ids=["whole", "lines"])
@pytest.mark.parametrize(("most", "thread"), [(1100, "MainThread"), (100, "text-")])
async def test_large_answers_are_decoded_in_a_thread(in_lines, most, thread, tiny, monkeypatch):
    """The event loop's thread calls the callback."""
    threads, told = [], []
    monkeypatch.setattr(engine, "INLINE_TOKENS", most)
    whole = decode.embed

    def decoded(*arguments, **named):
        threads.append(threading.current_thread().name)
        return whole(*arguments, **named)

    monkeypatch.setattr(decode, "embed", decoded)
    on_result = (lambda *_: told.append(threading.current_thread().name)) if in_lines else None
    reply = await tiny.answer(embed([LONG], truncate="window"), ticket(), on_result=on_result)
    assert 100 < reply.usage.tokens <= 1100
    assert [True] == [name.startswith(thread) for name in threads]
    assert ["MainThread"] * in_lines == told
    assert len(reply.results) == 1


async def test_many_results_at_once_are_decoded_in_threads(tiny, monkeypatch):
    """The event loop's thread decodes a limited number of tokens of a stream before it serves other requests."""
    threads, whole = Counter(), decode.embed

    def decoded(*arguments, **named):
        threads[threading.current_thread().name[:5]] += 1
        return whole(*arguments, **named)

    monkeypatch.setattr(engine, "INLINE_TOKENS", 10)
    monkeypatch.setattr(decode, "embed", decoded)
    reply = await tiny.answer(embed(["the sea"] * 40), ticket(), on_result=lambda *_: None)
    assert 40 == len(reply.results) == sum(threads.values())
    assert 40 > threads["text-"] > 10


OnEncoding = Callable[[Callable[[list[str]], Any]], None]


@pytest.fixture
def on_encoding(monkeypatch: pytest.MonkeyPatch) -> OnEncoding:
    """Install a function that is called with texts before they are encoded: as one letter each if they are long."""
    whole = Encoder.windows

    def install(call: Callable[[list[str]], Any]) -> None:
        def windows(self: Encoder, texts: list[str], **named: Any) -> list[Cut]:
            call(texts)
            return whole(self, ["a" if len(t) > 1000 else t for t in texts], **named)

        monkeypatch.setattr(Encoder, "windows", windows)

    return install


@pytest.mark.parametrize(
    ("characters", "thread"), [(INLINE_CHARACTERS, "MainThread"), (INLINE_CHARACTERS + 1, "text-")]
)
async def test_long_texts_are_encoded_in_a_thread(characters, thread, tiny, on_encoding):
    """Long texts are encoded in a thread, while the event loop serves other requests."""
    threads = []
    on_encoding(lambda _: threads.append(threading.current_thread().name))
    await tiny.answer(embed(["a" * characters]), ticket())
    (name,) = threads
    assert name.startswith(thread)


@pytest.mark.parametrize("isolate_errors", [False, True])
async def test_more_than_may_ever_wait_is_not_encoded(
    isolate_errors, tiny_bundle, on_encoding, monkeypatch
):
    """The tokens of a request are counted as they are encoded, and none is submitted."""
    encoded = []
    on_encoding(encoded.extend)
    monkeypatch.setattr(engine, "PART_CHARACTERS", 8)
    asked = Ticket("r", deadline=12.5, isolate_errors=isolate_errors)
    with pytest.raises(TooLarge, match="at least 27 tokens exceed max_queue_tokens, 20"):
        await engine_before(tiny_bundle, device(None, 20)).answer(embed(["!!!!!!!"] * 9), asked)
    assert 3 == len(encoded)


async def test_a_request_canceled_before_its_thread_costs_nothing(tiny, on_encoding):
    """The long texts of canceled requests are never encoded."""
    release, encoded = threading.Event(), []
    on_encoding(lambda texts: release.wait(30) and encoded.append(len(texts)))
    long = "a" * (INLINE_CHARACTERS + 1)
    asked = [
        asyncio.create_task(tiny.answer(embed([long] * n), ticket())) for n in range(1, THREADS + 2)
    ]
    await asyncio.sleep(0)  # all have asked, and the last has found no thread
    asked[-1].cancel()
    await asyncio.wait([asked[-1]])
    release.set()
    await asyncio.gather(*asked[:-1])
    assert [*range(1, THREADS + 1)] == sorted(encoded)


async def test_a_long_text_that_would_be_late_is_refused_before_it_is_encoded(
    tiny_bundle, on_encoding
):
    """The texts of the same tenant that wait are expected to take longer than it has; another tenant's are not."""
    encoded = []
    release = threading.Event()
    on_encoding(lambda texts: release.wait(30) and encoded.append(texts))
    idle = cast(Device, SimpleNamespace(submit=submit({}), max_queue_tokens=10**6, load=Load))
    made = engine_before(tiny_bundle, idle)
    long = embed(["a" * 250_000])
    patient = Ticket("r", deadline=time.monotonic() + 300, tenant="crawler")
    crowd = [asyncio.create_task(made.answer(long, patient)) for _ in range(20)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="estimated completion"):
        await made.answer(long, replace(patient, deadline=time.monotonic() + 5))
    other = replace(patient, deadline=time.monotonic() + 5, tenant="app")
    document = embed(["b" * 5000])
    asked = asyncio.create_task(made.answer(document, other))
    release.set()
    await asyncio.gather(asked, *crowd)
    assert 21 == len(encoded)
    assert encoded.index(document.inputs) < 10


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], [[]]),
        ([7], [[7]]),
        ([10], [[10]]),
        ([3, 3, 4, 1], [[3, 3, 4], [1]]),
        ([11, 1, 12, 13], [[11], [1], [12], [13]]),
        ([0, 10, 0, 0, 11, 0], [[0, 10, 0, 0], [11], [0]]),
    ],
)
async def test_large_requests_are_encoded_in_parts(sizes, parts, monkeypatch):
    """Every input is in one part, and no part has more characters than it may, but for one input alone."""
    monkeypatch.setattr(engine, "PART_CHARACTERS", 10)
    assert parts == [sizes[part] for part in engine._parts(sizes)]


async def test_parts_make_no_difference(tiny, monkeypatch):
    """Cut in parts, a request of every task is answered as it is in one, and every bad input is named."""
    texts = [*SHORT, LONG, *SHORT]

    async def answers():
        return [
            await tiny.answer(classify(texts, text_pair=texts[::-1]), ticket()),
            await tiny.answer(ner(texts), ticket()),
            await tiny.answer(qa(texts, texts[::-1]), ticket()),
            await tiny.answer(embed(texts), ticket()),
        ]

    whole = await answers()
    monkeypatch.setattr(engine, "PART_CHARACTERS", 50)
    for one, other in zip(whole, await answers(), strict=True):
        assert one.usage == other.usage
        assert alike(one.results, other.results)
    with pytest.raises(InvalidInput, match=r"inputs\[1\], inputs\[3\]: longer than"):
        await tiny.answer(embed(["a", LONG, "a", LONG], truncate=False), ticket())


async def test_a_large_request_lets_others_go_between(tiny, on_encoding, monkeypatch):
    """Requests of many parts take turns in the threads, and one that leaves is not encoded to its end."""
    encoded = []
    on_encoding(lambda texts: encoded.extend(text[0] for text in texts))
    monkeypatch.setattr(engine, "PART_CHARACTERS", INLINE_CHARACTERS)
    asked = [
        asyncio.create_task(tiny.answer(embed([name * INLINE_CHARACTERS] * 50), ticket()))
        for name in "abcd"
    ]
    while encoded.count("a") < 3:
        await asyncio.sleep(0)
    asked[0].cancel()
    await asyncio.wait(asked)
    assert encoded.count("a") < 50
    assert {"a", "b", "c", "d"} == set(encoded[:20])


async def test_run_splits_a_batch(tiny, runner):
    """A slot's run gives each window its own rows of every head."""
    windows = [item.windows[0] for item in tiny.encoder.texts(SHORT)]
    results = runner.run(1, windows)
    assert [(len(window), 5) for window in windows] == [r["entities"].shape for r in results]
    assert [(64,)] * 3 == [result["embeddings"].shape for result in results]


async def test_description(tiny):
    """It tells what it is, what it runs on and what it can."""
    told = tiny.describe()
    assert ("tiny@1", "tiny", "1", 512, "fp32", "packed") == tuple(
        told[key] for key in ("id", "name", "version", "max_length", "precision", "layout")
    )
    assert ["sentiment", "topics", "entities", "answers", "embeddings"] == [*told["heads"]]
    assert "unclear: no data set is named" == told["commercial_use"]
    assert dict.fromkeys(told["heads"], told["commercial_use"]) == told["commercial_use_by_head"]
    assert tiny.fingerprint.startswith(f"{tiny.sha256[:12]};precision=fp32;provider=CPU")


# Requests that spare the good inputs


def sparing() -> Ticket:
    return replace(ticket(), isolate_errors=True)


@each_task
@pytest.mark.parametrize("in_lines", [False, True], ids=["whole", "lines"])
async def test_texts_that_are_too_long_have_no_result(task, in_lines, tiny):
    """The others are answered as if they were not there, and counted alone."""
    good = await tiny.answer(task(SHORT, truncate=False), ticket())
    texts = [LONG, SHORT[0], SHORT[1], LONG, LONG, SHORT[2], LONG]
    told = []
    on_result = (lambda index, result: told.append((index, result))) if in_lines else None
    reply = await tiny.answer(task(texts, truncate=False), sparing(), on_result=on_result)
    assert [0, 3, 4, 6] == [index for index, result in enumerate(reply.results) if result is None]
    assert all(map(alike, good.results, [reply.results[index] for index in (1, 2, 5)]))
    assert [0, 3, 4, 6] == sorted(reply.errors)
    assert all("longer than 512 tokens" in error.message for error in reply.errors.values())
    assert good.usage == reply.usage
    if in_lines:
        assert [*range(7)] == sorted(index for index, _ in told)
        assert {0, 3, 4, 6} == {index for index, result in told if result is None}


@each_task
async def test_nothing_but_bad_texts(task, tiny):
    """Without a good text, no batch runs, and the request succeeds."""
    reply = await tiny.answer(task([LONG] * 2, truncate=False), sparing())
    assert [None, None] == reply.results
    assert (0, 0, []) == (reply.usage.tokens, reply.usage.windows, reply.usage.truncated)
    assert (0, 0) == (reply.timing.batch_size, reply.timing.inference_s)


async def test_a_bad_text_in_a_large_request_shifts_no_other(tiny, monkeypatch):
    """Inputs are encoded part by part: each keeps its index, and each part its good ones."""
    monkeypatch.setattr(engine, "PART_CHARACTERS", 60)
    texts = [samples.text(4, seed=seed) for seed in range(30)]
    expected = (await tiny.answer(embed(texts), ticket())).results
    for index in (0, 7, 8, 29):
        texts[index] = LONG
    reply = await tiny.answer(embed(texts, truncate=False), sparing())
    assert [0, 7, 8, 29] == sorted(reply.errors)
    for index, vector in enumerate(reply.results):
        assert (vector is None) is (index in reply.errors)
        assert vector is None or alike(expected[index], vector)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_one_failed_entry_fails_the_request(streamed, tiny_bundle):
    """Unless errors are isolated, the first entry that fails fails the request, and no later result is reported."""
    reported = []
    on_result = (lambda index, _: reported.append(index)) if streamed else None
    engine = engine_before(tiny_bundle, device(submit({1: InferenceFailed("no number")})))
    with pytest.raises(InferenceFailed, match="no number"):
        await engine.answer(embed(SHORT[:3]), ticket(), on_result=on_result)
    assert ([0] if streamed else []) == reported


@pytest.mark.parametrize("in_lines", [False, True], ids=["whole", "lines"])
async def test_a_window_that_fails_takes_its_text_along_and_no_other(in_lines, tiny_bundle):
    """A text with a failed window fails once, with every outcome of its other windows."""
    failure = InferenceFailed("no number")
    # of the second text, which has several windows
    tiny = engine_before(tiny_bundle, device(submit({1: failure, 2: failure})))
    told = []
    on_result = (lambda index, result: told.append((index, result))) if in_lines else None
    work = embed([SHORT[0], LONG, SHORT[1]], truncate="window")
    reply = await tiny.answer(work, sparing(), on_result=on_result)
    assert [False, True, False] == [result is None for result in reply.results]
    assert {1: failure} == reply.errors
    if in_lines:
        assert [(0, False), (1, True), (2, False)] == [(i, r is None) for i, r in told]
