"""Fine-tuning data: files to rows.

    task             a row                                                           other formats
    classification   text, text_pair?, label or labels or score
    ner              tokens, tags                                                    CoNLL: `token ... TAG` a line
                      or text, entities
    qa               question, context, answers or answer and answer_start           SQuAD 1.1 or 2.0
    embedding        text, text_pair, score; paraphrases: texts, or text, text_pair
                     and a label of SAME; related texts: anchor, positive, negatives

A row is a line of a table (CSV, TSV), a JSON object (JSON lines, a list), or a row of a Parquet file; columns may have
further names (`columns.py`). Any text file may be compressed (.gz, .xz). The name of a data set on the hub may replace
a file: see hf_datasets.py.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.data import checksums, conll, file_records, hf_datasets, spans
from model.data.file_records import Fields
from service.core.data_files import columns, sources
from service.core.data_files.text_files import DataError

# Labels of pairs with the same meaning, and of other pairs.
SAME = ("entailment", "duplicate", "paraphrase", "equivalent", "true", "1")
DIFFERENT = ("contradiction", "neutral", "false", "0", *(f"not_{label}" for label in SAME[:4]))
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)\s*")
HINTS = {
    "entities": ": spans are a list; tagged words need tokens and tags",
    **dict.fromkeys(("label", "labels"), ': labels are a list, such as ["a", "b"]'),
}
MOST_CHARACTERS = 100  # of a value in a message
MOST_PLACES = 5  # rows without a field that a message names


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
    """Words and their BIO tags.

    passage: the text that has only blanks between the words; empty if they are joined by single spaces
    """

    where: str
    words: list[str]
    tags: list[str]
    passage: str = ""

    @property
    def text(self) -> str:
        return self.passage or " ".join(self.words)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each word starts in the text, in code points."""
        if not self.passage:
            return np.cumsum([0, *(len(word) + 1 for word in self.words[:-1])])
        starts, at = [], 0
        for word in self.words:
            starts.append(self.passage.index(word, at))
            at = starts[-1] + len(word)
        return np.array(starts, np.int64)


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


class MissingFieldError(DataError):
    """A row without a field that it needs."""

    def __init__(self, where: str, names: str):
        super().__init__(f"{where}: no {names}")
        self.where, self.names = where, names


def read(
    source: str | Path,
    task: str,
    problem_type: str | None = None,
    labels: Sequence[str] = (),
) -> list[Any]:
    """Read the rows of a file, or of a data set on the hub.

    labels: the names of tags that are numbers
    Raises DataError naming file and line, also for no rows, and for a file that differs from its lock.
    """
    if task not in columns.TRAINING:
        raise ValueError(f"task {task!r} is none of {', '.join(columns.TRAINING)}")
    rows: list[Any] = []
    missing: list[MissingFieldError] = []
    left_out: Counter[str] = Counter()
    make, records = _open(str(source), task, problem_type, labels)
    for record in records:
        try:
            if row := make(*record):
                rows.append(row)
            else:
                left_out[str(record[1]["label"]).strip()] += 1
        except MissingFieldError as error:
            missing.append(error)
    if len(missing) > 1:
        first, *others = missing
        same = [
            error.where.rpartition(":")[2].strip() for error in others if error.names == first.names
        ]
        more = ", ..." if len(same) > MOST_PLACES else ""
        places = f" (and {', '.join(same[:MOST_PLACES])}{more}; {len(missing)} rows in all)"
        raise DataError(f"{first}{places}: fill the cells, or remove the rows")
    if missing:
        raise missing[0]
    counts = ", ".join(f"{label!r} ({count:,} rows)" for label, count in left_out.items())
    if not rows:
        raise DataError(f"{source}: no rows" + f" but pairs with the label {counts}" * bool(counts))
    if counts:
        conll.log(f"{source}: pairs with the label {counts} are left out; {len(rows):,} rows stay")
    return rows


