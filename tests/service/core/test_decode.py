"""Logits become the answers that a slower or a better known implementation gives."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.special
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from sentence_transformers.util import quantize_embeddings
from transformers.pipelines.token_classification import (
    AggregationStrategy,
    TokenClassificationPipeline,
)

from service.core import decode
from service.core.decode import (
    AGGREGATION_STRATEGIES,
    AnswerSpan,
    EntitySpan,
    LabelScore,
    activate,
    classify,
    embed,
    embed_rows,
    fill_mask,
    find_masks,
    ner,
    qa,
    sigmoid,
    softmax,
)
from service.core.encode import Encoded, Encoding

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "E-ORG", "S-ORG")

# sums of two eighths are exact, and whole numbers often equal, to test how equals are ordered
eighths = st.integers(-80, 80).map(lambda eighth: eighth / 8) | st.integers(-1, 1).map(float)
words_of_pieces = st.lists(
    st.lists(st.text("aé漢😀", min_size=1, max_size=3), min_size=1, max_size=3).map("|".join),
    min_size=1,
    max_size=9,
)


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def join(words: Sequence[str]) -> str:
    return " ".join(words).replace("|", "")


def encode(words: Sequence[str], sequence: int = 0) -> Encoding:
    """Words with "|" between their tokens, as the first text or as the second after a question."""
    pieces = [(index, piece) for index, word in enumerate(words) for piece in word.split("|")]
    rows, end = [], -1
    for previous, (word, piece) in zip([None, *pieces], pieces, strict=False):
        start = end + (previous is None or previous[0] != word)
        end = start + len(piece)
        rows.append((start, end, word, sequence))
    special = (0, 0, -1, -1)
    before = [special, (0, 1, 0, 0), special] if sequence else [special]
    table = np.array([*before, *rows, special])
    return Encoding(
        input_ids=np.arange(len(table)),
        token_type_ids=np.zeros(len(table), np.int64),
        offsets=table[:, :2].astype(np.int32),
        words=table[:, 2].astype(np.int32),
        sequence=table[:, 3].astype(np.int8),
    )


def cut(
    encoding: Encoding, logits: NDArray[np.float32], capacity: int, stride: int
) -> tuple[list[Encoding], list[NDArray[np.float32]]]:
    """Windows of `room` text tokens of which neighbours share `stride`, and their logits."""
    before = np.flatnonzero(encoding.sequence == encoding.sequence.max())[0]
    size = len(encoding) - before - 1
    windows, parts = [], []
    for start in range(before, before + max(size - stride, 1), capacity - stride):
        stop = min(start + capacity, len(encoding) - 1)
        rows = np.r_[:before, start:stop, -1]
        columns = ("input_ids", "token_type_ids", "offsets", "words", "sequence")
        windows.append(Encoding(*(getattr(encoding, column)[rows] for column in columns)))
        parts.append(logits[rows])
    return windows, parts


def one_hot(encoding: Encoding, *labels: str) -> NDArray[np.float32]:
    """Logits that give each text token its label, and special tokens one that must not count."""
    logits = np.zeros((len(encoding), len(LABELS)), np.float32)
    logits[:, LABELS.index("B-LOC")] = 9
    rows = np.flatnonzero(encoding.sequence == 0)
    logits[rows] = 9 * np.eye(len(LABELS))[[LABELS.index(label) for label in labels]]
    return logits


@given(arrays(np.float32, (3, 5), elements=st.floats(-(2**99), 2**99, width=32)))
def test_activations_agree_with_scipy(logits):
    """Softmax and sigmoid are scipy's, in float32, also where a naive one overflows.

    The argument of sigmoid's exp is rounded, which is a relative error of its result: arguments here are of up to 80.
    """
    small = np.clip(logits, -80, 80)
    for ours, expected, rtol in (
        (softmax(logits), scipy.special.softmax(logits, axis=-1), 1e-6),
        (sigmoid(small), scipy.special.expit(small), 1e-5),
    ):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, expected, rtol=rtol)
    assert sigmoid(floats(-1e30, 1e30)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("problem_type", "logits", "scores"),
    [
        ("regression", [2.5, -1.5], [2.5, -1.5]),
        ("regression", [2.5], [2.5]),
        ("multi_label_classification", [0, 0], [0.5, 0.5]),
        ("single_label_classification", [0, 0, 0, 0], [0.25] * 4),
        ("single_label_classification", [0], [0.5]),
        (None, [0, 0, 0, 0], [0.25] * 4),
        (None, [0], [0.5]),
    ],
)
def test_activation(problem_type, logits, scores):
    """The problem type chooses the activation, and a single label is never a softmax."""
    assert activate(floats(*logits), problem_type).tolist() == scores


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification", None])
def test_a_named_function_is_applied_whatever_the_problem_type(problem_type):
    """Softmax, sigmoid or nothing: as transformers' pipeline computes them."""
    logits = floats(0.0, 2.0)
    scores = {name: activate(logits, problem_type, name) for name in decode.FUNCTIONS}
    odds = np.exp(logits)
    np.testing.assert_allclose(odds / odds.sum(), scores["softmax"], rtol=1e-6)
    np.testing.assert_allclose(odds / (1 + odds), scores["sigmoid"], rtol=1e-6)
    np.testing.assert_array_equal(logits, scores["none"])


