"""Warnings of training rows that are readable and probably not meant: labels that nearly agree, missing values."""

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from model.data.labelled_rows import QuestionRow, Sentence, Similar, Text

# Values that pandas writes or reads as missing, and the empty text.
MISSING = frozenset(
    [
        *(
            "",
            "#N/A",
            "#N/A N/A",
            "#NA",
            "-1.#IND",
            "-1.#QNAN",
            "-NaN",
            "-nan",
            "1.#IND",
            "1.#QNAN",
        ),
        *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
    ]
)
MOST = 5  # places or labels in a warning
MOST_CHARACTERS = 60  # of a text in a warning
FEWEST_ROWS = 10  # of fewer rows, each may have its own label
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def find_warnings(rows: Sequence[Any]) -> Iterator[str]:
    """Yield the warnings of a head's training rows, each in one line."""
    labels = _label_places(rows)
    yield from _near_duplicates(labels)
    yield from _joined_labels(labels)
    yield from _unshared_labels(labels, rows)
    yield from _contradictions(rows)
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        for what, value in _values(row):
            if value.strip() in MISSING:
                places[what, value.strip()].append(row.where)
    for (what, value), found in places.items():
        yield f"the {what} {value!r} looks like a missing value ({_rows(len(found))}): {_few(found)}"


def _few(names: Sequence[str]) -> str:
    """Return the first of the names, with an ellipsis if there are more."""
    return ", ".join(names[:MOST]) + (", ..." if len(names) > MOST else "")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _values(row: Any) -> Iterator[tuple[str, str]]:
    match row:
        case Text():
            yield "text", row.text
            if row.pair is not None:
                yield "text_pair", row.pair
            yield from (("label", label) for label in row.labels)
        case Sentence() if len(row.words) == 1:
            yield "text", row.words[0]
        case QuestionRow():
            yield "question", row.question
            yield "context", row.context
        case Similar():
            yield from (("text", text) for text in row.every)


def _label_places(rows: Sequence[Any]) -> Mapping[str, list[str]]:
    """Return the places of the rows with each label, or with an entity of each type."""
    places: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        labels: Sequence[str] = ()
        match row:
            case Text():
                labels = row.labels
            case Sentence():
                labels = [tag[2:] for tag in row.tags if tag.startswith("B-")]
        for label in labels:
            places[label].append(row.where)
    return places


def _bare(label: str) -> str:
    """Return a label without what is easily overlooked: case, blanks, dashes, invisible characters, a fraction of 0."""
    text = unicodedata.normalize("NFKC", label).casefold()
    text = re.sub(r"(?<=[^\W\d_])[-_\u2010-\u2015\u2212](?=[^\W\d_])", "", text)
    text = "".join(c for c in text if not c.isspace() and unicodedata.category(c) != "Cf")
    return re.sub(r"^([+-]?\d+)\.0+$", r"\1", text)


def _near_duplicates(places: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield a warning for labels that are equal but for what `_bare` removes, the most frequent one first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for label in sorted(places, key=lambda label: (-len(places[label]), label)):
        groups[_bare(label)].append(label)
    for labels in groups.values():
        if len(labels) > 1:
            shown = ", ".join(f"{label!r} ({_rows(len(places[label]))})" for label in labels)
            first, *others = labels
            merged = ", ".join(f"{_quote(label)} = {_quote(first)}" for label in others)
            yield (
                f"the labels {shown} differ in case, blanks, dashes, invisible characters or .0 alone and are"
                f" learned as different ones: label_map = {{ {merged} }} merges them; see"
                f" {_few([place for label in others for place in places[label]])}"
            )


def _quote(label: str) -> str:
    return json.dumps(label, ensure_ascii=not label.isprintable())


def _joined_labels(places: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield a warning where labels have a semicolon or a bar between words."""
    joined = [label for label in places if re.search(r"[;|]\s*\w", label)]
    if joined:
        shown = [
            f"{label!r} ({_rows(len(places[label]))}: {_few(places[label])})" for label in joined
        ]
        yield (
            f"labels with ; or | are learned as one label each, as commas separate several: {_few(shown)}"
        )


def _unshared_labels(places: Mapping[str, list[str]], rows: Sequence[Any]) -> Iterator[str]:
    """Yield a warning where most rows have a label that no other row has."""
    own = [label for label, found in places.items() if len(found) == 1]
    if len(rows) >= FEWEST_ROWS and len(own) > len(rows) / 2 and isinstance(rows[0], Text):
        advice = ""
        if all(map(NUMBER.fullmatch, own)):
            advice = ': to learn numbers, set problem_type = "regression"'
        first = [f"{label!r} ({places[label][0]})" for label in own]
        yield f"{len(own)} labels are in one row only, of {_rows(len(rows))}: {_few(first)}{advice}"


def _contradictions(rows: Sequence[Any]) -> Iterator[str]:
    """Yield a warning for texts that several rows have with different labels."""
    labelled: dict[tuple[str, ...], dict[tuple[str, ...], str]] = defaultdict(dict)
    for row in rows:
        if isinstance(row, Text):
            key = tuple(" ".join((text or "").split()) for text in (row.text, row.pair))
            labelled[key].setdefault(tuple(sorted(row.labels)), row.where)
    several = [(text, found) for (text, *_), found in labelled.items() if len(found) > 1]
    if several:
        text, found = several[0]
        shown = [f"{', '.join(labels)!r} ({where})" for labels, where in found.items()]
        yield (
            f"{'1 text has' if len(several) == 1 else f'{len(several):,} texts have'} different labels in several rows,"
            f" such as {text[:MOST_CHARACTERS]!r}: {_few(shown)}"
        )
