"""Entities as spans of a text, as annotation tools, spaCy and the service's `/ner` write them, to words and BIO tags.

An entity is `[start, end, label]`, or an object with `start` and `end` (or `start_offset` and `end_offset`) and
`label`, `labels` or `entity_group`. Offsets count code points, and `end` is exclusive. If the object also has the
characters of the entity, as `text` or `word`, the offsets must agree with them.
"""

import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from service.core.data_files.text_files import DataError

WORD = re.compile(r"\w+|[^\w\s]")


class Span(NamedTuple):
    """An entity of a text."""

    start: int
    end: int
    label: str


def is_task(row: dict[str, Any]) -> bool:
    """Return whether a row is a task of Label Studio."""
    return isinstance(row.get("data"), dict) and isinstance(row.get("annotations"), list)


def annotation(row: dict[str, Any]) -> dict[str, Any]:
    """Return the first annotation of a task that was not skipped; empty if there is none."""
    return next((each for each in row["annotations"] if not each.get("was_cancelled")), {})


def flatten(where: str, row: dict[str, Any], task: str) -> dict[str, Any]:
    """Return a task of Label Studio as a text with its entities or labels, and any other row as it is.

    Raises DataError where it has results of another kind only.
    """
    if not is_task(row) or task not in ("ner", "classification"):
        return row
    field, name = ("entities", "labels") if task == "ner" else ("labels", "choices")
    values = [result.get("value", {}) for result in annotation(row).get("result", ())]
    found = [value for value in values if name in value]
    if values and not found:
        raise DataError(f"{where}: no result has {name}, which {task} needs: {values[0]!r}")
    return {**row["data"], field: found if task == "ner" else [n for v in found for n in v[name]]}


def read(where: str, text: str, entities: list[Any]) -> list[Span]:
    """Return the entities of a text in their order. Raises DataError for a wrong one, and for overlapping ones."""
    spans = sorted(_span(where, text, entity) for entity in entities)
    for one, other in pairwise(spans):
        if other.start < one.end:
            shown = " and ".join(
                f"{text[s.start : s.end]!r} ({s.start}-{s.end})" for s in (one, other)
            )
            raise DataError(f"{where}: the entities {shown} overlap: a word has one tag")
    return spans


def _span(where: str, text: str, entity: Any) -> Span:
    named = ""
    if isinstance(entity, dict):
        named = str(entity.get("text", entity.get("word")) or "")
        labels = entity.get("labels") or [entity.get("label", entity.get("entity_group"))]
        start, end = (entity.get(name, entity.get(f"{name}_offset")) for name in ("start", "end"))
        entity = [start, end, labels[0]]
    match entity:
        case [int(start), int(end), str(label)] if 0 <= start < end <= len(text) and label:
            found = text[start:end]
            if named and _letters(named) != _letters(found):
                raise DataError(
                    f"{where}: the entity {named!r} is not at {start}-{end}, where {found!r} is: offsets count code"
                    " points, and the end is exclusive"
                )
            if found.strip():
                return Span(start, end, label)
    raise DataError(
        f"{where}: an entity may not be {entity!r}: start, end and label, within the {len(text)} characters of the text"
    )


def _letters(text: str) -> str:
    """Return what a tokenizer keeps of a text: letters and digits, without case and accents."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text).casefold()))


def to_words(text: str, spans: list[Span]) -> tuple[list[str], list[str]]:
    """Return the words of a text, which end where a span does, and their BIO tags."""
    edges = {edge for span in spans for edge in span[:2]}
    words, tags, last = [], [], None
    for match in WORD.finditer(text):
        inner = sorted(edge for edge in edges if match.start() < edge < match.end())
        for start, end in pairwise([match.start(), *inner, match.end()]):
            own = next((span for span in spans if span.start <= start < span.end), None)
            words.append(text[start:end])
            tags.append("O" if own is None else f"{'I' if own is last else 'B'}-{own.label}")
            last = own
    return words, tags


def cuts(text: str, spans: list[Span]) -> Iterator[Span]:
    """Yield the spans that begin or end within a word of a script that has spaces between words."""
    for span in spans:
        edges = [text[edge - 1 : edge + 1] for edge in span[:2] if edge]
        if any(len(edge) == 2 and all(map(_joins, edge)) for edge in edges):
            yield span


def _joins(character: str) -> bool:
    return character.isalnum() and unicodedata.category(character) != "Lo"
