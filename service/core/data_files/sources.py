"""The names of data sources in settings and on command lines.

    FILE                        data/questions.csv
    FILE?FIELD=COLUMN&...       data/questions.csv?text=Review text&label=Stars
    hub:...                     see hf_datasets.py

A percent sign quotes characters of a column as in URLs: `%26` is `&`.
"""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

HUB = "hub:"


def is_hub(source: str) -> bool:
    """Return whether a source is a data set of the hub, or a directory in its layout."""
    return source.startswith(HUB)


def split(source: str) -> tuple[str, str]:
    """Return a source without its columns, and the columns as they are written; empty if there are none."""
    if "?" not in source or (not is_hub(source) and Path(source).exists()):
        return source, ""
    path, _, query = source.partition("?") if is_hub(source) else source.rpartition("?")
    return path, query


def with_columns(source: str, columns: Mapping[str, str]) -> str:
    """Return a source that names its columns; one that does already is returned as it is.

    columns: the name of the column by the name of our field
    """
    if not columns or split(source)[1]:
        return source
    query = "&".join(f"{field}={quote(name, safe=' ')}" for field, name in columns.items())
    return f"{source}?{query}"


def read_columns(query: str) -> list[tuple[str, str]]:
    """Return the fields and columns of a query. The column is empty where there is no `FIELD=COLUMN`."""
    parts = [part.partition("=") for part in query.split("&")]
    return [(field, unquote(column)) for field, _, column in parts]
