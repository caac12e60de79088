"""The commands that a page of the documentation shows, with the output that it shows for each."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
OUTPUTS = ("json", "text")


@dataclass(frozen=True)
class Example:
    """A command and its output.

    section: the title of the section of the page
    language: bash or python
    shown: the output on the page; None where the page shows no output
    """

    section: str
    language: str
    command: str
    shown: str | None


def examples(page: Path) -> Iterator[Example]:
    """Yield the commands of a page in order. A block of JSON or text belongs to the command before it."""
    first, *rest = SECTION.split(page.read_text(encoding="utf-8"))
    for section, text in [("", first), *zip(rest[::2], rest[1::2], strict=True)]:
        blocks = FENCE.findall(text)
        for (language, command), following in pairwise([*blocks, ("", "")]):
            if language in ("bash", "python"):
                shown = following[1] if following[0] in OUTPUTS else None
                yield Example(section, language, command, shown)


def rounded(value: Any) -> Any:
    """Return a value in which numbers equal others within 0.02: int8 rounds differently on other processors."""
    if isinstance(value, float):
        return pytest.approx(value, abs=0.02)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def values(output: str) -> Any:
    """Return an output as values to compare: JSON as it is read, other text as its words and numbers."""
    try:
        return json.loads(output)
    except ValueError:
        return [_number(word) for word in output.split()]


def _number(word: str) -> str | float:
    try:
        return float(word)
    except ValueError:
        return word
