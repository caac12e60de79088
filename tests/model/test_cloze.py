"""Questions made of plain text: each has its answer where it says, and words that stand around it."""

import gzip
import json
import random
import sys

import pytest

from model import cloze
from model.data import labelled_rows

HARBOUR = (
    "The old harbour of Port Ansel lies on the western shore of the bay and was dug by hand in 1843. "
    "Ships from Lorne brought timber and wool to it for almost a hundred years after that. "
    "When the railway to Lorne was opened, most of the wool went over land and the quays grew quiet. "
    "Today Port Ansel is known for its market, which is held on the quays every week in summer."
)


def made(passage: str, seeds: int = 50) -> list[cloze.GeneratedQuestion]:
    return [one for seed in range(seeds) for one in cloze.questions(passage, random.Random(seed))]


def sentence_at(start: int) -> str:
    """The one of HARBOUR's that a character stands in."""
    return HARBOUR[HARBOUR.rfind(". ", 0, start) + 1 :].split(". ")[0]


def test_a_question_has_its_answer_where_it_says():
    """Twice at most of a passage, which stays as it is; names, numbers and other words are asked for."""
    found = made(HARBOUR)
    assert 50 < len(found) <= 100
    for one in found:
        assert one.context == HARBOUR
        assert one.context[one.start :].startswith(one.answer)
        assert one.answer not in one.question
    answers = {one.answer for one in found}
    assert {"Port Ansel", "Lorne", "1843"} <= answers
    assert [answer for answer in answers if answer.islower()]


def test_a_question_is_made_of_the_words_around_its_answer():
    """Near ones of one sentence, of which some are lost, and one that asks."""
    asking = ["when", "what", "year", "in", "how", "many", "much", "who", "which", "where", "why"]
    asking += ["person", "place", "group"]
    for one in made(HARBOUR):
        assert one.question.endswith("?")
        sentence = sentence_at(one.start)
        words = one.question.rstrip("?").split()
        assert {*words} <= {*map(cloze.bare, sentence.split()), *asking, *map(str.title, asking)}
        assert 3 < len(words) <= cloze.KEPT[1] + 3


def test_a_question_may_keep_all_of_its_words():
    """And all answers may be names or numbers, where a sentence has any."""
    found = [
        one
        for seed in range(50)
        for one in cloze.questions(HARBOUR, random.Random(seed), share_named=1.0, lost=0.0)
    ]
    assert all(
        one.answer[0].isupper() or one.answer[0].isdigit() for one in found if one.start < 90
    )
    for one in (one for one in found if one.answer == "1843"):
        assert "dug by hand in" in one.question


@pytest.mark.parametrize("flag", ["--named", "--lost"])
def test_a_share_is_from_0_to_1(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cloze", "out.json.gz", "a.txt", flag, "1.5"])
    with pytest.raises(SystemExit):
        cloze.main()
    assert f"{flag}: 1.5 is not from 0 to 1" in capsys.readouterr().err


def test_a_question_needs_words():
    """Of a sentence that is little more than the answer none is made."""
    assert cloze.make_question("Lorne it was.", 0, "Lorne", random.Random(1)) is None


def test_a_question_does_not_say_the_answer():
    """If the sentence has the answer twice, both are removed from the question."""
    sentence = "Lorne was known as Lorne the old for a hundred years."
    rng = random.Random(1)
    found = [cloze.make_question(sentence, 0, "Lorne", rng) for _ in range(100)]
    assert None in found
    assert not [question for question in found if question and "Lorne" in question]


def test_an_answer_is_without_the_quotes_around_it():
    """It begins and ends within them."""
    sentence = "He called it “red wool” or ‘hand made’ timber."
    found = {cloze.phrase(sentence, random.Random(seed)) for seed in range(200)} - {None}
    assert {(14, "red wool"), (28, "hand made")} <= found
    for start, text in filter(None, found):
        assert sentence[start:].startswith(text)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("the western shore", True),
        ("timber", True),
        ("of the bay", False),
        ("shore of", False),
        ("Lorne, most", False),
        ("it", False),
        ("wool! Timber", False),
        ("wool — timber", False),
    ],
)
def test_an_answer_begins_and_ends_with_words_of_its_own(text, whole):
    assert cloze.may_be_answer(text) == whole


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
        ("An iPhone of the 1990s is a lie.", []),
    ],
)
def test_names(sentence, names):
    """Capitals and numbers that stand together, but for the word that only begins a sentence."""
    found = list(cloze.names(sentence))
    assert [name for _, name in found] == names
    assert all(sentence[start : start + len(name)] == name for start, name in found)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("1843", {"when", "what year", "in what year"}),
        ("12 May", {"when"}),
        ("3,000", {"how many", "how much"}),
        ("Lorne", {"what", "who", "which", "where"}),
        ("dug by hand", {"what", "how", "why", "which"}),
    ],
)
def test_what_is_asked_for_goes_by_the_looks_of_the_answer(answer, words):
    rng = random.Random(1)
    assert {cloze.question_word(answer, rng) for _ in range(50)} == words


