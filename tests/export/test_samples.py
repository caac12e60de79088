"""A bundle's right and wrong results are sampled by a seed; the evaluation sentences fit their heads."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from export import samples
from export.samples import Result
from model.data import labelled_rows
from model.data.labelled_rows import Similar

EVALUATION = Path(labelled_rows.__file__).parents[1] / "evaluation"
FILES = {
    "sentiment": "sentiment.jsonl",
    "topic": "topic.jsonl",
    "entities": "entities.conll",
    "answers": "answers.json",
    "embeddings": "embeddings.jsonl",
}


def result(number: int, right: bool | None) -> Result:
    return Result(f"text {number}", "a", "a" if right else "b", right)


def test_a_sample_follows_from_its_seed():
    """The first right and the first wrong results of one order; what is neither is left out."""
    results = [result(n, (True, False, None)[n % 3]) for n in range(60)]
    right, wrong = samples.draw(results, 10, 5, seed=1)
    assert ([each.right for each in right], [each.right for each in wrong]) == (
        [True] * 10,
        [False] * 5,
    )
    assert samples.draw(results, 10, 5, seed=1) == (right, wrong)
    assert samples.draw(results, 10, 5, seed=2) != (right, wrong)
    assert right != sorted(right, key=lambda each: each.text)
    assert samples.draw(results[:3], 10, 5, seed=1) == ([results[0]], [results[1]])


def test_results_are_lines_of_markdown():
    """A wrong result shows what was expected; line breaks of a text do not end its line."""
    drawn = [result(1, True)], [Result("two\nlines", "a", "b", False)]
    text = samples.render("mood", Path("data/mood.jsonl"), {"accuracy": 0.5}, drawn)
    assert text.splitlines()[:3] == ["### `mood` on mood.jsonl", "", "accuracy 50.0"]
    assert "- text 1 → **a**" in text.splitlines()
    assert "- two lines → **b**, expected a" in text.splitlines()


CARD = "# mini\n\nA model.\n\n## Heads\n\none\n\n## Parity\n\nnone\n"


def test_a_card_gets_a_section_before_the_one_on_parity():
    """It replaces the one before; a card without the next section ends with it."""
    card = samples.write_section(CARD, "Ten rows.", "### `mood`\n\naccuracy 50.0")
    assert card == CARD.replace(
        "## Parity", "## Samples\n\nTen rows.\n\n### `mood`\n\naccuracy 50.0\n\n## Parity"
    )
    twice = samples.write_section(card, "Ten rows.", "### `mood`\n\naccuracy 60.0")
    assert twice == card.replace("50.0", "60.0")
    for before in ("# mini\n\n## Heads\n\none\n", "# mini\n"):
        last = samples.write_section(before, "", "### `mood`")
        assert last == f"{before}\n## Samples\n\n### `mood`\n"


def test_entities_are_their_words_and_types():
    words = ["Ada", "Lovelace", "left", "Turin", "Kiel"]
    tags = ["B-PER", "I-PER", "O", "B-LOC", "B-LOC"]
    assert samples._entities(words, tags) == "Ada Lovelace (PER), Turin (LOC), Kiel (LOC)"
    assert samples._entities(words, ["O"] * 5) == "none"


def test_every_task_of_a_bundle_is_scored(tiny_bundle, tmp_path, capsys):
    """Metrics of each head through its graph, and results of random weights, some of which are wrong."""
    texts = [f"The ship left port {number} at dawn." for number in range(12)]
    labels = ("negative", "neutral", "positive")
    moods = [{"text": text, "label": labels[n % 3]} for n, text in enumerate(texts)]
    pairs = [
        {"text": a, "text_pair": b, "score": n}
        for n, (a, b) in enumerate(itertools.pairwise(texts))
    ]
    qas = [{"id": "1", "question": "Who left?", "answers": [{"text": "ship", "answer_start": 4}]}]
    (tmp_path / "mood.jsonl").write_text("\n".join(map(json.dumps, moods)))
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "names.conll").write_text("Ada B-PER\nleft O\nTurin B-LOC\n\nIt O\nleft O\n")
    (tmp_path / "asked.json").write_text(
        json.dumps({"data": [{"paragraphs": [{"context": texts[0], "qas": qas}]}]})
    )
    given = {
        "sentiment": "mood.jsonl",
        "entities": "names.conll",
        "answers": "asked.json",
        "embeddings": "pairs.jsonl",
    }
    samples.main(
        [str(tiny_bundle), "--eval", *(f"{name}={tmp_path / file}" for name, file in given.items())]
    )
    text = capsys.readouterr().out
    for name, metric in zip(given, ("accuracy", "f1", "f1", "spearman"), strict=True):
        assert re.search(rf"### `{name}` on \S+\n\n{metric} -?[\d.]+", text)
    assert "Wrong:" in text


def test_related_texts_are_right_where_no_negative_is_nearer():
    """The nearest text is the result; a row without a score has no rank."""
    rows = [Similar("1", ("a", "b"), None, ("c",)), Similar("2", ("a", "b"), None, ("c", "d"))]
    vectors = np.eye(3)[[0, 0, 1, 0, 1, 2, 0]]  # a, b, c; a, b, c, d
    results = samples._compare_negatives(rows, vectors)
    assert [(each.answer, each.right) for each in results] == [("b", True), ("d", False)]


@pytest.mark.parametrize("asked", ["mood=a.jsonl", "sentiment"])
def test_an_unknown_head_is_refused(asked, tiny_bundle, capsys):
    with pytest.raises(SystemExit):
        samples.main([str(tiny_bundle), "--eval", asked])
    assert f"--eval {asked}: HEAD=FILE, with a head of sentiment, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "task", "count"),
    [
        ("sentiment.jsonl", "classification", 100),
        ("topic.jsonl", "classification", 20),
        ("entities.jsonl", "ner", 70),
        ("answers.json", "qa", 60),
        ("embeddings.jsonl", "embedding", 50),
    ],
)
def test_there_are_300_everyday_rows(file, task, count):
    """In the formats of training data; no two rows are equal, and every pair has its opposite."""
    rows = labelled_rows.read(EVALUATION / "everyday" / file, task)
    assert len(rows) == count
    keys = {
        (row.question, row.context) if task == "qa" else getattr(row, "texts", "") or row.text
        for row in rows
    }
    assert len(keys) == count
    if task == "embedding":
        assert all(row.negatives for row in rows)
    if task == "qa":
        assert sum(not row.answers for row in rows) == 28


@pytest.mark.parametrize("name", FILES)
def test_there_are_twenty_evaluation_sentences_of_each_task(name):
    """In the formats of training data, with labels of the shipped heads."""
    task = {"sentiment": "classification", "topic": "classification", "entities": "ner"}.get(
        name, {"answers": "qa", "embeddings": "embedding"}.get(name, "")
    )
    found = labelled_rows.read(EVALUATION / FILES[name], task)
    assert len(found) == 20
    match name:
        case "sentiment" | "topic":
            labels = [row.labels[0] for row in found]
            expected = {"sentiment": {"negative", "positive"}}.get(
                name, {"Business", "Sci/Tech", "Sports", "World"}
            )
            assert set(labels) == expected
            assert len({labels.count(label) for label in expected}) == 1
        case "entities":
            assert {tag[2:] for row in found for tag in row.tags} == {
                "",
                "LOC",
                "MISC",
                "ORG",
                "PER",
            }
        case "answers":
            for row in found:
                assert all(row.context[at : at + len(text)] == text for text, at in row.answers)
        case "embeddings":
            assert len({row.score for row in found}) > 5