def columns_of(source: str, task: str) -> dict[str, str]:
    """Return the columns of a file by our fields; empty for a format without columns. Raises DataError."""
    _, records = _open(source, task, None, ())
    _, row = next(iter(records))[:2]
    return row.names if isinstance(row, Fields) else {}


def _open(
    source: str, task: str, problem_type: str | None, labels: Sequence[str]
) -> tuple[Callable[..., Any], Iterable[tuple[Any, ...]]]:
    """Return the records of a source, and a function from a record to a row, or None for one to leave out."""
    file, query = sources.split(source)
    path, needs = Path(file), columns.TRAINING[task]
    numbers = problem_type == "regression"
    records: Iterator[tuple[str, dict[str, Any]]]
    if sources.is_hub(source):
        records = hf_datasets.records(source, needs, numbers=numbers)
    else:
        checksums.check(path)
        match file_records.format_of(path, needs):
            case "conll":
                records = conll.read(path, query)
            case "parquet":
                records = hf_datasets.parquet_records(path, needs, query, numbers=numbers)
            case "jsonl" | "json" as kind:
                records = file_records.read_objects(path, needs, query, lines=kind == "jsonl")
            case _:
                records = file_records.read_table(path, needs, query, problem_type)
    match task:
        case "classification":
            return functools.partial(_text, problem_type=problem_type), records
        case "ner":
            return functools.partial(_tagged, labels=labels), records
        case "qa":
            return _question, records
        case _:
            every = _scored([*records])
            return functools.partial(_related, scores=_range(file, every)), every


def _get(where: str, row: dict[str, Any], *names: str, kind: Any = str) -> Any:
    """Return the first of these fields that is present.

    Raises MissingFieldError if none is, and DataError if it is no `kind` or not a finite number.
    """
    shown = row.names if isinstance(row, Fields) else {}
    for name in names:
        if (value := row.get(name)) is not None:
            is_finite = not isinstance(value, float) or math.isfinite(value)
            if not isinstance(value, kind) or isinstance(value, bool) or not is_finite:
                hint = HINTS.get(name, "") if kind is list else ""
                if kind is str and isinstance(value, list | dict):
                    hint = ': a row is an object of its own, as pandas writes with orient="records"'
                value = repr(value)
                value = value if len(value) <= MOST_CHARACTERS else value[:MOST_CHARACTERS] + "..."
                raise DataError(f"{where}: {shown.get(name, name)} may not be {value}{hint}")
            return value
    raise MissingFieldError(where, " or ".join(shown.get(name, name) for name in names))


def _label_field(row: dict[str, Any]) -> str:
    """Return the field with the labels of a row of one label."""
    names = row.names if isinstance(row, Fields) else row
    return "labels" if "labels" in names and "label" not in names else "label"


def _shown(row: dict[str, Any]) -> str:
    """Return the name of the column of labels."""
    field = _label_field(row)
    return row.names[field] if isinstance(row, Fields) else field


def _text(where: str, row: dict[str, Any], problem_type: str | None) -> Text:
    text = _get(where, row, "text")
    pair = _get(where, row, "text_pair") if "text_pair" in row else None
    if problem_type == "regression":
        score = _get(where, row, "label", "score", kind=int | float)
        return Text(where, text, pair, score=float(score))
    if problem_type == "multi_label_classification":
        labels = _get(where, row, "labels", "label", kind=list)
    else:
        labels = _get(where, row, _label_field(row), kind=str | int | list)
        labels = labels if isinstance(labels, list) else [labels]
        if len(labels) > 1:
            several = 'several labels of a row need problem_type = "multi_label_classification"'
            raise DataError(f"{where}: {_shown(row)} may not be {labels!r}: {several}")
    if not all(isinstance(label, str | int) and not isinstance(label, bool) for label in labels):
        raise DataError(f"{where}: {_shown(row)} may not be {labels!r}: labels are text")
    stripped = [str(label).strip() for label in labels]
    if not all(stripped) or (not labels and problem_type != "multi_label_classification"):
        raise MissingFieldError(where, _shown(row))
    return Text(where, text, pair, labels=tuple(stripped))


