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

from model.data import conll
from service.core.data_files import columns, sources
from service.core.data_files.columns import Needs
from service.core.data_files.text_files import DataError

PREFIX = sources.HUB
UNLABELLED = object()
NAME = re.compile(
    r"hub:(?P<path>[^:@?]+)(:(?P<config>[^:/@?]+))?/(?P<split>\w[\w.]*(\[[\w%:+-]*\])?)"
    r"(@(?P<revision>[^?]+))?(\?(?P<columns>.+))?"
)


def records(
    name: str, needs: Needs, *, numbers: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each row, for messages, and its fields by our names.

    numbers: whether a label is its number and not its name
    Rows without a label (-1, unless `numbers` is set) are left out. Raises DataError naming a missing data set or
    column.
    """
    match = NAME.fullmatch(name)
    if not match:
        raise DataError(f"{name}: not hub:OWNER/NAME[:CONFIG]/SPLIT[@REVISION][?OURS=THEIRS&...]")
    loaded = _load(name, match["path"], match["config"], match["split"], match["revision"])
    yield from _rows(name, needs, loaded, match["columns"] or "", numbers)


def parquet_records(
    path: Path, needs: Needs, query: str, *, numbers: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a Parquet file as `records` does. Raises DataError for a file that is none."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{path}: Parquet is read by the library datasets: pip install datasets"
        ) from None
    with path.open("rb") as file:
        if file.read(4) != b"PAR1":
            raise DataError(f"{path}: not a Parquet file, which its name says")
    try:
        loaded = datasets.Dataset.from_parquet(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{path}: {_in_one_line(error)}") from None
    yield from _rows(str(path), needs, loaded, query, numbers)


def _rows(
    name: str, needs: Needs, loaded: Any, query: str, numbers: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    found = _columns(name, needs, loaded.features, query)
    read = {ours: _reader(loaded.features[theirs], numbers) for ours, theirs in found.items()}
    unlabelled = (UNLABELLED,) if numbers else (UNLABELLED, -1)
    left_out = 0
    for index, row in enumerate(loaded.select_columns(sorted({*found.values()}))):
        fields = {ours: read[ours](row[theirs]) for ours, theirs in found.items()}
        if fields.get("label") not in unlabelled:
            yield f"{name}: row {index}", fields
        else:
            left_out += 1
    if left_out:
        conll.log(f"{name}: rows left out because they have no label: {left_out:,}")


def _in_one_line(error: Exception) -> str:
    return " ".join((f"{error}: {error.__cause__}" if error.__cause__ else str(error)).split())


@functools.cache  # a run reads its dev set many times, and needs the hub once
def _load(name: str, path: str, config: str | None, split: str, revision: str | None) -> Any:
    import datasets  # slow to import, and rarely needed

    if not Path(path).is_dir() and path.count("/") != 1:
        raise DataError(f"{name}: {path} is neither a directory nor OWNER/NAME on the hub")
    try:
        return datasets.load_dataset(path, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{name}: {_in_one_line(error)}") from None


def _columns(name: str, needs: Needs, features: Mapping[str, Any], query: str) -> dict[str, str]:
    """Return the data set's columns by our names: those in the data set's name, else those with usual names."""
    found = dict(columns.choose(name, needs, list(features), query))
    label = "" if query or needs.task != "embedding" or "score" in found else found.get("label")
    if label and _is_float(features[label]):
        found["score"] = found.pop("label")
    return found


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
