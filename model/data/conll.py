"""CoNLL files: a line per token, in columns of which one has the word and one its tag; an empty line ends a sentence.

Columns are separated by tabs where every line has one, else by blanks. They are recognized by their content, unless
`?tokens=2&tags=4` after the file's name numbers them.
"""

import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from service.core.data_files import rows, sources
from service.core.data_files.columns import TRAINING
from service.core.data_files.text_files import DataError, read_lines

LOGGER = logging.getLogger(__name__)
TAG = re.compile(r"O|[BIESULMW]-.+")  # BIO, IOB1, BIOES, BILOU, BMEWO
CHUNK = re.compile(r"O|[BI]-(NP|VP|PP|ADVP|ADJP|SBAR|PRT|CONJP|INTJ|LST|UCP|NC|VC|PC)")  # phrases
FIELDS = {"tokens", "tags"}
LANGUAGE = re.compile(r"([a-z]{2,3}(?:-[a-z]+)*:).+")  # before each word of WikiANN's files


class Token(NamedTuple):
    """A line of a file: its number, and its columns."""

    line: int
    cells: list[str]


def read(path: Path, query: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield the place of each sentence, for messages, and its tokens and tags.

    Comments and `-DOCSTART-` lines are left out. Raises DataError naming a wrong line, or the columns of the file if
    several could be meant.
    """
    sentences = _sentences(path)
    tokens = [token for sentence in sentences for token in sentence]
    if not tokens:
        return
    columns = [*zip(*(token.cells for token in tokens), strict=True)]
    word, tag = _named(path, query, columns) if query else _recognize(path, tokens, columns)
    languages = {match and match[1] for match in map(LANGUAGE.fullmatch, columns[word])}
    language = (languages.pop() if len(languages) == 1 else None) or ""
    if len(columns) > 2 or language:
        described = _describe({"words": word, "tags": tag}, columns)
        log(
            f"{path}: {described}"
            + (f"; {language!r} before each word is removed" * bool(language))
        )
    for sentence in sentences:
        words = [token.cells[word].removeprefix(language) for token in sentence]
        yield (
            f"{path}:{sentence[0].line}",
            {"tokens": words, "tags": [token.cells[tag] for token in sentence]},
        )


def _sentences(path: Path) -> list[list[Token]]:
    """Return the sentences of a file. Raises DataError for lines with different numbers of columns."""
    lines = [(number, line.strip(" \t\n")) for number, line in read_lines(path)]
    is_tabbed = all("\t" in line for _, line in lines if line and line[0] not in "-#")
    sentences: list[list[Token]] = [[]]
    for number, line in lines:
        cells = line.split("\t") if is_tabbed else re.split(r"[ \t]+", line)
        if cells[0] in ("", "-DOCSTART-"):
            sentences.append([])
        elif not line.startswith(("# ", "#\t")) or TAG.fullmatch(cells[-1]):
            sentences[-1].append(Token(number, [cell.strip() for cell in cells]))
    sentences = [sentence for sentence in sentences if sentence]
    if sentences and rows.recognized(TRAINING["ner"], sentences[0][0].cells).keys() >= FIELDS:
        sentences[0].pop(0)  # the names of the columns
        sentences = [sentence for sentence in sentences if sentence]
    first = sentences[0][0] if sentences else None
    for line, cells in (token for sentence in sentences for token in sentence):
        if len(cells) < 2:
            raise _no_tag(path, Token(line, cells))
        if first and len(cells) != len(first.cells):
            counts = f"{len(cells)} columns, and line {first.line} has {len(first.cells)}"
            raise DataError(
                f"{path}:{line}: {counts}: separate columns by tabs if words have blanks"
            )
    return sentences


def _recognize(
    path: Path, tokens: Sequence[Token], columns: Sequence[Sequence[str]]
) -> tuple[int, int]:
    """Return the indices of the words' and the tags' columns.

    The words are the first column that has neither tags nor numbers only. Of several columns of tags, those of phrases
    and those without an entity are not meant.
    """
    wrong = [[n for n, cell in enumerate(c) if not TAG.fullmatch(cell)] for c in columns]
    every = [place for place, found in enumerate(wrong) if not found]
    if not every:
        closest = min(reversed(wrong), key=len)
        raise _no_tag(path, tokens[closest[0]])
    tags = [place for place in every if not all(map(CHUNK.fullmatch, columns[place]))] or every
    words = [
        place
        for place, cells in enumerate(columns)
        if place not in every and not all(map(str.isdecimal, cells))
    ]
    if len(tags) > 1 or not words:
        numbered = {str(place + 1): place for place in range(len(columns))}
        raise DataError(
            f"{path}: which columns have the words and the tags is unclear: {_describe(numbered, columns)}. Number"
            " them after the file's name, such as ?tokens=2&tags=3"
        )
    return words[0], tags[0]


def _named(path: Path, query: str, columns: Sequence[Sequence[str]]) -> tuple[int, int]:
    found = dict(sources.read_columns(query))
    numbers = [*map(str, range(1, len(columns) + 1))]
    if found.keys() != FIELDS or not {*found.values()} <= {*numbers}:
        raise DataError(
            f"{path}: has no named columns, but the numbers 1 to {len(columns)}, such as ?tokens=1&tags=2;"
            f" not ?{query}"
        )
    return int(found["tokens"]) - 1, int(found["tags"]) - 1


def _no_tag(path: Path, token: Token) -> DataError:
    return DataError(
        f"{path}:{token.line}: not a token and its tag (O, B-PER, I-PER; BIOES, BILOU and BMEWO, too):"
        f" {' '.join(token.cells)!r}"
    )


def _describe(names: Mapping[str, int], columns: Sequence[Sequence[str]]) -> str:
    """Return names of columns, each with its number and its first cells."""
    shown = []
    for name, place in names.items():
        cells = ", ".join(map(repr, columns[place][:3]))
        number = "" if name.isdecimal() else f" in column {place + 1} of {len(columns)}"
        shown.append(f"{name}{number} ({cells})")
    return ", ".join(shown)


@functools.cache  # a run reads its dev set many times
def log(message: str) -> None:
    LOGGER.warning("%s", message)