def _tagged(where: str, row: dict[str, Any], labels: Sequence[str]) -> Sentence:
    if "tags" not in row and "entities" in row:
        text = _get(where, row, "text")
        found = spans.read(where, text, _get(where, row, "entities", kind=list))
        for start, end, _ in spans.cuts(text, found):
            conll.log(f"{where}: the entity {text[start:end]!r} ({start}-{end}) cuts a word")
        if not text.strip():
            raise MissingFieldError(where, "text")
        return Sentence(where, *spans.to_words(text, found), text)
    words, tags = _get(where, row, "tokens", kind=list), _get(where, row, "tags", kind=list)
    if len(words) != len(tags) or not all(isinstance(word, str) for word in words):
        raise DataError(f"{where}: tokens must be strings, and as many as tags")
    return Sentence(where, words, to_bio([_tag(where, tag, labels) for tag in tags]))


def _tag(where: str, tag: Any, labels: Sequence[str]) -> str:
    """Return a tag, or the name of one that is a number. Raises DataError for what is no tag."""
    is_number = isinstance(tag, int) and not isinstance(tag, bool)
    if is_number or (isinstance(tag, str) and tag.strip().isdecimal()):
        if not labels:
            raise DataError(
                f"{where}: a tag may not be {tag!r} without names for the numbers: set the head's labels in their"
                ' order, such as labels = ["O", "B-PER", "I-PER"]'
            )
        if not 0 <= int(tag) < len(labels):
            raise DataError(f"{where}: a tag may not be {tag!r}: the head has {len(labels)} labels")
        return labels[int(tag)]
    name = str(tag).strip()
    if not conll.TAG.fullmatch(name):
        raise DataError(
            f"{where}: a tag may not be {tag!r}: O, B-..., I-... (or BIOES, BILOU, BMEWO)"
        )
    return name


def to_bio(tags: Sequence[str]) -> list[str]:
    """Convert tags to BIO.

    IOB1 has B- only between adjacent entities of a type. In BIOES, BILOU and BMEWO, S-, U- and W- are entities of one
    word, E- and L- the last word of an entity, and M- a word within one.
    """
    converted = []
    inside = ""  # the type of the entity that may continue
    for tag in tags:
        position, _, kind = tag.partition("-")
        if tag == "O":
            converted.append(tag)
            inside = ""
            continue
        begins = position in "BSUW" or kind != inside
        converted.append(f"{'B' if begins else 'I'}-{kind}")
        inside = "" if position in "SUWEL" else kind
    return converted


def _question(where: str, row: dict[str, Any]) -> QuestionRow:
    """Return the question of a row.

    Its answers are a list of objects, or an object of lists; or there is one answer with its start. There is no answer
    where `is_impossible` is true, and where an answer is empty.
    """
    question, context = _get(where, row, "question"), _get(where, row, "context")
    answers: Any = [{"text": row.get("answer") or "", "answer_start": row.get("answer_start")}]
    if "answers" in row:
        answers = _get(where, row, "answers", kind=dict | list)
    if isinstance(answers, dict):
        texts, starts = (_get(where, answers, n, kind=list) for n in ("text", "answer_start"))
        if len(texts) != len(starts):
            raise DataError(f"{where}: {len(texts)} answers and {len(starts)} starts")
        answers = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
    if not all(isinstance(answer, dict) for answer in answers):
        raise DataError(f"{where}: answers must be JSON objects with text and answer_start")
    if _is_impossible(where, row.get("is_impossible")):
        answers = []
    found = tuple(_answer(where, answer) for answer in answers if str(answer.get("text")).strip())
    return QuestionRow(where, question, context, found)


