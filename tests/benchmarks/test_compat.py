"""A difference is counted for what it is, and one that is not listed is one too many."""

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compat import __main__ as compat
from benchmarks.compat import pipelines, texts
from benchmarks.compat.compare import Tally, distance
from benchmarks.compat.pipelines import EMPTY, OF_NER, OF_QA, ONE_SOFTMAX, Window, read_answers
from service.core.decode import AnswerSpan, LabelScore

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compat.md"
RIGHT, OTHER, THIRD = ([LabelScore(name, 0.5)] for name in "abc")


def test_tasks_can_be_selected(capsys, monkeypatch):
    """Each task of the comparison is an option of the command."""
    monkeypatch.setattr("sys.argv", ["compat", "--tasks", "none"])
    with pytest.raises(SystemExit, match="2"):
        compat.main()
    message = capsys.readouterr().err
    assert "invalid choice: 'none'" in message
    assert all(task in message for task in compat.TASKS)


def read(differences: Collection[str]) -> list[LabelScore]:
    """A pipeline that says b where it differs by both."""
    return OTHER if set(differences) == {"x", "y"} else RIGHT


@pytest.mark.parametrize(
    ("found", "counted"), [(RIGHT, {(): 1}), (OTHER, {("x", "y"): 1}), (THIRD, {})]
)
def test_tally(found, counted):
    """A difference is counted under the fewest names that explain it, and reported if no name does."""
    tally = Tally("anything")
    tally.add("text", found, RIGHT, read, ("x", "y"))

    assert counted == tally.texts
    assert bool(counted) == (not tally.unexplained)


def test_a_wrong_reading_is_reported():
    """A name explains a difference only if our result for it equals the pipeline's."""
    tally = Tally("anything")
    tally.add("text", THIRD, THIRD, read, ("x", "y"))

    assert ({}, 1) == (tally.texts, len(tally.unexplained))


def test_distance():
    """Scores may differ by rounding, by their size; all else is equal or not."""
    assert distance([LabelScore("a", 0.5)], [LabelScore("a", 0.50001)]) == pytest.approx(1e-5)
    assert distance([LabelScore("a", 0.5)], [LabelScore("a", 0.5002)]) is None
    assert distance([LabelScore("a", -2000)], [LabelScore("a", -2000.1)]) == pytest.approx(0.1)
    assert distance(RIGHT, OTHER) is None
    assert distance(RIGHT, RIGHT + RIGHT) is None
    assert distance([], []) == 0


def window(starts: list[float], ends: list[float], begin: int = 0) -> Window:
    """[CLS], and a token of one letter for each other logit, every second character."""
    places = begin + np.arange(-1, len(starts) - 1)
    offsets = np.stack([2 * places, 2 * places + 1], axis=1)
    offsets[0] = 0
    return Window(np.log(starts), np.log(ends), offsets, places, places, offsets)


def test_answers_by_hand():
    """The pipeline adds up what reads the same, in both windows; with one softmax what they share counts once."""
    context = "a b c"
    both = [window([1, 1, 2], [1, 1, 2]), window([1, 2, 4], [1, 2, 4], begin=1)]
    apart = read_answers(both, context, (), max_answer_len=1, handle_impossible_answer=True)
    joined = read_answers(both, context, [ONE_SOFTMAX], max_answer_len=1, top_k=3)

    assert apart == [AnswerSpan("b", pytest.approx(4 / 16 + 4 / 49), 2, 3)]
    assert [found.answer for found in joined] == ["c", "b", "a"]
    assert [found.score for found in joined] == pytest.approx([16 / 121, 4 / 121, 1 / 121])


def test_empty_tokens_by_hand():
    """A token without text takes its share, unless it does not count."""
    odd = window([1, 1, 2], [1, 1, 2])
    odd.offsets[1] = 0

    assert read_answers([odd], "a b", ())[0].score == pytest.approx(4 / 16)
    assert read_answers([odd], "a b", [EMPTY])[0].score == pytest.approx(4 / 9)


def test_every_difference_is_a_row():
    """docs/reference/compat.md gives a reason for each that the comparison allows, and for no other that it counts."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (?!zero-shot)", text, re.M)

    assert sorted({*OF_NER, *OF_QA}) == sorted(rows)


def test_texts_grow():
    """By whole pieces, to as many words as are wanted."""
    assert "a b c" == texts.grow(["a", "b c", "d"], 2)
    assert "a b c" == texts.grow(["a b c", "d"], 1)
    with pytest.raises(ValueError, match="no 9 words"):
        texts.grow(["a"], 9)


def test_sizes_are_spread():
    """Of few and of many words, in no order."""
    sizes = texts.sizes(500)

    assert (texts.SHORTEST, texts.LONGEST) == (min(sizes), max(sizes))
    assert 75 == sum(size >= texts.MIDDLE for size in sizes)
    assert 500 == len(sizes)
    assert sizes != sorted(sizes)


def test_names_are_distinct():
    """The fewest first, each subset once."""
    assert [(), ("x",), ("y",), ("x", "y")] == pipelines.subsets(["x", "y"])
