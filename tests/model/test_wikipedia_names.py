"""Entities of Wikipedia: kinds of titles, and sentences in which every name has a kind."""

import gzip
import lzma
import random

import pytest

from model import wikipedia_names
from model.wikipedia_names import Names, kind_of_title, label, own_names, read_nouns

NAMES = Names(
    kinds={"Anna Bern": "PER", "Lund Choir": "ORG", "Red Rain": "MISC", "Reading": "LOC"},
    given={"Anna", "Karl"},
    nations={"Danish"},
    places={"Turin", "Kent"},
    plain={"the", "she", "reading", "when"},
)


@pytest.mark.parametrize(
    ("first", "kind", "nation"),
    [
        ("Ormsay is a village in Kent, England.", "LOC", ""),
        ("Ada Moll (born 3 May 1950) is a Danish film actress and singer.", "PER", "Danish"),
        ("The Lund Choir was a choir of students in Lund.", "ORG", ""),
        ("Red Rain is the third album by the band Moss.", "MISC", ""),
        ("A gasket is a mechanical seal.", "", ""),
    ],
)
def test_the_first_sentence_has_the_kind_of_a_title(first, kind, nation):
    assert (kind, nation) == kind_of_title(first, read_nouns())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She moved to Turin with Karl Moe in May.", [("Turin", "LOC"), ("Karl Moe", "PER")]),
        ("The Danish pianist Dr Anna Bern left.", [("Danish", "MISC"), ("Anna Bern", "PER")]),
        (
            "When Ormsay's mill closed, the Bank of Kent sold it.",
            [("Ormsay", "LOC"), ("Bank of Kent", "ORG")],
        ),
        ("Reading is quiet.", []),  # at the beginning of a sentence, "reading" is a common word
        ("They heard Quimby sing.", None),  # a name of unknown kind
    ],
)
def test_a_sentence_is_labeled_only_if_every_name_has_a_kind(text, expected):
    row = label(text, NAMES, own_names("Ormsay, Kent", "LOC"))
    found = row and [(text[start:end], kind) for start, end, kind in row["entities"]]
    assert expected == found


def test_a_person_is_called_by_the_last_name():
    assert {"Ada Moll": "PER", "Moll": "PER"} == own_names("Ada Moll (singer)", "PER")


def test_rows_are_sentences_of_articles_with_their_kinds(tmp_path):
    """The file of titles lies next to the text, and has one title for each article."""
    text, titles = tmp_path / "wiki.txt.xz", tmp_path / "wiki.titles.txt.gz"
    sentence = "It was said that Bern is old."
    text.write_bytes(lzma.compress(f"Moll is a town.\n\nBern is a town.\n{sentence}".encode()))
    titles.write_bytes(gzip.compress(b"Moll\nBern\n"))
    made = [wikipedia_names.make([text], 10, read_nouns(), random.Random(s))[1] for s in range(9)]
    rows = [row for rows in made for row in rows]
    assert {"text": sentence, "entities": [(17, 21, "LOC")]} in rows
    titles.write_bytes(gzip.compress(b"Moll\n"))
    with pytest.raises(ValueError, match="longer"):
        list(wikipedia_names.read_articles([text]))