class TestClassify:
    @pytest.mark.parametrize(
        ("threshold", "top_k", "expected"),
        [
            (None, None, "cba"),
            (None, 1, "c"),
            (None, 2, "cb"),
            (None, 4, "cba"),
            (0.5, None, "cb"),
            (0.5, 1, "c"),
            (0.500001, None, "c"),
            (2, None, ""),
        ],
    )
    def test_threshold(self, threshold, top_k, expected):
        """Labels of a smaller score are left out, which may leave none."""
        labels = classify(
            [floats(-30, 0, 30)],
            [4],
            labels=["a", "b", "c"],
            problem_type="multi_label_classification",
            top_k=top_k,
            threshold=threshold,
        )
        assert expected == "".join(label.label for label in labels)

    def test_temperature(self):
        """A temperature divides the logits; without one they are as they are, to the last digit."""
        options = {"labels": ["a", "b"], "problem_type": None, "top_k": None}
        logits = floats(0.3, 1.7)

        found = classify([logits], [4], temperature=2.0, **options)

        assert classify([logits / np.float32(2)], [4], **options) == found
        assert classify([logits], [4], **options) == classify(
            [logits], [4], temperature=None, **options
        )

    def test_equal_scores(self):
        """Labels with equal scores come in label order."""
        names = [str(index) for index in range(100)]

        labels = classify([floats(*[0, 1] * 50)], [4], labels=names, problem_type=None, top_k=None)

        assert [label.label for label in labels] == names[1::2] + names[::2]

    def test_weighs_windows_by_tokens(self):
        """The logits of several windows are averaged by tokens, before they are activated."""
        [label] = classify(
            [floats(1), floats(5)], [30, 10], labels=["a"], problem_type="regression", top_k=None
        )

        assert label == LabelScore("a", 2)


class TestEmbed:
    @given(arrays(np.float32, 7, elements=st.floats(-100, 100, width=32)), st.integers(1, 10**6))
    def test_one_window_is_itself(self, vector, length):
        """A single window passes through bit by bit."""
        ours = embed([vector], [length], normalize=False, dimensions=None)

        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, vector)

    def test_weighs_windows_by_tokens(self):
        """The vectors of several windows are averaged by tokens."""
        windows = [floats(1, 0), floats(5, 8)]

        assert embed(windows, [30, 10], normalize=False, dimensions=None).tolist() == [2, 2]

    def test_cuts_before_it_normalises(self):
        """The vector is cut first, so that what is left has length 1."""
        vector = embed([floats(3, 4, 12)], [5], normalize=True, dimensions=2)

        assert vector.tolist() == floats(0.6, 0.8).tolist()

    def test_zero_vector(self):
        """A zero vector has no direction and stays zero."""
        assert embed([floats(0, 0)], [5], normalize=True, dimensions=None).tolist() == [0, 0]

    @pytest.mark.parametrize(("normalize", "dimensions"), [(True, None), (True, 33), (False, 100)])
    def test_rows(self, normalize, dimensions):
        """The vectors of several texts at once have the bits of each alone."""
        vectors = np.random.default_rng(0).normal(size=(64, 384)).astype(np.float32)
        vectors[5] = 0
        options = {"normalize": normalize, "dimensions": dimensions}
        alone = [embed([vector], [5], **options) for vector in vectors]
        np.testing.assert_array_equal(alone, embed_rows(vectors, **options), strict=True)

    @pytest.mark.parametrize("dimensions", [-1, 0, 4])
    def test_impossible_dimensions(self, dimensions):
        """Dimensions that the vector does not have are refused."""
        with pytest.raises(ValueError, match="from 1 to 3"):
            embed([floats(1, 2, 3)], [5], normalize=True, dimensions=dimensions)


