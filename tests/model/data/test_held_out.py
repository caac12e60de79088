"""Held-out rows are a stratified share of the rows, a pure function of the seed, and no text is in both parts."""

import itertools
from collections import Counter

import pytest

from model.data.held_out import FEWEST_ROWS, hold_out
from model.data.labelled_rows import QuestionRow, Sentence, Similar, Text


def texts(**counts: int) -> list[Text]:
    """Rows of each label, as many as its count."""
    labels = [label for label, count in counts.items() for _ in range(count)]
    return [Text(f"rows:{i}", f"text {i}", None, (label,)) for i, label in enumerate(labels)]


@pytest.mark.parametrize("seed", range(5))
def test_each_label_gives_its_share(seed):
    """A tenth of each label is held out, rounded up or down."""
    rows = texts(common=300, rare=25, single=1)

    kept, held = hold_out(rows, 0.1, seed)

    counts = Counter(row.labels[0] for row in held)
    assert 30 == counts["common"]
    assert counts["rare"] in (2, 3)
    assert "single" not in counts
    assert sorted(rows, key=rows.index) == sorted(kept + held, key=rows.index)


def test_the_seed_decides():
    """Equal seeds hold out equal rows, another seed others."""
    rows = texts(a=100, b=100)

    first, same, other = (hold_out(rows, 0.1, seed)[1] for seed in (1, 1, 2))

    assert first == same != other


def test_equal_texts_stay_together():
    """A text that occurs several times is in one part only, and so is a context with its questions."""
    repeated = [Text(f"rows:{i}", f"text {i % 40}", None, ("ab"[i % 2],)) for i in range(200)]
    questions = [QuestionRow(f"q:{i}", f"question {i}", f"context {i % 30}", ()) for i in range(90)]

    for rows, key in ((repeated, lambda row: row.text), (questions, lambda row: row.context)):
        kept, held = hold_out(rows, 0.1, 1)
        assert held
        assert not {*map(key, kept)} & {*map(key, held)}


def test_other_tasks_have_strata():
    """Sentences are held out by their entity types, questions by whether they have an answer, pairs over all scores."""
    sentences = [
        Sentence(f"s:{i}", ["Ada", f"drew {i}"], ["B-PER" if i % 2 else "B-LOC", "O"])
        for i in range(200)
    ]
    asked = [
        QuestionRow(f"q:{i}", "?", f"context {i}", () if i % 4 else (("c", 0),)) for i in range(200)
    ]
    pairs = [Similar(f"p:{i}", (f"a {i}", f"b {i}"), i / 200) for i in range(200)]

    tags = Counter(row.tags[0] for row in hold_out(sentences, 0.1, 1)[1])
    answers = Counter(bool(row.answers) for row in hold_out(asked, 0.1, 1)[1])
    scores = sorted(row.score for row in hold_out(pairs, 0.1, 1)[1])

    assert {"B-PER": 10, "B-LOC": 10} == tags
    assert {False: 15, True: 5} == answers
    assert 20 == len(scores)
    assert max(b - a for a, b in itertools.pairwise(scores)) < 0.06


def test_several_labels():
    """Of several labels the rarest decides, so that every label with two texts stays in training."""
    labels = [("all", "rare") if i % 50 == 0 else ("all",) for i in range(100)]
    rows = [Text(f"rows:{i}", f"text {i}", None, names) for i, names in enumerate(labels)]

    for seed in range(10):
        kept, held = hold_out(rows, 0.1, seed)
        assert 9 <= len(held) <= 11
        assert any("rare" in row.labels for row in kept)


def test_few_rows_are_not_split():
    """Fewer than FEWEST_ROWS rows, and a share of 0, hold out no row."""
    few = texts(a=FEWEST_ROWS - 1)

    assert (few, []) == hold_out(few, 0.1, 1)
    assert (few * 2, []) == hold_out(few * 2, 0, 1)
