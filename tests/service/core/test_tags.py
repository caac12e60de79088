"""Labels of every scheme join to the same entities."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.tags import place, read, scheme, to_bio

# "Ada Lovelace" is a person and "Bonn" a place, next to each other; then "Rome" and "Oslo", each a place.
SCHEMES = {
    "BIO": "B-PER I-PER B-LOC O B-LOC B-LOC",
    "BIOES": "B-PER E-PER S-LOC O S-LOC S-LOC",
    "BILOU": "B-PER L-PER U-LOC O U-LOC U-LOC",
    "BMEWO": "B-PER E-PER W-LOC O W-LOC W-LOC",
    "BMES": "B-PER E-PER S-LOC O S-LOC S-LOC",
    "suffix": "PER-B PER-I LOC-B O LOC-B LOC-B",
    "underscore": "B_PER I_PER B_LOC O B_LOC B_LOC",
    "suffix with underscore": "PER_B PER_E LOC_S O LOC_S LOC_S",
    "IOB1": "I-PER I-PER I-LOC O I-LOC B-LOC",
}
POSITIONS = {
    "BIO": "BI", "BIOES": "BIES", "BILOU": "BILU", "BMEWO": "BMEW", "BMES": "BMES", "suffix": "BI",
    "underscore": "BI", "suffix with underscore": "BIES", "IOB1": "BI",
}  # fmt: skip
BIO = ["B-PER", "I-PER", "B-LOC", "O", "B-LOC", "B-LOC"]


def labels_of(name: str) -> list[str]:
    """All labels of a scheme, for two types."""
    shown = {"underscore": "{0}_{1}", "suffix": "{1}-{0}", "suffix with underscore": "{1}_{0}"}
    form = shown.get(name, "{0}-{1}")
    return ["O", *(form.format(p, kind) for kind in ("LOC", "PER") for p in POSITIONS[name])]


def spans(found: Sequence[str], labels: Sequence[str]) -> list[tuple[str, int, int]]:
    """Type, first and last of what joins, without "O"."""
    joined = scheme(labels)
    indices = np.array([labels.index(label) for label in found], np.int64)
    edges = np.flatnonzero([True, *joined.breaks(indices), bool(found)]).tolist()
    types = [joined.types[index] for index in indices]
    return [(types[a], a, b - 1) for a, b in pairwise(edges) if types[a] != "O"]


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes(name):
    """Two names of one type next to each other stay two, and a name of two words is one."""
    labels = labels_of(name)

    expected = [("PER", 0, 1), ("LOC", 2, 2), ("LOC", 4, 4), ("LOC", 5, 5)]
    assert expected == spans(SCHEMES[name].split(), labels)
    assert to_bio(SCHEMES[name].split(), labels) == BIO


def test_types_alone():
    """Labels without positions join while they are the same."""
    labels = ["O", "PER", "email-address"]

    assert [("PER", 0, 1), ("email-address", 2, 3)] == spans(
        ["PER", "PER", "email-address", "email-address"], labels
    )


@pytest.mark.parametrize(
    ("labels", "types"),
    [
        (["O", "email-address", "phone-number"], ["O", "email-address", "phone-number"]),
        (["O", "B-PER", "I-PER", "E-MAIL"], ["O", "PER", "PER", "E-MAIL"]),
        (["O", "B-PER", "I-PER", "email-address"], ["O", "PER", "PER", "email-address"]),
        (["O", "B-e-mail", "I-e-mail"], ["O", "e-mail", "e-mail"]),
        (["O", "B-PER", "B-LOC"], ["O", "PER", "LOC"]),
        (["B-PER", "I-PER", "E-PER", "S-PER", "S-DATE"], ["PER", "PER", "PER", "PER", "DATE"]),
        (["[CLS]", "O", "B-PER", "E-PER", "X"], ["[CLS]", "O", "PER", "PER", "X"]),
        (["VITAMIN-B", "VITAMIN-C", "O"], ["VITAMIN-B", "VITAMIN-C", "O"]),
        (["A_B", "OUT"], ["A_B", "OUT"]),
        (["B-", "-B", "B"], ["", "-B", "B"]),
    ],
)
def test_types(labels, types):
    """A position is one only where the set of labels shows it; any other dash belongs to the label."""
    assert types == [tag.type for tag in read(labels)]


@pytest.mark.parametrize("name", SCHEMES)
def test_places(name):
    """The labels of an entity's tokens say the same entity in every scheme."""
    labels = labels_of(name)

    def of(size):
        ends = [(row == 0, row == size - 1) for row in range(size)]
        found = [place(labels, "PER", first=first, last=last) for first, last in ends]
        return [labels[index] for index in found if index is not None]

    for size in (1, 2, 3):
        assert [("PER", 0, size - 1)] == spans(of(size), labels)


def test_places_without_positions():
    """A type alone is the label of all its tokens; a position that is lacking has no label."""
    assert 1 == place(["O", "PER"], "PER", first=True, last=False)
    assert 0 == place(["I-PER", "O"], "PER", first=True, last=True)
    assert place(["O", "B-PER"], "PER", first=False, last=True) is None
    assert place(["O", "B-PER"], "LOC", first=True, last=True) is None


@given(found=st.lists(st.sampled_from(labels_of("BIOES")), max_size=9))
def test_bio_joins_the_same(found):
    """Labels as BIO join to the entities that they join to themselves."""
    bio = to_bio(found, labels_of("BIOES"))

    assert spans(bio, labels_of("BIO")) == spans(found, labels_of("BIOES"))