def by_pipeline(
    words: Sequence[str], encoding: Encoding, logits: NDArray[np.float32], strategy: str
) -> list[tuple[str, float, int, int]]:
    """What transformers' own pipeline makes of the scores."""
    pieces = ["[CLS]"]
    for word in words:
        first, *others = word.split("|")
        pieces += [first, *("##" + other for other in others)]
    pipeline: Any = object.__new__(TokenClassificationPipeline)
    pipeline.model = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate(LABELS))))
    pipeline.tokenizer = SimpleNamespace(
        unk_token_id=-1,
        convert_ids_to_tokens=pieces.__getitem__,
        convert_tokens_to_string=" ".join,
        _tokenizer=SimpleNamespace(model=SimpleNamespace(continuing_subword_prefix="##")),
    )
    tokens = pipeline.gather_pre_entities(
        join(words),
        encoding.input_ids,
        softmax(logits),
        encoding.offsets.tolist(),
        encoding.sequence < 0,
        AggregationStrategy(strategy),
    )
    entities = pipeline.aggregate(tokens, AggregationStrategy(strategy))
    named = [(entity.get("entity_group", entity.get("entity")), entity) for entity in entities]
    return [(name, e["score"], e["start"], e["end"]) for name, e in named if name != "O"]


def has_close_call(encoding: Encoding, logits: NDArray[np.float32]) -> bool:
    """Whether the best labels of some word are equal on average, but for the order of adding them up."""
    scores = softmax(logits)
    for word in set(encoding.words.tolist()) - {-1}:
        rows = scores[encoding.words == word]
        mean = rows.astype(np.float64).mean(axis=0)
        best = np.flatnonzero(mean > mean.max() - 1e-6)
        if (rows[:, best] != rows[:, best[:1]]).any():
            return True
    return False


def tag(
    windows: Sequence[Encoding],
    logits: Sequence[NDArray[np.float32]],
    text: str,
    strategy: str = "simple",
) -> list[EntitySpan]:
    return ner(windows, logits, text, labels=LABELS, aggregation_strategy=strategy)


