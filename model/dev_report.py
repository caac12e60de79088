"""What the dev rows of a head show: scores by label, calibration, and the worst errors with their texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from seqeval.metrics import classification_report
from seqeval.metrics.sequence_labeling import get_entities
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from model import evaluate
from model.data import examples, head_rows
from model.data.labelled_rows import QuestionRow, Sentence, Text
from model.evaluate import HeadOutputs
from model.report import page, svg
from model.report.page import Figure, Section
from model.training.calibration import Calibration, calibrate
from model.training.training_run import show_metric
from service.core import decode
from service.core.manifest import Head

MOST_ERRORS = 20
MOST_LABELS = 30  # of a confusion matrix
MOST_CHARACTERS = 600  # of a text in a table


def fit(rows: Sequence[Any], texts: HeadOutputs, head: Head) -> Calibration | None:
    """Fit a temperature to the outputs of a head for rows; None for heads without classes, and for few rows."""
    if not head.has_classes or not rows:
        return None
    gold = np.stack([examples.text_labels(row, head) for row in rows])
    return calibrate(mean_logits(texts), gold, head.problem_type)


def mean_logits(texts: HeadOutputs) -> np.ndarray:
    """Return the logits of each text, `[n, C]`."""
    every = (
        decode.mean_logits(outputs, [len(window) for window in text.windows])
        for text, outputs in texts
    )
    return np.stack(list(every))


def describe(
    name: str,
    rows: Sequence[Any],
    texts: HeadOutputs,
    head: Head,
    origin: str,
    calibration: Calibration | None,
) -> Section:
    """Return the section of a head: its scores by label, its reliability and its worst errors."""
    found = evaluate.judge_outputs(rows, texts, head)
    metrics = {show_metric(metric): value for metric, value in found.metrics.items()}
    parts = [page.note(f"Evaluated on {origin}."), page.facts(metrics)]
    match head.task:
        case "classification" if head_rows.is_graded(head):
            parts += graded(rows, texts, head)
        case "classification":
            parts += classes(rows, texts, head, found.answers)
        case "ner":
            parts += entities(rows, found.answers)
        case "qa":
            parts += answers(rows, found.answers)
        case "embedding" | "sparse-embedding":
            parts += vectors(rows, texts, head, found.answers)
    if calibration:
        parts.append(reliability(calibration))
    return Section(f"head {name}", f"Head {name}", "\n".join(filter(None, parts)))


def reliability(found: Calibration) -> str:
    """Return the reliability curve of a head, and what its temperature changes."""
    chart = svg.reliability_chart({"as trained": found.bins_before, "calibrated": found.bins_after})
    values = {
        "temperature": found.temperature,
        "expected calibration error as trained": found.error_before,
        "expected calibration error, calibrated": found.error_after,
        "rows": found.rows,
    }
    remark = (
        "The error of calibrated scores is cross-fitted: each fifth of the rows has the temperature of the others. "
        "A request with calibrated = true gets these scores."
    )
    return (
        "<h3>Calibration</h3>\n"
        + page.figures({"Reliability": chart})
        + page.facts(values)
        + page.note(remark)
    )


def errors(head: Sequence[str], rows: Sequence[Sequence[Any]], texts: Sequence[int]) -> str:
    """Return the table of the worst errors, worst first; a remark where there are none."""
    if not rows:
        return "<h3>Worst errors</h3>\n" + page.note("No errors.")
    return "<h3>Worst errors</h3>\n" + page.table(head, rows[:MOST_ERRORS], texts)


def shorten(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} …"


def text_of(row: Text) -> str:
    """Return a text, or a pair in two lines."""
    return "\n".join(map(shorten, filter(None, (row.text, row.pair))))


# -- classification -------------------------------------------------------------------------------


def classes(
    rows: Sequence[Text], texts: HeadOutputs, head: Head, found: Sequence[Any]
) -> list[str]:
    """Return the confusion matrix, the scores by label and the errors of which the head was most sure."""
    scores = decode.activate(mean_logits(texts), head.problem_type)
    labels, size = head.labels, len(head.labels)
    gold = np.stack([examples.text_labels(row, head) for row in rows])
    several = head.problem_type == "multi_label_classification"
    guess = scores >= 0.5 if several else scores.argmax(axis=1)
    each = precision_recall_fscore_support(
        gold, guess, labels=range(size), average=None, zero_division=0
    )
    by_label = [
        [label, *map(float, values), int(count)]
        for label, *values, count in zip(labels, *each, strict=True)
    ]
    parts = []
    if not several and size <= MOST_LABELS:
        parts += ["<h3>Confusion matrix</h3>", confusion(gold, guess, labels)]
    head_row = ["label", "precision", "recall", "F1", "rows"]
    parts += ["<h3>Scores by label</h3>", page.table(head_row, by_label)]
    # how sure the head was of its worst label
    is_wrong = guess.astype(int) != gold if several else None
    wrong = np.abs(scores - gold).max(axis=1) if several else scores.max(axis=1)
    missed = is_wrong.any(axis=1) if is_wrong is not None else guess != gold
    worst = sorted(np.flatnonzero(missed), key=lambda i: -wrong[i])
    table = [
        [
            text_of(rows[i]),
            ", ".join(rows[i].labels),
            ", ".join(found[i]) if several else found[i],
            float(wrong[i]),
            rows[i].where,
        ]
        for i in worst
    ]
    names = ["text", "label", "answer", "score of the error" if several else "score", "row"]
    return [*parts, errors(names, table, [0])]


def confusion(gold: Any, guess: Any, labels: Sequence[str]) -> str:
    """Return the confusion matrix: a row for each label of the data, a column for each answer."""
    counts = confusion_matrix(gold, guess, labels=range(len(labels)))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows = [
        [label, *(Figure(f"{count:,}", share) for count, share in zip(row, of_row, strict=True))]
        for label, row, of_row in zip(labels, counts.tolist(), shares.tolist(), strict=True)
    ]
    return page.table(["label \\ answer", *labels], rows)


def graded(rows: Sequence[Text], texts: HeadOutputs, head: Head) -> list[str]:
    """Return the rows with the largest difference of score and grade."""
    scores = decode.activate(mean_logits(texts), head.problem_type)[:, 0]
    differences = [abs(float(score) - row.score) for score, row in zip(scores, rows, strict=True)]
    worst = sorted(range(len(rows)), key=lambda i: -differences[i])
    table = [[text_of(rows[i]), rows[i].score, float(scores[i]), rows[i].where] for i in worst]
    return [errors(["text", "grade", "score", "row"], table, [0])]


# -- other tasks ----------------------------------------------------------------------------------


def entities(rows: Sequence[Sentence], found: Sequence[Sequence[str]]) -> list[str]:
    """Return the scores by entity type, and the sentences with the most wrong entities."""
    gold = [row.tags for row in rows]
    parts = []
    if any(tag != "O" for tags in gold for tag in tags):
        report = classification_report(gold, list(found), output_dict=True, zero_division=0)
        by_type = [
            [
                name,
                *(float(values[n]) for n in ("precision", "recall", "f1-score")),
                int(values["support"]),
            ]
            for name, values in report.items()
            if not name.endswith(" avg")
        ]
        head = ["type", "precision", "recall", "F1", "entities"]
        parts = ["<h3>Scores by type</h3>", page.table(head, by_type)]
    table = []
    for row, tags in zip(rows, found, strict=True):
        right, answer = set(get_entities(row.tags)), set(get_entities(list(tags)))
        if wrong := len(right ^ answer):
            spans = [name_spans(row.words, each) for each in (right - answer, answer - right)]
            table.append([shorten(row.text), *spans, wrong, row.where])
    table.sort(key=lambda row: -row[3])
    head = ["sentence", "missed", "wrong", "number", "row"]
    return [*parts, errors(head, table, [0, 1, 2])]


def name_spans(words: Sequence[str], spans: set[tuple[str, int, int]]) -> str:
    """Return entities as text, one a line: `PER Ada Lovelace`."""
    ordered = sorted(spans, key=lambda span: span[1:])
    return "\n".join(f"{kind} {' '.join(words[a : b + 1])}" for kind, a, b in ordered)


def answers(rows: Sequence[QuestionRow], found: Sequence[str]) -> list[str]:
    """Return the shares of right answers, and the questions with the worst answers."""
    scores = [
        evaluate.answer_f1(answer, [text for text, _ in row.answers])
        for row, answer in zip(rows, found, strict=True)
    ]
    worst = sorted((i for i in range(len(rows)) if scores[i] < 1), key=lambda i: scores[i])
    table = [
        [
            rows[i].question,
            rows[i].answers[0][0] if rows[i].answers else "(no answer)",
            found[i] or "(no answer)",
            scores[i],
            shorten(rows[i].context),
            rows[i].where,
        ]
        for i in worst
    ]
    return [errors(["question", "right", "answer", "F1", "context", "row"], table, [0, 1, 2, 4])]


def vectors(
    rows: Sequence[Any], texts: HeadOutputs, head: Head, nearest: Sequence[int]
) -> list[str]:
    """Return the pairs whose rank by cosine differs most from that by score, or texts that have another neighbor."""
    if rows[0].score is None:
        every = [text for row in rows for text in row.every]
        starts = np.cumsum([0, *(len(row.every) for row in rows)])[:-1].tolist()
        table = [
            [row.texts[0], row.texts[1], every[nearest[start]], row.where]
            for row, start in zip(rows, starts, strict=True)
            if every[nearest[start]] not in row.texts[1:]
        ]
        return [errors(["text", "related", "nearest", "row"], table, [0, 1, 2])]
    pooled = evaluate.unit_vectors(texts, head)
    cosines = [float(a @ b) for a, b in zip(pooled[0::2], pooled[1::2], strict=True)]
    scores = [row.score for row in rows]
    ranks = [np.argsort(np.argsort(values, kind="stable")) for values in (cosines, scores)]
    apart = np.abs(ranks[0] - ranks[1]) / len(rows)
    worst = sorted(range(len(rows)), key=lambda i: -apart[i])
    table = [
        [
            "\n".join(map(shorten, rows[i].texts)),
            scores[i],
            cosines[i],
            float(apart[i]),
            rows[i].where,
        ]
        for i in worst
    ]
    return [errors(["pair", "score", "cosine", "difference of ranks", "row"], table, [0])]
