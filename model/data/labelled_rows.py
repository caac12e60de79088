"""Fine-tuning data: files to rows.

    task             a row                                                      in files
    classification   {"text", "text_pair"?, "label" | "labels" | "score"}       .jsonl
    ner              `token ... TAG` a line, an empty line between sentences    .conll, .txt
    qa               SQuAD 1.1 or 2.0                                           .json
    embedding        {"text", "text_pair", "score"}, or paraphrases: {"texts": [...]}
                     or {"text", "text_pair", "label": "entailment"}, or related texts:
                     {"anchor", "positive", "negative"?}                        .jsonl

Where a row is a JSON object, a file may also be .tsv: its first line names the columns, and cells are text,
including quotation marks. Any file may be compressed (.gz, .xz). The name of a data set on the hub may replace
a file: see hf_datasets.py.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.data import checksums, hf_datasets
from model.data.checksums import DataError
from model.data.corpus import read_lines

SAME = ("entailment", "duplicate", "paraphrase")  # labels of pairs with the same meaning
TAG = re.compile(r"O|[BI]-.+")


@dataclass(frozen=True)
class Text:
    """A text or pair with its labels, or with a score."""

    where: str
    text: str
    pair: str | None
    labels: tuple[str, ...] = ()
    score: float = 0.0


@dataclass(frozen=True)
class Sentence:
    """Words and their BIO tags. The text is the words joined by single spaces."""

    where: str
    words: list[str]
    tags: list[str]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each word starts in the text, in code points."""
        return np.cumsum([0, *(len(word) + 1 for word in self.words[:-1])])


@dataclass(frozen=True)
class QuestionRow:
    """A question and its right answers, each with its start in the context; empty if there is no answer."""

    where: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Similar:
    """Two texts with a similarity score from 0 to 1, or related texts without a score.

    texts: a scored pair, an anchor and its positive, or a group of which any two are related
    negatives: unrelated texts
    """

    where: str
    texts: tuple[str, ...]
    score: float | None
    negatives: tuple[str, ...] = ()

    @property
    def every(self) -> tuple[str, ...]:
        """The texts, followed by the negatives."""
        return self.texts + self.negatives


def read(source: str | Path, task: str, problem_type: str | None = None) -> list[Any]:
    """Read the rows of a file, or of a data set on the hub.

    Raises DataError naming file and line, also for no rows, and for a file that differs from its lock.
    """
    named = str(source).startswith(hf_datasets.PREFIX)
    path = Path(source)
    if named:
        records = hf_datasets.records(str(source), task, numbers=problem_type == "regression")
    else:
        checksums.check(path)
        records = _records(path)
    match task:
        case "classification":
            rows: list[Any] = [_text(*record, problem_type) for record in records]
        case "ner":
            rows = [_tagged(*record) for record in records] if named else list(_sentences(path))
        case "qa":
            rows = [_question(*record) for record in records] if named else list(_questions(path))
        case "embedding":
            rows = list(_similar(str(source), records))
        case _:
            raise ValueError(f"task {task!r} is none of classification, ner, qa, embedding")
    if not rows:
        raise DataError(f"{source}: no rows")
    return rows


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place of each line, for messages, and the line."""
    for number, line in read_lines(path):
        yield f"{path}:{number}", line


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each row, for messages, and its fields."""
    lines = ((where, line) for where, line in _lines(path) if line.strip())
    if ".tsv" in path.suffixes:
        yield from _columns(lines)
    else:
        yield from ((where, _json(where, line)) for where, line in lines)