class TestNer:
    @pytest.mark.parametrize("strategy", AGGREGATION_STRATEGIES)
    @given(data=st.data(), words=words_of_pieces)
    def test_agrees_with_transformers(self, strategy, data, words):
        """Every strategy finds what transformers finds, with the text's own surface as word."""
        encoding, text = encode(words), join(words)
        shape = (len(encoding), len(LABELS))
        logits = data.draw(arrays(np.float32, shape, elements=eighths))
        assume(strategy != "average" or not has_close_call(encoding, logits))

        entities = tag([encoding], [logits], text, strategy)

        expected = by_pipeline(words, encoding, logits, strategy)
        assert [(entity.entity, entity.start, entity.end) for entity in entities] == [
            (name, start, end) for name, _, start, end in expected
        ]
        assert [entity.score for entity in entities] == pytest.approx(
            [score for _, score, *_ in expected], rel=1e-6
        )
        assert all(entity.word == text[entity.start : entity.end] for entity in entities)

    @given(
        data=st.data(),
        words=words_of_pieces,
        capacity=st.integers(1, 9),
        strategy=st.sampled_from(AGGREGATION_STRATEGIES),
    )
    def test_windows_that_agree(self, data, words, capacity, strategy):
        """A text cut into windows whose logits agree gives what it gives whole."""
        encoding, text = encode(words), join(words)
        shape = (len(encoding), len(LABELS))
        logits = data.draw(arrays(np.float32, shape, elements=eighths))
        windows, parts = cut(encoding, logits, capacity, data.draw(st.integers(0, capacity - 1)))

        in_windows = tag(windows, parts, text, strategy)

        assert in_windows == tag([encoding], [logits], text, strategy)

    def test_reads_the_window_with_most_context(self):
        """Where windows overlap, a token is read where its nearest edge is farthest."""
        words = ["a", "b", "c", "d", "e", "f", "g"]
        encoding = encode(words)
        windows, _ = cut(encoding, one_hot(encoding, *["O"] * 7), capacity=5, stride=3)
        logits = [one_hot(windows[0], *["B-PER"] * 5), one_hot(windows[1], *["B-LOC"] * 5)]

        entities = tag(windows, logits, join(words), "none")

        # c is 3rd from the end of one and 1st of the other, d 2nd and 2nd (a tie), e 1st and 3rd
        assert "".join(entity.word for entity in entities) == "abcdefg"
        assert [entity.entity for entity in entities] == ["B-PER"] * 4 + ["B-LOC"] * 3

    def test_tokens_of_one_character(self):
        """Tokens with equal offsets (a decomposed letter) stay apart, in windows too."""
        encoding = encode(["한", "글"])
        rows = [0, 1, 1, 1, 2, 2, 3]
        columns = ("token_type_ids", "offsets", "words", "sequence")
        encoding = Encoding(np.arange(7), *(getattr(encoding, column)[rows] for column in columns))
        logits = one_hot(encoding, "B-PER", "I-PER", "I-PER", "B-LOC", "I-LOC")
        windows, parts = cut(encoding, logits, capacity=3, stride=1)

        entities = tag(windows, parts, "한 글", "none")

        assert [e.entity for e in entities] == ["B-PER", "I-PER", "I-PER", "B-LOC", "I-LOC"]
        assert [e.word for e in entities] == ["한", "한", "한", "글", "글"]

    def test_zero_width_tokens(self):
        """A token without text is passed over, and does not part what stands around it."""
        encoding = encode(["Ada", "x", "King"])
        offsets = encoding.offsets.copy()
        offsets[2] = [4, 4]
        encoding = replace(encoding, offsets=offsets)
        logits = one_hot(encoding, "B-PER", "B-LOC", "I-PER")

        [entity] = tag([encoding], [logits], "Ada x King")

        assert (entity.entity, entity.word) == ("PER", "Ada x King")

    @pytest.mark.parametrize("strategy", AGGREGATION_STRATEGIES)
    def test_empty_text(self, strategy):
        """A text without tokens has no entities."""
        encoding = encode([])

        assert tag([encoding], [one_hot(encoding)], "", strategy) == []

    def test_unknown_strategy(self):
        """A strategy that does not exist is refused, and those that do are named."""
        encoding = encode([])

        with pytest.raises(ValueError, match="none, simple, first, average, max"):
            tag([encoding], [one_hot(encoding)], "", "last")

    def test_entity_fields(self):
        """An entity carries plain Python values, ready for JSON."""
        words = ["😀", "Zoë"]
        encoding = encode(words)
        logits = one_hot(encoding, "O", "B-PER")

        [entity] = tag([encoding], [logits], join(words))

        assert entity == EntitySpan("PER", entity.score, "Zoë", 2, 5)
        assert [type(field) for field in entity] == [str, float, str, int, int]


def by_two_loops(
    windows: Sequence[Encoding],
    logits: Sequence[NDArray[np.float32]],
    context: str,
    top_k: int,
    max_answer_tokens: int,
    null_threshold: float | None,
) -> list[tuple[float, int, int]]:
    """All answers as (score, start, end), by trying every pair of tokens."""
    edges: dict[int, tuple[int, int]] = {}
    everything = []
    for window, part in zip(windows, logits, strict=True):
        rows = np.flatnonzero(window.sequence == 1)
        everything.append(part[[0, *rows]])
        for (start, end), word in zip(
            window.offsets[rows].tolist(), window.words[rows], strict=True
        ):
            known = edges.get(word, (start, end))
            edges[word] = min(start, known[0]), max(end, known[1])
    normaliser = scipy.special.logsumexp(np.concatenate(everything, dtype=float), axis=0).sum()
    spans: dict[tuple[int, int], tuple[float, int, int, int, int]] = {}
    for window, part in zip(windows, logits, strict=True):
        rows = np.flatnonzero(window.sequence == 1)
        for first in rows:
            for last in range(first, min(first + max_answer_tokens, rows[-1] + 1)):
                place = int(window.input_ids[first]), int(window.input_ids[last])
                start, end = edges[window.words[first]][0], edges[window.words[last]][1]
                span = -float(part[first, 0]) - float(part[last, 1]), *place, start, end
                spans[place] = min(span, spans.get(place, span))
    same: dict[str, list[tuple[float, int, int]]] = {}
    for score, _, _, start, end in sorted(spans.values())[: 2 * top_k + 10]:
        same.setdefault(context[start:end].lower(), []).append((score, start, end))
    answers = sorted(
        (-float(scipy.special.logsumexp([-score for score, *_ in own])), *own[0][1:])
        for own in same.values()
    )
    if null_threshold is not None:
        null = min(float(part[0].sum()) for part in logits)
        wins = not answers or null + answers[0][0] > null_threshold
        better = sum(score <= -null for score, *_ in answers)
        answers.insert(0 if wins else max(better, 1), (-null, 0, 0))
    return [(np.exp(-score - normaliser), start, end) for score, start, end in answers]


