"""The rows of bulk work, and the routes of their requests."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# The route of each task, and its fields in a request by the column that they are from; the first is required.
ROUTES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "classification": ("/classify", {"text": "inputs", "text_pair": "text_pair"}),
    "ner": ("/ner", {"text": "inputs"}),
    "qa": ("/qa", {"question": "question", "context": "context"}),
    "embedding": ("/embed", {"text": "inputs"}),
    "sparse-embedding": ("/embed-sparse", {"text": "inputs"}),
    "late-interaction": ("/embed-tokens", {"text": "inputs"}),
    "fill-mask": ("/fill-mask", {"text": "inputs"}),
}


class Row(NamedTuple):
    """A row of the input.

    where: its place, for messages
    names, values: its columns, as they stand
    texts: the texts of a request, by their fields
    error: why it cannot be predicted; empty if it can
    """

    where: str
    names: Sequence[str]
    values: Sequence[Any]
    texts: Mapping[str, str]
    error: str


class Outcome(NamedTuple):
    """The result of a row, or its error."""

    result: Any
    error: str