def _is_impossible(where: str, value: Any) -> bool:
    """Return the value of `is_impossible`, which may be text. Raises DataError for anything but true and false."""
    known = {"none": False, "false": False, "0": False, "true": True, "1": True}
    if (name := str(value).strip().lower()) not in known:
        raise DataError(f"{where}: is_impossible may not be {value!r}: true or false")
    return known[name]


def _answer(where: str, answer: dict[str, Any]) -> tuple[str, int]:
    text, start = _get(where, answer, "text"), _get(where, answer, "answer_start", kind=int)
    if start < 0:
        raise DataError(f"{where}: the answer {text!r} may not start at {start}")
    return text, start


def _range(source: str, records: Iterable[tuple[str, dict[str, Any]]]) -> tuple[float, float]:
    """Return the lowest and the highest score. Raises DataError where all are equal."""
    scores = [_get(at, row, "score", kind=int | float) for at, row in records if "score" in row]
    low, high = min(scores, default=0), max(scores, default=1)
    if low == high:
        raise DataError(
            f"{source}: all scores are {low}, which says of no pair that it is more alike"
        )
    return low, high


def _scored(records: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Return rows whose labels are their scores if all labels are numbers, and one of them has a fraction."""
    labels = [str(row["label"]) for _, row in records if "label" in row and "score" not in row]
    if not all(map(NUMBER.fullmatch, labels)) or not any("." in label for label in labels):
        return records
    return [(where, _with_score(row) if "label" in row else row) for where, row in records]


def _with_score(row: dict[str, Any]) -> dict[str, Any]:
    names = row.names if isinstance(row, Fields) else {}
    fields = {name: value for name, value in row.items() if name != "label"}
    scored = {"score": float(str(row["label"])), **fields}
    return Fields(scored, {"score": names.get("label", "label"), **names})


def _related(where: str, row: dict[str, Any], scores: tuple[float, float]) -> Similar | None:
    """Return a pair or a group of texts; None for a pair whose label is one of DIFFERENT.

    scores: the lowest and the highest of the file, which become 0 and 1
    """
    if "texts" in row:
        texts = _get(where, row, "texts", kind=list)
        if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where}: texts must be two or more strings")
        return Similar(where, tuple(texts), None)
    if {"anchor", "positive"} & set(row):
        return _anchored(where, row)
    pair = (_get(where, row, "text"), _get(where, row, "text_pair"))
    if "score" in row or (isinstance(row, Fields) and "score" in row.names):
        low, high = scores
        return Similar(where, pair, (_get(where, row, "score", kind=object) - low) / (high - low))
    label = row.get("label")
    match columns.normalize(str("" if label is None else label)):
        case "":
            raise MissingFieldError(where, _shown(row))
        case name if name in SAME:
            return Similar(where, pair, None)
        case name if name in DIFFERENT:
            return None
    raise DataError(
        f"{where}: the label {label!r} is neither of pairs with the same meaning ({', '.join(SAME)}) nor of others"
        f" ({', '.join(DIFFERENT)}): write the name of a class that is a number, and similarities in a column score"
    )


def _anchored(where: str, row: dict[str, Any]) -> Similar:
    """Return a row with an anchor. `negative` is a string or a list, or there are `negative_1`, `negative_2`, ..."""
    positive = _get(where, row, "positive", kind=str | list)
    if isinstance(positive, list):
        if len(positive) != 1:
            raise DataError(f"{where}: {len(positive)} positives: write a row for each")
        [positive] = positive
    pair = (_get(where, row, "anchor"), positive)
    negatives: list[str] = []
    for name in filter(columns.NEGATIVES.fullmatch, row):
        if row[name] is not None:
            value = _get(where, row, name, kind=str | list)
            negatives += [value] if isinstance(value, str) else value
    for text in (*pair, *negatives):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: anchor, positive and negatives must be strings, not blank")
    if pair[1] in negatives:
        raise DataError(f"{where}: {pair[1]!r} is both positive and negative")
    return Similar(where, pair, None, tuple(negatives))