def answer(
    windows: Sequence[Encoding], logits: Sequence[NDArray[np.float32]], context: str, **options: Any
) -> list[AnswerSpan]:
    """The best answer, or what the options say."""
    defaults = {
        "top_k": 1,
        "handle_impossible_answer": False,
        "null_threshold": 0,
        "max_answer_tokens": 30,
    }
    return qa(windows, logits, context, **(defaults | options))


def peaks(encoding: Encoding, start: int, end: int) -> NDArray[np.float32]:
    """Logits that are sure of a start and an end, counted in tokens of the context."""
    rows = np.flatnonzero(encoding.sequence == 1)
    logits = np.zeros((len(encoding), 2), np.float32)
    logits[rows[start], 0] = logits[rows[end], 1] = 12
    return logits


class TestQa:
    @given(
        data=st.data(),
        words=words_of_pieces,
        capacity=st.integers(1, 12),
        max_answer_tokens=st.integers(1, 8),
        top_k=st.integers(1, 40),
        null_threshold=st.none() | eighths,
    )
    def test_agrees_with_two_loops(
        self, data, words, capacity, max_answer_tokens, top_k, null_threshold
    ):
        """Answers, scores and their order equal the results of trying every pair of tokens."""
        encoding, context = encode(words, sequence=1), join(words)
        windows, parts = cut(
            encoding,
            np.zeros((len(encoding), 2), np.float32),
            capacity,
            data.draw(st.integers(0, capacity - 1)),
        )
        parts = [data.draw(arrays(np.float32, part.shape, elements=eighths)) for part in parts]

        answers = qa(
            windows,
            parts,
            context,
            top_k=top_k,
            handle_impossible_answer=null_threshold is not None,
            null_threshold=null_threshold or 0,
            max_answer_tokens=max_answer_tokens,
        )

        expected = by_two_loops(windows, parts, context, top_k, max_answer_tokens, null_threshold)[
            :top_k
        ]
        assert [(found.start, found.end) for found in answers] == [
            (start, end) for _, start, end in expected
        ]
        assert [found.score for found in answers] == pytest.approx(
            [score for score, *_ in expected], rel=1e-9
        )
        assert all(found.answer == context[found.start : found.end] for found in answers)

    @given(data=st.data(), words=words_of_pieces, max_answer_tokens=st.integers(1, 5))
    def test_windows_that_agree(self, data, words, max_answer_tokens):
        """Windows that share enough for any answer rank the spans as the whole context does."""
        encoding, context = encode(words, sequence=1), join(words)
        logits = data.draw(arrays(np.float32, (len(encoding), 2), elements=eighths))
        stride = data.draw(st.integers(max_answer_tokens - 1, 6))
        windows, parts = cut(encoding, logits, stride + data.draw(st.integers(1, 6)), stride)

        def ranked(windows, logits):
            answers = answer(windows, logits, context, top_k=9, max_answer_tokens=max_answer_tokens)
            return [(answer.start, answer.end) for answer in answers]

        assert ranked(windows, parts) == ranked([encoding], [logits])

    def test_one_softmax_over_all_windows(self):
        """One softmax covers the tokens of all windows and the [CLS] of each."""
        encoding = encode(["a", "b"], sequence=1)
        windows, logits = cut(encoding, np.zeros((6, 2), np.float32), capacity=1, stride=0)

        answers = answer(windows, logits, "a b", top_k=9)

        # two tokens and two [CLS], none more likely than another: a quarter for start and for end
        assert answers == [AnswerSpan("a", 1 / 16, 0, 1), AnswerSpan("b", 1 / 16, 2, 3)]

    def test_answers_that_read_the_same_are_one(self):
        """Their scores are added up, and they stand where the best of them does."""
        words = ["Rome", "or", "ro|me", "x"]
        encoding = encode(words, sequence=1)
        logits = np.full((len(encoding), 2), -20, np.float32)
        logits[[3, 5, 7], 0] = np.log([0.3, 0.2, 0.5])
        logits[[3, 6, 7], 1] = np.log([0.6, 0.3, 0.1])

        found = answer([encoding], [logits], join(words), top_k=9)

        # rome: 0.3 * 0.6 and 0.2 * 0.3; from the first to the second, 0.3 * 0.3, is another answer
        assert [(found.answer, found.start) for found in found[:2]] == [
            ("Rome", 0),
            ("Rome or rome", 0),
        ]
        assert [found.score for found in found[:2]] == pytest.approx([0.24, 0.09])
        assert len({found.answer.lower() for found in found}) == len(found) == 9

    @pytest.mark.parametrize(
        ("null_threshold", "answers"),
        [(1.5, ["", "a", "b"]), (2, ["a", "", "b"]), (2.5, ["a", "", "b"]), (-9, ["", "a", "b"])],
    )
    def test_null_threshold(self, null_threshold, answers):
        """The null answer leads if it beats the best span by more than the threshold."""
        encoding = encode(["a", "b"], sequence=1)
        logits = np.zeros((6, 2), np.float32)
        logits[0], logits[3] = 2, 1

        found = answer(
            [encoding],
            [logits],
            "a b",
            top_k=9,
            max_answer_tokens=1,
            handle_impossible_answer=True,
            null_threshold=null_threshold,
        )

        assert [answer.answer for answer in found] == answers

    def test_empty_context(self):
        """A context without tokens has no answer but the null answer."""
        encoding = encode([], sequence=1)
        logits = np.zeros((4, 2), np.float32)

        assert answer([encoding], [logits], "") == []
        assert answer([encoding], [logits], "", handle_impossible_answer=True) == [
            AnswerSpan("", 1, 0, 0)
        ]

    def test_tokens_without_text(self):
        """A token of zero width is no answer."""
        encoding = encode(["a", "b"], sequence=1)
        offsets = encoding.offsets.copy()
        offsets[3] = [0, 0]

        answers = answer(
            [replace(encoding, offsets=offsets)], [peaks(encoding, 0, 0)], "a b", top_k=9
        )

        assert [answer.answer for answer in answers] == ["b"]

    def test_answer_fields(self):
        """An answer carries plain Python values, ready for JSON."""
        words = ["😀", "Zoë"]
        encoding = encode(words, sequence=1)

        [found] = answer([encoding], [peaks(encoding, 1, 1)], join(words))

        assert found == AnswerSpan("Zoë", found.score, 2, 5)
        assert [type(field) for field in found] == [str, float, int, int]


