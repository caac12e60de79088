"""Warnings of training rows that are readable and probably not meant: labels that nearly agree, missing values."""

import unicodedata
from collections import Counter, defaultdict
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


def find_warnings(rows: Sequence[Any]) -> Iterator[str]:
    """Yield the warnings of a head's training rows, each in one line."""
    yield from _near_duplicates(_label_counts(rows))
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        for what, value in _values(row):
            if value.strip() in MISSING:
                places[what, value.strip()].append(row.where)
    for (what, value), found in places.items():
        named = ", ".join(found[:MOST]) + (", ..." if len(found) > MOST else "")
        yield f"the {what} {value!r} looks like a missing value ({_rows(len(found))}): {named}"


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


def _label_counts(rows: Sequence[Any]) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for row in rows:
        match row:
            case Text():
                counts.update(row.labels)
            case Sentence():
                counts.update(tag[2:] for tag in row.tags if tag.startswith("B-"))
    return counts


def _near_duplicates(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield a warning for labels that differ in case or blanks alone, the most frequent one first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for label in sorted(counts, key=lambda label: (-counts[label], label)):
        bare = unicodedata.normalize("NFKC", label).casefold()
        groups["".join(bare.split())].append(label)
    for labels in groups.values():
        if len(labels) > 1:
            shown = ", ".join(f"{label!r} ({_rows(counts[label])})" for label in labels)
            first, *others = labels
            merged = ", ".join(f'"{label}" = "{first}"' for label in others)
            yield (
                f"the labels {shown} differ in case or blanks alone and are learned as different ones:"
                f" label_map = {{ {merged} }} merges them"
            )
