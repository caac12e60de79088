"""The columns of data files by task: our fields, and the names by which columns are recognized.

Upper and lower case, blanks around a name, and blanks and dashes in place of underscores do not matter. A source may
name its columns instead (`sources.py`).
"""

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from model.data import sources
from model.data.checksums import DataError

MOST_CHARACTERS = 40  # of a column's name in a message
NEGATIVES = re.compile(r"negatives?|negative_\d+")

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
)
# Further names of fields; the field's own name is preferred.
ALSO = {
    "tags": ("ner_tags",),
    "tokens": ("words",),
    "score": ("similarity_score",),
    "answer": ("answer_text",),
}
FIELDS = {
    "classification": ["text", "text_pair", "label", "labels", "score"],
    "embedding": ["text", "text_pair", "score", "label", "anchor", "positive", "texts"],
    "ner": ["tokens", "tags"],
    "qa": ["question", "context", "answers", "answer", "answer_start"],
}
REQUIRED_FIELDS = {  # one of these sets
    "classification": [("text", "label"), ("text", "labels"), ("text", "score")],
    "embedding": [
        ("text", "text_pair", "score"),
        ("text", "text_pair", "label"),
        ("anchor", "positive"),
        ("texts",),
    ],
    "ner": [("tokens", "tags")],
    "qa": [("question", "context", "answers"), ("question", "context", "answer", "answer_start")],
}


def normalize(name: str) -> str:
    """Return a column's name in the form in which names are compared."""
    return re.sub(r"[\s-]+", "_", name.strip()).casefold()


@functools.lru_cache(maxsize=1024)
def recognize(task: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return the columns with usual names, by our fields. Raises DataError for two columns of one name."""
    present = {normalize(name): name for name in reversed(names)}
    found = {
        field: present[name]
        for field in FIELDS[task]
        for name in (field, *ALSO.get(field, ()))[::-1]
        if name in present
    }
    if "text" in FIELDS[task]:
        texts = next((pair for pair in TEXTS if present.keys() >= {*pair}), ())
        found |= {
            field: present[name] for field, name in zip(("text", "text_pair"), texts, strict=False)
        }
    if task == "embedding":
        found |= {
            name: present[name] for name in map(normalize, names) if NEGATIVES.fullmatch(name)
        }
    counts = Counter(map(normalize, names))
    for field, name in found.items():
        if counts[normalize(name)] > 1:
            every = ", ".join(repr(each) for each in names if normalize(each) == normalize(name))
            raise DataError(f"several columns for {field}: {every}: {_example(task)}")
    return found


def choose(where: str, task: str, names: Sequence[str], query: str) -> dict[str, str]:
    """Return the columns by our fields: those that the query names, else those with usual names.

    where: the place, for messages
    query: `FIELD=COLUMN&...` of the source; empty if it names none
    Raises DataError for unknown columns, for several of one name, and for columns that the task lacks.
    """
    if query:
        found = named(where, task, query)
        for column in found.values():
            if column not in names:
                raise DataError(f"{where}: no column {column!r} among {', '.join(names)}")
    else:
        try:
            found = recognize(task, tuple(names))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    if not fits(task, found):
        raise lacking(where, task, names, found)
    return found


def fits(task: str, found: Mapping[str, str]) -> bool:
    """Return whether these fields are enough for a task."""
    return any(found.keys() >= {*fields} for fields in REQUIRED_FIELDS[task])


def lacking(where: str, task: str, names: Sequence[str], found: Mapping[str, str]) -> DataError:
    """Return the error for columns without a field that the task needs."""
    closest = max(REQUIRED_FIELDS[task], key=lambda fields: len(found.keys() & {*fields}))
    missing = next(field for field in closest if field not in found)
    needed = ", or ".join(" and ".join(fields) for fields in REQUIRED_FIELDS[task])
    return DataError(
        f"{where}: no {missing} (recognized names: {', '.join(accepted(missing))}): {task} needs {needed}; the columns"
        f" are {', '.join(map(_short, names))}. Say which is which: {_example(task)}"
    )


def accepted(field: str) -> list[str]:
    """Return the names of columns that are recognized as a field."""
    if field in ("text", "text_pair"):
        place = ("text", "text_pair").index(field)
        return list(dict.fromkeys(names[place] for names in TEXTS if len(names) > place))
    return [field, *ALSO.get(field, ())]


def named(where: str, task: str, query: str) -> dict[str, str]:
    """Return the columns of a source's query, by our fields. Raises DataError for a field that the task lacks."""
    found = sources.read_columns(query)
    for field, column in found:
        if not column or not (field in FIELDS[task] or NEGATIVES.fullmatch(field)):
            known = ", ".join(FIELDS[task])
            raise DataError(f"{where}: {field!r} in the place of FIELD=COLUMN; fields are {known}")
    return dict(found)


def _short(name: str) -> str:
    return name if len(name) <= MOST_CHARACTERS else f"{name[:MOST_CHARACTERS]}..."


def _example(task: str) -> str:
    fields = REQUIRED_FIELDS[task][0]
    table = ", ".join(f'{field} = "COLUMN"' for field in fields)
    query = "&".join(f"{field}=COLUMN" for field in fields)
    return f"columns = {{ {table} }} in the head's table, or ?{query} after the file's name"
