"""Rows of quartet-starter: templates with slots that have lists, and sentences about reviews."""

import random
import tomllib

from model import everyday, starter_rows
from model.wikipedia_names import Names

TEMPLATES = tomllib.loads(everyday.TEMPLATES.read_text(encoding="utf-8"))
OWN = tomllib.loads(starter_rows.TEMPLATES.read_text(encoding="utf-8"))


def test_every_slot_has_a_list():
    texts = [text for name in ("news", "praise", "blame") for text in OWN[name]]
    slots = {slot for text in texts for slot in everyday.SLOT.findall(text)}
    assert slots <= (TEMPLATES["lists"] | OWN["lists"]).keys()


def test_templates_are_filled_with_names_of_wikipedia():
    """Such a name has the kind of its slot, and names of the lists stay."""
    names = Names({"Ada Moll": "PER", "Lund Choir": "ORG"}, {"Ada"}, {"Danish"}, {"Ormsay"}, set())
    rows = starter_rows.entity_rows(TEMPLATES, OWN, names, [], 200, random.Random(1))
    found = {(row["text"][a:b], kind) for row in rows for a, b, kind in row["entities"]}
    assert {
        ("Ada Moll", "PER"),
        ("Lund Choir", "ORG"),
        ("Ormsay", "LOC"),
        ("Danish", "MISC"),
    } <= found
    assert ("Hamburg", "LOC") in found


def test_reviews_have_both_labels_evenly():
    rows = [*starter_rows.review_rows(OWN, 50, random.Random(1))]
    assert [50, 50] == [
        sum(row["label"] == each for row in rows) for each in ("positive", "negative")
    ]


def test_sentences_about_critics_are_labeled_by_one_side_only(tmp_path):
    lines = [
        "Critics praised the lively camera work of the film.",
        "The second album was panned by every newspaper in the country.",
        "Critics praised the music and criticized the plot of the film.",
        "Although critics praised the music, few people bought it.",
    ]
    file = tmp_path / "text.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    rows = [*starter_rows.reception_rows([file])]
    assert [("positive", lines[0]), ("negative", lines[1])] == [
        (r["label"], r["text"]) for r in rows
    ]


def test_prose_with_words_of_one_side_has_its_label(tmp_path):
    lines = [
        "It was a delightful evening by the river.",
        "They spent a dreadful night in the old barn.",
        "The dreadful night ended in a delightful way.",
        "They spent the night in the old barn.",
    ]
    file = tmp_path / "text.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    rows = starter_rows.opinion_rows(OWN, [file], 5, random.Random(1))
    assert {("positive", lines[0]), ("negative", lines[1])} == {
        (r["label"], r["text"]) for r in rows
    }
