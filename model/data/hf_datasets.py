"""Data sets of the hub, or of a directory in its layout, by name, as rows with our column names.

    hub:OWNER/NAME[:CONFIG]/SPLIT[@REVISION][?OURS=THEIRS&...]

    hub:stanfordnlp/sst2/train                            hub:nyu-mll/glue:mrpc/validation
    hub:stanfordnlp/snli/train[:10000]@refs/pr/2          hub:./reviews/train?text=body&label=stars

A directory may replace OWNER/NAME. Columns are found by their usual names, unless the name lists all of them after a
question mark. `datasets` downloads and caches data sets, and runs no code of theirs.
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

# The usual columns of a text and its pair; the first ones present are used.
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
REQUIRED_FIELDS = {  # one of these sets
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
    """Yield the place of each row, for messages, and its fields by our names.

    numbers: whether a label is its number and not its name
    Rows without a label (-1, unless `numbers` is set) are left out. Raises DataError naming a missing data set or
    column.
    """
    match = NAME.fullmatch(name)
    if not match:
        raise DataError(f"{name}: not hub:OWNER/NAME[:CONFIG]/SPLIT[@REVISION][?OURS=THEIRS&...]")
    loaded = _load(name, match["path"], match["config"], match["split"], match["revision"])
    columns = _columns(name, task, loaded.features, match["columns"])
    read = {ours: _reader(loaded.features[theirs], numbers) for ours, theirs in columns.items()}
    unlabelled = (UNLABELLED,) if numbers else (UNLABELLED, -1)
    for index, row in enumerate(loaded.select_columns(sorted({*columns.values()}))):
        fields = {ours: read[ours](row[theirs]) for ours, theirs in columns.items()}
        if fields.get("label") not in unlabelled:
            yield f"{name}: row {index}", fields


@functools.cache  # a run reads its dev set many times, and needs the hub once
def _load(name: str, path: str, config: str | None, split: str, revision: str | None) -> Any:
    import datasets  # slow to import, and rarely needed

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
    """Return the data set's columns by our names: those in the data set's name, else those with usual names."""
    columns = _named(name, task, query) if query else _known(task, features)
    present = ", ".join(features)
    for theirs in columns.values():
        if theirs not in features:
            raise DataError(f"{name}: no column {theirs!r} among {present}")
    if not any(columns.keys() >= {*needed} for needed in REQUIRED_FIELDS[task]):
        needed = ", or ".join(" and ".join(names) for names in REQUIRED_FIELDS[task])
        example = "&".join(f"{ours}=COLUMN" for ours in REQUIRED_FIELDS[task][0])
        raise DataError(
            f"{name}: {task} needs {needed}; the columns are {present}. Say which is which: ?{example}"
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
    """Return a function from a column's values to ours: class numbers, single or in a list, become names."""
    names = getattr(feature, "names", None)
    if names:
        return lambda n: UNLABELLED if n in (None, -1) else n if numbers else names[n]
    names = getattr(getattr(feature, "feature", None), "names", None)
    if names:
        return lambda many: [names[n] if n >= 0 else n for n in many]
    return lambda value: value