@pytest.mark.parametrize(
    "text", ["", "plain", "é ü", "a 😀 b 👩‍👧 Oslo", "\U0001d49c" * 3 + "x", "\ud800 Oslo"]
)
def test_utf16_offsets_cut_as_javascript_does(text):
    """Every span of a text is found again in its UTF-16 code units."""
    spans = [
        decode.EntitySpan("LOC", 1.0, text[start:end], start, end)
        for start in range(len(text) + 1)
        for end in range(start, len(text) + 1)
    ]
    units = text.encode("utf-16-le", "surrogatepass")
    for span, found in zip(spans, decode.to_utf16(spans, text), strict=True):
        assert span._replace(start=found.start, end=found.end) == found
        cut = units[2 * found.start : 2 * found.end]
        assert span.word.encode("utf-16-le", "surrogatepass") == cut


def test_best_window_counts():
    """The score is the sigmoid of the highest logit; raw, the logit; of a regression, the logit."""
    windows = [np.float32([-1]), np.float32([2]), np.float32([0])]
    scores = [
        decode.relevance(windows, problem_type=None, raw=False),
        decode.relevance(windows, problem_type=None, raw=True),
        decode.relevance(windows, problem_type="regression", raw=False),
    ]
    assert [1 / (1 + math.exp(-2)), 2.0, 2.0] == pytest.approx(scores)


def test_cosines():
    """A cosine does not depend on the lengths of vectors; that with a zero vector is 0."""
    query = np.float32([3, 4])
    others = [np.float32([6, 8]), np.float32([-4, 3]), np.float32([0, 0])]
    assert [1.0, 0.0, 0.0] == pytest.approx(decode.cosines(query, others))
    assert [0.0] == decode.cosines(np.zeros(2, np.float32), others[:1])


