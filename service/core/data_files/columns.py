"""The columns of data files: our fields, and the names by which columns are recognized.

Upper and lower case, blanks around a name, and blanks and dashes in place of underscores do not matter. A source may
name its columns instead (`sources.py`).
"""

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from service.core.data_files import sources
from service.core.data_files.text_files import DataError

MOST_CHARACTERS = 40  # of a column's name in a message
NEGATIVES = re.compile(r"neg|negatives?|negative_\d+")

# The usual columns of a text and its pair; the first ones present are used.
TEXTS = (
    ("text", "text_pair"),
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text",),
    ("sentence",),
    ("question",),
    ("review",),
    ("content",),
    ("comment",),
    ("message",),
    ("tweet",),
    ("body",),
)
# Further names of fields, unless they are fields of the task; the field's own name is preferred.
ALSO = {
    "tags": ("ner_tags", "ner_tag", "tag"),
    "tokens": ("words", "word", "token"),
    "score": ("similarity_score",),
    "answer": ("answer_text",),
    "label": (
        *("labels", "accept", "sentiment", "category", "class", "intent", "target"),
        *("gold_label", "is_duplicate"),
    ),
    "anchor": ("query",),
    "positive": ("pos",),
    "entities": ("spans", "ents", "label", "labels", "result"),
}


class ColumnsError(DataError):
    """A file without the columns that a task needs."""


class Needs(NamedTuple):
    """What a task reads of a file: its fields, and the sets of fields of which a row must have one."""

    task: str
    fields: tuple[str, ...]
    required: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"needs {', or '.join(' and '.join(fields) for fields in self.required)}"


TRAINING = {
    "classification": Needs(
        "classification",
        ("text", "text_pair", "label", "labels", "score"),
        (("text", "label"), ("text", "labels"), ("text", "score")),
    ),
    "embedding": Needs(
        "embedding",
        ("text", "text_pair", "score", "label", "anchor", "positive", "texts"),
        (
            ("text", "text_pair", "score"),
            ("text", "text_pair", "label"),
            ("anchor", "positive"),
            ("texts",),
        ),
    ),
    "ner": Needs(
        "ner",
        ("tokens", "tags", "text", "entities"),
        (("tokens", "tags"), ("text", "entities")),
    ),
    "qa": Needs(
        "qa",
        ("question", "context", "answers", "answer", "answer_start", "is_impossible"),
        (("question", "context", "answers"), ("question", "context", "answer", "answer_start")),
    ),
}


def normalize(name: str) -> str:
    """Return a column's name in the form in which names are compared."""
    return re.sub(r"[\s-]+", "_", name.strip()).casefold()


@functools.lru_cache(maxsize=1024)  # rows of a file have few sets of columns
def recognize(needs: Needs, names: tuple[str, ...]) -> dict[str, str]:
    """Return the columns with usual names, by our fields. Raises DataError for two columns of one name."""
    present = {normalize(name): name for name in reversed(names)}
    found = {
        field: present[name]
        for field in needs.fields
        for name in _own_names(needs, field)[::-1]
        if name in present
    }
    if "text" in needs.fields:
        texts = next((pair for pair in TEXTS if present.keys() >= {*pair}), ())
        pairs = zip(("text", "text_pair"), texts, strict=False)
        found |= {field: present[name] for field, name in pairs if field in needs.fields}
    if "anchor" in needs.fields:
        found |= {
            name: present[name] for name in map(normalize, names) if NEGATIVES.fullmatch(name)
        }
    counts = Counter(map(normalize, names))
    for field, name in found.items():
        if counts[normalize(name)] > 1:
            every = ", ".join(repr(each) for each in names if normalize(each) == normalize(name))
            raise DataError(f"several columns for {field}: {every}: {_example(needs)}")
    return found


def choose(where: str, needs: Needs, names: Sequence[str], query: str) -> dict[str, str]:
    """Return the columns by our fields: those that the query names, else those with usual names.

    where: the place, for messages
    query: `FIELD=COLUMN&...` of the source; empty if it names none
    Raises DataError for unknown columns, for several of one name, and where a required one is missing.
    """
    if query:
        found = named(where, needs, query)
        for column in found.values():
            if column not in names:
                raise DataError(f"{where}: no column {column!r} among {', '.join(names)}")
    else:
        try:
            found = recognize(needs, tuple(names))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    if not fits(needs, found):
        raise lacking(where, needs, names, found)
    return found


def fits(needs: Needs, found: Mapping[str, str]) -> bool:
    """Return whether these fields are enough."""
    return any(found.keys() >= {*fields} for fields in needs.required)


def lacking(
    where: str, needs: Needs, names: Sequence[str], found: Mapping[str, str]
) -> ColumnsError:
    """Return the error for columns without a required field."""
    closest = max(needs.required, key=lambda fields: len(found.keys() & {*fields}))
    missing = next(field for field in closest if field not in found)
    known = ", ".join(accepted(needs, missing))
    return ColumnsError(
        f"{where}: no {missing} (recognized names: {known}): {needs.task} {needs}; the"
        f" columns are {', '.join(map(_short, names))}. Say which is which: {_example(needs)}"
    )


def accepted(needs: Needs, field: str) -> list[str]:
    """Return the names of columns that are recognized as a field."""
    if field in ("text", "text_pair"):
        place = ("text", "text_pair").index(field)
        return list(dict.fromkeys(names[place] for names in TEXTS if len(names) > place))
    return _own_names(needs, field)


def _own_names(needs: Needs, field: str) -> list[str]:
    return [field, *(name for name in ALSO.get(field, ()) if name not in needs.fields)]


def named(where: str, needs: Needs, query: str) -> dict[str, str]:
    """Return the columns of a source's query, by our fields. Raises DataError for an unknown field."""
    found = sources.read_columns(query)
    for field, column in found:
        if not column or not (field in needs.fields or NEGATIVES.fullmatch(field)):
            known = ", ".join(needs.fields)
            raise ColumnsError(
                f"{where}: {field!r} in the place of FIELD=COLUMN; fields are {known}"
            )
    return dict(found)


def _short(name: str) -> str:
    return name if len(name) <= MOST_CHARACTERS else f"{name[:MOST_CHARACTERS]}..."


def _example(needs: Needs) -> str:
    query = "&".join(f"{field}=COLUMN" for field in needs.required[0])
    return f"'FILE?{query}', or the setting columns"