def _columns(lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table whose first line names the columns; an empty cell is a missing field."""
    where, line = next(lines, ("", ""))
    names = line.rstrip("\n").split("\t")
    if where and not {"text", "anchor"} & set(names):
        raise DataError(f"{where}: the first line must name the columns, text or anchor among them")
    for where, line in lines:
        cells = line.rstrip("\n").split("\t")
        if len(cells) != len(names):
            raise DataError(f"{where}: {len(cells)} columns, and the first line names {len(names)}")
        row: dict[str, Any] = {n: cell for n, cell in zip(names, cells, strict=True) if cell}
        if "score" in row:
            row["score"] = _number(where, row["score"])
        yield where, row


def _number(where: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{where}: score may not be {text!r}") from None


def _json(where: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise DataError(f"{where}: not a JSON object")
    return document


def _get(where: str, row: dict[str, Any], *names: str, kind: Any = str) -> Any:
    """Return the first of these fields that is present. Raises DataError if none is, or if it is no `kind`."""
    for name in names:
        if row.get(name) is not None:
            if not isinstance(row[name], kind) or isinstance(row[name], bool):
                raise DataError(f"{where}: {name} may not be {row[name]!r}")
            return row[name]
    raise DataError(f"{where}: no {' or '.join(names)}")


def _text(where: str, row: dict[str, Any], problem_type: str | None) -> Text:
    text = _get(where, row, "text")
    pair = _get(where, row, "text_pair") if "text_pair" in row else None
    if problem_type == "regression":
        score = _get(where, row, "label", "score", kind=int | float)
        return Text(where, text, pair, score=float(score))
    if problem_type == "multi_label_classification":
        labels = _get(where, row, "labels", "label", kind=list)
    else:
        labels = [_get(where, row, "label", kind=str | int)]
    return Text(where, text, pair, labels=tuple(map(str, labels)))


def _sentences(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a CoNLL file: the first and last of the columns, without `-DOCSTART-` lines."""
    words: list[str] = []
    tags: list[str] = []
    start = ""
    for where, line in _lines(path):
        columns = re.split(r"[ \t]+", line.strip(" \t\r\n"))
        if columns[0] in ("", "-DOCSTART-"):
            if words:
                yield Sentence(start, words, to_bio(tags))
            words, tags = [], []
            continue
        if len(columns) < 2 or not TAG.fullmatch(columns[-1]):
            raise DataError(f"{where}: not a token and its tag: O, B-... or I-...")
        start = where if not words else start
        words.append(columns[0])
        tags.append(columns[-1])
    if words:
        yield Sentence(start, words, to_bio(tags))


def _tagged(where: str, row: dict[str, Any]) -> Sentence:
    words, tags = _get(where, row, "tokens", kind=list), _get(where, row, "tags", kind=list)
    if len(words) != len(tags) or not all(isinstance(word, str) for word in words):
        raise DataError(f"{where}: tokens must be strings, and as many as tags")
    for tag in tags:
        if not TAG.fullmatch(str(tag)):
            raise DataError(f"{where}: a tag may not be {tag!r}: O, B-... or I-...")
    return Sentence(where, words, to_bio(tags))


def to_bio(tags: Sequence[str]) -> list[str]:
    """Convert IOB1 to BIO: IOB1 has B- only between adjacent entities of a type."""
    before = ["O", *tags[:-1]]
    return [
        f"B-{tag[2:]}" if tag.startswith("I-") and last[2:] != tag[2:] else tag
        for last, tag in zip(before, tags, strict=True)
    ]


def _questions(path: Path) -> Iterator[QuestionRow]:
    document = _json(str(path), "".join(line for _, line in _lines(path)))
    for article in _get(str(path), document, "data", kind=list):
        for paragraph in article.get("paragraphs", []):
            for entry in paragraph.get("qas", []):
                where = f"{path}: question {entry.get('id')!r}"
                answers = [] if entry.get("is_impossible") else entry.get("answers", [])
                yield QuestionRow(
                    where,
                    _get(where, entry, "question"),
                    _get(where, paragraph, "context"),
                    tuple(_answer(where, answer) for answer in answers),
                )


def _question(where: str, row: dict[str, Any]) -> QuestionRow:
    """Return a hub row; its answers are a list of objects, or an object of lists."""
    answers = _get(where, row, "answers", kind=dict | list)
    if isinstance(answers, dict):
        texts, starts = (_get(where, answers, n, kind=list) for n in ("text", "answer_start"))
        if len(texts) != len(starts):
            raise DataError(f"{where}: {len(texts)} answers and {len(starts)} starts")
        answers = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
    return QuestionRow(
        where,
        _get(where, row, "question"),
        _get(where, row, "context"),
        tuple(_answer(where, answer) for answer in answers),
    )


def _answer(where: str, answer: dict[str, Any]) -> tuple[str, int]:
    return _get(where, answer, "text"), _get(where, answer, "answer_start", kind=int)


def _similar(source: str, records: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[Similar]:
    """Yield rows; scores are scaled so that the lowest is 0 and the highest 1."""
    lines = list(records)
    scores = [_get(at, row, "score", kind=int | float) for at, row in lines if "score" in row]
    low, high = min(scores, default=0), max(scores, default=1)
    if low == high:
        raise DataError(
            f"{source}: all scores are {low}, which says of no pair that it is more alike"
        )
    for where, row in lines:
        if "texts" in row:
            texts = _get(where, row, "texts", kind=list)
            if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
                raise DataError(f"{where}: texts must be two or more strings")
            yield Similar(where, tuple(texts), None)
            continue
        if {"anchor", "positive"} & set(row):
            yield _anchored(where, row)
            continue
        pair = (_get(where, row, "text"), _get(where, row, "text_pair"))
        if "score" in row:
            yield Similar(where, pair, (row["score"] - low) / (high - low))
        elif _get(where, row, "label") in SAME:
            yield Similar(where, pair, None)


def _anchored(where: str, row: dict[str, Any]) -> Similar:
    """Return a row with an anchor. `negative` is a string or a list, or there are `negative_1`, `negative_2`, ..."""
    pair = (_get(where, row, "anchor"), _get(where, row, "positive"))
    negatives: list[str] = []
    for name in filter(hf_datasets.NEGATIVES.fullmatch, row):
        if row[name] is not None:
            value = _get(where, row, name, kind=str | list)
            negatives += [value] if isinstance(value, str) else value
    for text in (*pair, *negatives):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: anchor, positive and negatives must be strings, not blank")
    if pair[1] in negatives:
        raise DataError(f"{where}: {pair[1]!r} is both positive and negative")
    return Similar(where, pair, None, tuple(negatives))
