"""Scores through HTTP: against stand-in responses."""

from typing import Any

import pytest

from benchmarks import scores
from model.data.labelled_rows import QuestionRow, Sentence, Similar, Text


def replying(expected: str, results: list[Any]) -> scores.Post:
    def post(path: str, inputs: list[Any]) -> list[Any]:
        assert (expected, len(results)) == (path, len(inputs))
        return results

    return post


def test_the_best_label_counts():
    rows = [Text("1", "a", None, ("x",)), Text("2", "b", None, ("y",))]
    labels = [{"label": "x", "score": 0.6}, {"label": "y", "score": 0.4}]
    assert {"accuracy": 0.5} == scores.score(replying("/classify", [labels, labels]), rows)


def test_a_word_has_the_tag_of_the_entity_that_contains_its_first_character():
    sentence = Sentence("1", ["New", "York", "Ada", "Bob", "met"], ["O"] * 5)
    entities = [
        {"entity_group": "LOC", "start": 0, "end": 8},
        {"entity_group": "PER", "start": 9, "end": 12},
        {"entity_group": "PER", "start": 13, "end": 16},
    ]
    tags = scores.word_tags(sentence, entities)
    assert ["B-LOC", "I-LOC", "B-PER", "B-PER", "O"] == tags


def test_entities_count_as_a_whole():
    rows = [Sentence("1", ["New", "York", "met", "Ada"], ["B-LOC", "I-LOC", "O", "B-PER"])]
    found = [
        {"entity_group": "LOC", "start": 0, "end": 3},
        {"entity_group": "PER", "start": 13, "end": 16},
    ]
    assert {"f1": 0.5} == scores.score(replying("/ner", [found]), rows)


def test_answers_count_by_their_words():
    rows = [QuestionRow("1", "Who?", "Ada Lovelace wrote.", (("Ada Lovelace", 0),))] * 2
    found = scores.score(replying("/qa", [[{"answer": "Ada Lovelace"}], []]), rows)
    assert {"f1": 0.5, "em": 0.5} == found


def test_vectors_count_by_their_cosines():
    rows = [
        Similar("1", ("a", "b"), 1.0),
        Similar("2", ("c", "d"), 0.0),
        Similar("3", ("e", "f"), 0.5),
    ]
    vectors = [[2, 0], [3, 0], [1, 0], [0, 1], [1, 0], [1, 1]]
    assert pytest.approx(1.0) == scores.score(replying("/embed", vectors), rows)["spearman"]


@pytest.mark.parametrize(
    "row",
    [
        Text("here", "a", "b", ("x",)),
        Text("here", "a", None, ("x", "y")),
        QuestionRow("here", "q", "c", ()),
        Similar("here", ("a", "b"), None),
    ],
)
def test_rows_that_are_not_scored_are_refused(row):
    with pytest.raises(ValueError, match=r"^here: .* scored"):
        scores.score(replying("/none", []), [row])