def test_token_vectors():
    """Vectors of length 1, one window after the other, none for skipped tokens; zero stays zero."""
    windows = (np.float32([[3, 4], [0, 0], [1, 0]]), np.float32([[0, 2]]))
    ids = (np.array([2, 7, 8]), np.array([3]))
    found = decode.token_vectors(windows, ids, normalize=True, skip=[8, 9])
    assert [[0.6, 0.8], [0, 0], [0, 1]] == pytest.approx(found)
    assert np.float32 == found.dtype
    plain = decode.token_vectors(windows[:1], ids[:1], normalize=False)
    assert np.array_equal(windows[0], plain)


@pytest.mark.parametrize(("mean", "scores"), [(False, [11, -5, 0]), (True, [5.5, -2.5, 0])])
def test_maxsim(mean, scores):
    """The sum, or the mean, over the query's tokens of the best product with a document's token."""
    query = np.float32([[1, 0], [0, 2]])
    documents = np.float32([[3, 1], [1, 4]]), np.float32([[-1, -2]]), np.zeros((0, 2), np.float32)
    assert scores == decode.maxsim(query, documents, mean=mean)


class TestZeroShot:
    LOGITS = (np.float32([1, 3, 0]), np.float32([2, 1, 9]))  # contradiction, entailment, neutral

    def scores(self, labels: list[str], **options: Any) -> dict[str, float]:
        logits = self.LOGITS[: len(labels)]
        found = decode.zero_shot(logits, labels, entailment=1, contradiction=0, **options)
        assert sorted(found, key=lambda one: -one.score) == found
        return dict(found)

    def test_labels_that_exclude_each_other(self):
        """One softmax over the entailments."""
        expected = math.exp(3) / (math.exp(3) + math.exp(1))
        scores = self.scores(["a", "b"], multi_label=False)
        assert {"a": expected, "b": 1 - expected} == pytest.approx(scores)

    @pytest.mark.parametrize(("labels", "multi_label"), [(["a", "b"], True), (["a"], False)])
    def test_labels_with_scores_of_their_own(self, labels, multi_label):
        """Entailment against contradiction, also for a single label."""
        scores = self.scores(labels, multi_label=multi_label)
        assert 1 / (1 + math.exp(-2)) == pytest.approx(scores["a"])
        assert len(labels) == 1 or 1 / (1 + math.exp(1)) == pytest.approx(scores["b"])


class TestQuantize:
    VECTOR = np.array([0.5, -0.25, 0.0, 1.0, -1.0, 0.1, 0.2, -0.3, 0.7], np.float32)

    def test_float(self):
        """A vector of floats is not changed."""
        assert decode.quantize(self.VECTOR, "float") is self.VECTOR

    def test_levels(self):
        """Numbers become 256 levels of their dimension's range, whose ends are those of numbers beyond it.

        A range without width has the level of its distance.
        """
        vector = np.array([0, 254.5, 255, 9.5, -9, 999], np.float32)
        ranges = ((0.0, 0.0, 0.0, 7.0, 0.0, 0.0), (255.0, 255.0, 255.0, 7.0, 255.0, 255.0))
        for dtype, levels in (
            ("uint8", [0, 254, 255, 2, 0, 255]),
            ("int8", [-128, 126, 127, -126, -128, 127]),
        ):
            found = decode.quantize(vector, dtype, ranges)
            np.testing.assert_array_equal(levels, found)
            assert dtype == found.dtype

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
    def test_sentence_transformers(self, dtype):
        """The numbers and the type equal `quantize_embeddings`."""
        rng = np.random.default_rng(7)
        vectors = rng.normal(size=(50, 13)).astype(np.float32)
        ranges = np.stack([vectors[:40].min(axis=0), vectors[:40].max(axis=0)])
        expected = quantize_embeddings(vectors, dtype, ranges=ranges)
        low, high = ranges.tolist()
        found = np.stack([decode.quantize(v, dtype, (tuple(low), tuple(high))) for v in vectors])
        np.testing.assert_array_equal(expected, found)
        assert expected.dtype == found.dtype

    @pytest.mark.parametrize("ranges", [None, ((0.0,), (1.0,))])
    def test_missing_ranges(self, ranges):
        """8-bit numbers need a range of each dimension."""
        with pytest.raises(ValueError, match="int8 needs the ranges of 9 dimensions"):
            decode.quantize(self.VECTOR, "int8", ranges)


