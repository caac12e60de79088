"""Questions made of plain text: each has its answer where it says, and not the sentence that it was made of."""

import gzip
import json
import random
import sys
from pathlib import Path

import pytest

from model import cloze, rows

HARBOUR = (
    "The old harbour of Port Ansel lies on the western shore of the bay and was dug by hand in 1843. "
    "Ships from Lorne brought timber and wool to it for almost a hundred years after that. "
    "When the railway to Lorne was opened, most of the wool went over land and the quays grew quiet. "
    "Today Port Ansel is known for its market, which is held on the quays every week in summer."
)


def made(passage: str, seed: int = 1) -> dict[str, cloze.Question]:
    return {one.answer: one for one in cloze.questions(passage, random.Random(seed))}


def test_what_recurs_is_asked_for() -> None:
    """Each name that stands in two sentences, once; none that stands in one."""
    found = made(HARBOUR)
    assert found.keys() == {"Port Ansel", "Lorne"}
    for answer, one in found.items():
        assert one.context[one.start : one.start + len(answer)] == answer
        assert answer not in one.question
        assert one.question.endswith("?")


def test_the_sentence_that_asks_is_not_in_the_text() -> None:
    """The rest of the passage is, in its order."""
    one = made(HARBOUR)["Port Ansel"]
    sentences = HARBOUR.split(". ")
    kept = [sentence for sentence in sentences if sentence.rstrip(".") in one.context]
    assert len(kept) == len(sentences) - 1
    assert one.context == ". ".join(kept).rstrip(".") + "."


@pytest.mark.parametrize(
    ("sentence", "names"),
    [
        ("The Bank of England was founded in 1694.", ["Bank of England", "1694"]),
        ("It rained.", []),
        (
            "In May 1920 the ship of Ruth Adler left Kiel, Germany.",
            ["May 1920", "Ruth Adler", "Kiel", "Germany"],
        ),
        ("Of 1,200 sailors 34 came home, he said.", ["1,200"]),
    ],
)
def test_names(sentence: str, names: list[str]) -> None:
    """Capitals and numbers that stand together, but for the word that only begins a sentence."""
    found = list(cloze.names(sentence))
    assert [name for _, name in found] == names
    assert all(sentence[start : start + len(name)] == name for start, name in found)


@pytest.mark.parametrize(
    ("name", "words"),
    [("1843", {"what year"}), ("3,000", {"how many"}), ("Lorne", {"what", "who", "which"})],
)
def test_what_is_asked_for_goes_by_the_looks_of_the_answer(name: str, words: set[str]) -> None:
    rng = random.Random(1)
    assert {cloze.asked(name, rng) for _ in range(50)} == words


def test_a_passage_is_neither_short_nor_long() -> None:
    """Paragraphs that are short are read together; what is too long makes no questions."""
    paragraph = "Nobody knows it."
    assert [text.count(" ") + 1 for text in cloze.passages([paragraph] * 50)] == [132, 18]
    assert not made(" ".join(HARBOUR.split(". ")[:2]))
    assert not made(f"{HARBOUR} {HARBOUR} {HARBOUR} {HARBOUR}")


def test_a_file_can_be_learnt_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same text gives the same file, which fine-tuning reads as it reads SQuAD."""
    text = tmp_path / "text.txt"
    other = HARBOUR.replace("Port Ansel", "Sund").replace("Lorne", "Vik")
    text.write_text(f"{HARBOUR}\n\n{other}\n")
    for name in ("a", "b"):
        out = tmp_path / name / "questions.json.gz"
        monkeypatch.setattr(sys, "argv", ["cloze", str(out), str(text), "--questions", "3"])
        cloze.main()
    assert "3 questions" in capsys.readouterr().out
    first, second = (tmp_path / name / "questions.json.gz" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()

    paragraphs = json.loads(gzip.decompress(first.read_bytes()))["data"][0]["paragraphs"]
    read = rows.read(first, "qa")
    assert len(read) == len(paragraphs) == 3
    answers = [paragraph["qas"][0]["answers"][0]["text"] for paragraph in paragraphs]
    assert {*answers[:2]} == {"Port Ansel", "Lorne"}
    assert answers[2] in {"Sund", "Vik"}


def test_a_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, and nothing is written."""
    out = tmp_path / "questions.json.gz"
    monkeypatch.setattr(sys, "argv", ["cloze", str(out), str(tmp_path / "absent.txt")])
    with pytest.raises(SystemExit, match=r"absent\.txt"):
        cloze.main()
    assert not out.exists()
