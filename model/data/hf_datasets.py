"""Data sets by name, from the hub or from a directory in its layout, as rows with our names for their columns.

    hub:OWNER/NAME[:CONFIG]/SPLIT[@REVISION][?OURS=THEIRS&...]

    hub:stanfordnlp/sst2/train                            hub:nyu-mll/glue:mrpc/validation
    hub:stanfordnlp/snli/train[:10000]@refs/pr/2          hub:./reviews/train?text=body&label=stars

A directory may stand for OWNER/NAME. Columns are known by the names that they commonly have; after a question mark they
are named one and all. `datasets` fetches and keeps what is not there yet, and runs no code of the data set's.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from model.data.checksums import DataError

PREFIX = "hub:"
UNLABELLED = object()
NAME = re.compile(
    r"hub:(?P<path>[^:@?]+)(:(?P<config>[^:/@?]+))?/(?P<split>\w[\w.]*(\[[\w%:+-]*\])?)"
    r"(@(?P<revision>[^?]+))?(\?(?P<columns>.+))?"
)

NEGATIVES = re.compile(r"negatives?|negative_\d+")

# What a text, or a text and its pair, are called: the first of these that is there.
TEXTS = (
    ("text", "text_pair"),
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text",),
    ("sentence",),
)
ALSO = {"tags": "ner_tags", "tokens": "words", "score": "similarity_score"}
FIELDS = {
    "classification": ["text", "text_pair", "label", "labels", "score"],
    "embedding": ["text", "text_pair", "score", "label", "anchor", "positive", "texts"],
    "ner": ["tokens", "tags"],
    "qa": ["question", "context", "answers"],
}
NEEDED = {  # any of these will do
    "classification": [("text", "label"), ("text", "labels"), ("text", "score")],
    "embedding": [
        ("text", "text_pair", "score"),
        ("text", "text_pair", "label"),
        ("anchor", "positive"),
        ("texts",),
    ],
    "ner": [("tokens", "tags")],
    "qa": [("question", "context", "answers")],
}


def records(name: str, task: str, *, numbers: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row stands, and its fields by our names; a label is its name, or with `numbers` its number.

    Rows that are marked as having no label (-1, but with `numbers`) are left out. Raises DataError naming what is not
    to be had.
    """
    match = NAME.fullmatch(name)
    if not match:
        raise DataError(f"{name}: not hub:OWNER/NAME[:CONFIG]/SPLIT[@REVISION][?OURS=THEIRS&...]")
    found = _load(name, match["path"], match["config"], match["split"], match["revision"])
    columns = _columns(name, task, found.features, match["columns"])
    read = {ours: _reader(found.features[theirs], numbers) for ours, theirs in columns.items()}
    unlabelled = (UNLABELLED,) if numbers else (UNLABELLED, -1)
    for index, row in enumerate(found.select_columns(sorted({*columns.values()}))):
        fields = {ours: read[ours](row[theirs]) for ours, theirs in columns.items()}
        if fields.get("label") not in unlabelled:
            yield f"{name}: row {index}", fields


@functools.cache  # a run reads its dev set many times, and must not need the hub for it
def _load(name: str, path: str, config: str | None, split: str, revision: str | None) -> Any:
    import datasets  # slow to import, and needed by few

    if not Path(path).is_dir() and path.count("/") != 1:
        raise DataError(f"{name}: {path} is neither a directory nor OWNER/NAME on the hub")
    try:
        return datasets.load_dataset(path, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise DataError(f"{name}: {' '.join(why.split())}") from None


def _columns(
    name: str, task: str, features: Mapping[str, Any], query: str | None
) -> dict[str, str]:
    """Their columns by our names: those that the name itself names, or else those that are known."""
    columns = _named(name, task, query) if query else _known(task, features)
    there = ", ".join(features)
    for theirs in columns.values():
        if theirs not in features:
            raise DataError(f"{name}: no column {theirs!r} among {there}")
    if not any(columns.keys() >= {*needed} for needed in NEEDED[task]):
        needed = ", or ".join(" and ".join(names) for names in NEEDED[task])
        example = "&".join(f"{ours}=COLUMN" for ours in NEEDED[task][0])
        raise DataError(
            f"{name}: {task} needs {needed}; the columns are {there}. Say which is which: ?{example}"
        )
    return columns


def _named(name: str, task: str, query: str) -> dict[str, str]:
    parts = [part.partition("=") for part in query.split("&")]
    for ours, equals, _ in parts:
        if not equals or not (ours in FIELDS[task] or NEGATIVES.fullmatch(ours)):
            known = ", ".join(FIELDS[task])
            raise DataError(f"{name}: {ours!r} in the place of FIELD=COLUMN; fields are {known}")
    return {ours: theirs for ours, _, theirs in parts}


def _known(task: str, features: Mapping[str, Any]) -> dict[str, str]:
    columns = {
        ours: theirs
        for ours in FIELDS[task]
        for theirs in (ALSO.get(ours, ours), ours)
        if theirs in features
    }
    if "text" in FIELDS[task]:
        texts = next((names for names in TEXTS if features.keys() >= {*names}), ())
        columns |= zip(("text", "text_pair"), texts, strict=False)
    if task == "embedding":
        columns |= {column: column for column in features if NEGATIVES.fullmatch(column)}
        if "score" not in columns and "label" in columns and _is_float(features["label"]):
            columns["score"] = columns.pop("label")
    return columns


def _is_float(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith("float")


def _reader(feature: Any, numbers: bool) -> Callable[[Any], Any]:
    """What makes a column's values ours: the names of classes, alone or in a list."""
    names = getattr(feature, "names", None)
    if names:
        return lambda n: UNLABELLED if n in (None, -1) else n if numbers else names[n]
    names = getattr(getattr(feature, "feature", None), "names", None)
    if names:
        return lambda many: [names[n] if n >= 0 else n for n in many]
    return lambda value: value