# -- mask tokens ----------------------------------------------------------------------------------

MASK = 3  # the third token of a text, by `encode`


def masked(size: int, *places: int) -> Encoding:
    """A text of `size` tokens with special tokens around, and mask tokens at these places among them."""
    whole = encode(["w"] * size)
    ids = np.arange(len(whole)) + 10
    ids[[place + 1 for place in places]] = MASK
    return replace(whole, input_ids=ids)


def cut_windows(whole: Encoding, capacity: int, stride: int) -> list[Encoding]:
    return cut(whole, np.zeros((len(whole), 1), np.float32), capacity, stride)[0]


def test_masks_of_one_window():
    """They are found at their places among all tokens, and read in their order."""
    item = Encoded((masked(5, 1, 4),), truncated=True)
    found = find_masks(item, MASK)
    assert (item.windows, True) == (found.windows, found.truncated)
    assert ([10, 11, 3, 13, 14, 3, 16], [2, 5], [0, 1]) == (
        found.ids,
        found.places,
        found.rows.tolist(),
    )


def test_text_without_masks():
    """It has no place, and one window."""
    item = Encoded(tuple(cut_windows(masked(30), 10, 4)), truncated=False)
    found = find_masks(item, MASK)
    assert ([], [], 1) == (found.places, found.rows.tolist(), len(found.windows))


@given(
    st.integers(1, 40).flatmap(
        lambda size: st.tuples(
            st.just(size), st.sets(st.integers(0, size - 1), min_size=1, max_size=6)
        )
    ),
    st.integers(4, 12),
    st.integers(0, 2),
)
def test_masks_of_windows(text, capacity, stride):
    """Each mask token is read once, from the window where it is farthest from an edge; no other window is kept."""
    size, places = text
    whole = masked(size, *places)
    windows = cut_windows(whole, capacity, stride)
    found = find_masks(Encoded(tuple(windows), truncated=False), MASK)
    assert whole.input_ids.tolist() == found.ids
    assert sorted(place + 1 for place in places) == found.places
    rows = [
        (number, place)
        for number, window in enumerate(found.windows)
        for place in np.flatnonzero(window.input_ids == MASK)
    ]
    read = [rows[row] for row in found.rows]
    assert {*range(len(found.windows))} == {number for number, _ in read}
    for (number, place), start in zip(read, found.places, strict=True):
        window = found.windows[number]
        distance = min(place, len(window) - 1 - place)
        holding = [w for w in windows if (w.offsets == whole.offsets[start]).all(axis=1).any()]
        places_there = [
            int(np.flatnonzero((w.offsets == whole.offsets[start]).all(axis=1))[-1])
            for w in holding
        ]
        assert distance == max(
            min(p, len(w) - 1 - p) for p, w in zip(places_there, holding, strict=True)
        )


def test_best_tokens_of_a_mask():
    """Probabilities are of the whole vocabulary, also for targets; equal ones are in the order of the ids."""
    found = find_masks(Encoded((masked(3, 0, 2),), truncated=False), MASK)
    logits = np.log(np.array([[1, 4, 1, 2], [2, 2, 2, 2]], np.float32))
    best = fill_mask(found, [logits], top_k=3)
    assert [[1, 3, 0], [0, 1, 2]] == [[token for token, _ in tokens] for tokens in best]
    assert [0.5, 0.25, 0.125] == pytest.approx([score for _, score in best[0]])
    chosen = fill_mask(found, [logits], top_k=9, targets=[2, 3])
    assert [[3, 2], [2, 3]] == [[token for token, _ in tokens] for tokens in chosen]
    assert [0.25, 0.125] == pytest.approx([score for _, score in chosen[0]])


@given(arrays(np.float32, (2, 50), elements=st.floats(-9, 9, width=32)), st.integers(1, 60))
def test_best_tokens_agree_with_sorting(logits, top_k):
    """The best tokens are the first of all, sorted by probability."""
    found = find_masks(Encoded((masked(3, 0, 2),), truncated=False), MASK)
    for scores, tokens in zip(
        softmax(logits), fill_mask(found, [logits], top_k=top_k), strict=True
    ):
        expected = np.sort(scores)[::-1][:top_k]
        assert expected.tolist() == [score for _, score in tokens]
        assert [scores[token] for token, _ in tokens] == expected.tolist()