@pytest.mark.parametrize(
    ("before", "answer", "after", "kind"),
    [
        ("It was founded by", "Ruth Adler", "in May.", "person"),
        ("The painter", "Ruth Adler", "left Kiel.", "person"),
        ("", "Ruth Adler", "was born in Kiel.", "person"),
        ("", "Adler", "wrote two books.", "person"),
        ("", "King Olaf", "left.", "person"),
        ("The ship lay in", "Kiel", "for a year.", "place"),
        ("They came to the", "Eider River", "at night.", "place"),
        ("She taught at", "Lorne University", "for a year.", "group"),
        ("The ship left", "Kiel", "at night.", ""),
    ],
)
def test_the_kind_of_a_name_goes_by_the_words_next_to_it(before, answer, after, kind):
    """Titles, actions and prepositions, and the last word of the name; the name alone often shows nothing."""
    assert cloze.kind_of_name(answer, f"{before} ", f" {after}") == kind


@pytest.mark.parametrize(
    ("before", "answer", "after", "words"),
    [
        ("It was founded by ", "Ruth Adler", ".", {"who", "what person"}),
        ("The ship lay in ", "Kiel", ".", {"where", "what", "which place"}),
        ("In all ", "34", " sailors came home.", {"how many"}),
        ("It cost $", "3,000", " in May.", {"how much"}),
        ("In all ", "40", "% came home.", {"what percentage", "how much", "what percent"}),
    ],
)
def test_a_question_asks_for_the_kind_of_its_answer(before, answer, after, words):
    """Question words for persons, places, numbers and so on, where the sentence shows the kind."""
    rng = random.Random(1)
    found = {cloze.question_word(answer, rng, before, after) for _ in range(50)}
    assert found == words


def test_a_passage_is_neither_short_nor_long():
    """Paragraphs that are short are read together; what is too long makes no questions."""
    paragraph = "Nobody knows it."
    assert [text.count(" ") + 1 for text in cloze.passages([paragraph] * 50)] == [126, 24]
    assert not made(" ".join(HARBOUR.split(". ")[:2]))
    assert not made(f"{HARBOUR} {HARBOUR} {HARBOUR} {HARBOUR}")


def test_a_file_can_be_learnt_from(tmp_path, monkeypatch, capsys):
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
    read = labelled_rows.read(first, "qa")
    assert len(read) == len(paragraphs) == 3


def test_a_file_that_is_not_there_is_named(tmp_path, monkeypatch):
    """In one line, and nothing is written."""
    out = tmp_path / "questions.json.gz"
    monkeypatch.setattr(sys, "argv", ["cloze", str(out), str(tmp_path / "absent.txt")])
    with pytest.raises(SystemExit, match=r"absent\.txt"):
        cloze.main()
    assert not out.exists()
