"""Rows of everyday language fit their templates, and none is a sentence that is kept for evaluation."""

import random
import tomllib

import pytest

from model import everyday
from model.data import labelled_rows
from model.data.labelled_rows import QuestionRow, Similar

TEMPLATES = tomllib.loads(everyday.TEMPLATES.read_text(encoding="utf-8"))
EVALUATION = everyday.TEMPLATES.parent / "evaluation" / "everyday"


def test_names_of_a_template_are_entities():
    """A first and a last name make one entity; other slots make none."""
    lists = {"first": ["Ada"], "last": ["Lovelace"], "city": ["Turin"], "item": ["a map"]}
    rng = random.Random(1)
    row = everyday.fill("{first} {last} sent {item} to {city}!", lists, rng)
    found = [(row["text"][start:end], kind) for start, end, kind in row["entities"]]
    assert found == [("Ada Lovelace", "PER"), ("Turin", "LOC")]
    assert row["text"].startswith("Ada Lovelace sent a map to Turin")


def test_every_slot_has_a_list():
    table = TEMPLATES["sentiment"], TEMPLATES["entities"]
    texts = [
        text for each in table for texts in each.values() if type(texts) is list for text in texts
    ]
    slots = {slot for text in texts for slot in everyday.SLOT.findall(text)}
    assert slots <= TEMPLATES["lists"].keys()


def test_plain_sentences_have_no_name(tmp_path):
    """The first word must be common in lower case, and no other word but "I" may begin with a capital."""
    common = "the dog and the cat saw it when i said that they were here."
    lines = [common] * 6 + [
        "The dog saw it.",
        "When Ada came, they left.",
        "Turin is here.",
        "They said I was.",
    ]
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(lines), encoding="utf-8")
    found = everyday.plain_sentences([file], 100, random.Random(1))
    assert {"The dog saw it.", "They said I was.", common} == set(found)


def test_questions_move_to_a_context_without_their_answer():
    """The context that shares the rarest words is chosen, unless it has the answer."""
    contexts = {
        "ships": "The harbor master of Kiel counts ships.",
        "answer": "The harbor master of Bergen was born in 1871.",
        "other": "Bakers bake bread.",
    }
    fillers = [QuestionRow(str(n), f"q{n}", f"filler text {n}", (("text", 7),)) for n in range(40)]
    row = QuestionRow(
        "", "When was the harbor master born?", "He was born in 1871.", (("1871", 15),)
    )
    rows = [row, *(QuestionRow("", "?", c, ((c[:3], 0),)) for c in contexts.values()), *fillers]
    first = next(everyday.unanswerable(rows, random.Random(1)))
    assert first == {"question": row.question, "context": contexts["ships"], "answers": []}


def test_questions_about_another_name_have_no_answer():
    """A name is replaced by a name, and a number by a number, of another question."""
    rows = [
        QuestionRow("", "When did Ada leave Turin?", "Ada left in 1871.", (("1871", 12),)),
        QuestionRow("", "Who came in 1999?", "Bea came in 1999.", (("Bea", 0),)),
        QuestionRow("", "What was in room 7?", "A map was in room 7.", (("A map", 0),)),
    ]
    found = [row["question"] for row in everyday.unanswerable(rows, random.Random(3))]
    assert all(text.startswith("Who came in 7") for text in found if text.startswith("Who"))
    assert set(found) <= {"Who came in 7?", "What was in room 1999?"}


def test_cropped_contexts_have_an_answer_or_none_by_their_sentences():
    """A crop keeps the place of the answer; the sentences without it share the question's words."""
    parts = ["Ada left Turin.", "She took the train in May.", "The train was late.", "Bea stayed."]
    start = " ".join(parts).index("May")
    row = QuestionRow("", "When was the train?", " ".join(parts), (("May", start),))
    cut_up = QuestionRow("", "Who?", " ".join(parts), (("Turin. She", 9),))
    for seed in range(9):
        able, none = everyday.cropped([row, cut_up], random.Random(seed))
        (answer,) = able["answers"]
        assert able["context"][answer["answer_start"] :].startswith("May")
        assert none["context"] in {parts[0], parts[2], parts[3], " ".join(parts[2:])}
        assert none["answers"] == []


def test_a_request_is_like_its_other_wording_and_unlike_its_opposite():
    templates = {
        "frames": ["How do I {}?", "I want to {}"],
        "opposites": [{"words": [["turn on", "start"], ["turn off"]], "of": ["the fan"]}],
        "meanings": [{"same": ["a", "b"], "other": ["c"]}],
    }
    rows = [tuple(row.values()) for row in everyday.opposite_rows(templates)]
    assert rows[0] == (
        "How do I turn on the fan?",
        "I want to start the fan",
        "How do I turn off the fan?",
    )
    assert rows[-2:] == [("a", "b", "c"), ("b", "a", "c")]


def test_the_opposite_of_a_text_has_an_antonym():
    """The other text of the pair stays; a pair without a known word makes no row."""
    templates = {"antonyms": [["open", "closed"], ["is", "is not"]]}
    rows = [Similar("", ("The OPEN door", "An open door"), None), Similar("", ("a", "b"), None)]
    (row,) = everyday.antonyms(templates, rows, 9, random.Random(1))
    assert row["negative"] == row["anchor"].replace("OPEN", "closed").replace("open", "closed")
    assert {row["anchor"], row["positive"]} == {"The OPEN door", "An open door"}


@pytest.mark.parametrize(
    ("file", "task"), [("sentiment.jsonl", "classification"), ("entities.jsonl", "ner")]
)
def test_no_template_is_an_evaluation_sentence(file, task):
    """Only greetings and other remarks of one or two words may be both."""
    kept = {row.text.lower().strip(" .!?") for row in labelled_rows.read(EVALUATION / file, task)}
    texts = [*TEMPLATES["sentiment"].values(), *TEMPLATES["entities"].values()]
    made = {text.lower().strip(" .!?") for part in texts if type(part) is list for text in part}
    assert {text for text in made & kept if len(text.split()) > 2} == set()


def test_no_request_is_an_evaluation_pair():
    kept = {
        text
        for row in labelled_rows.read(EVALUATION / "embeddings.jsonl", "embedding")
        for text in row.every
    }
    made = {text for row in everyday.opposite_rows(TEMPLATES) for text in row.values()}
    assert made & kept == set()
