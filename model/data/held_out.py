"""Rows that are held out of training data, to evaluate a head that has no dev file."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from model.data.labelled_rows import QuestionRow, Sentence, Similar, Text

FEWEST_ROWS = 20  # of fewer rows none are held out: a tenth of them measures nothing


def hold_out(rows: Sequence[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Split rows into those to train on and those to evaluate on, both in the order of the data.

    share: of the rows to evaluate on, in each stratum: label, set of entity types, or whether a question has an
        answer. Scores are sampled evenly over their range.
    seed: the split is a pure function of rows, share and seed

    Rows with an equal text (for questions, an equal context) stay together. A stratum of a single text stays in
    training. Fewer than FEWEST_ROWS rows stay together, too.
    """
    if len(rows) < FEWEST_ROWS or not share:
        return list(rows), []
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[_key(row)].append(index)
    strata, scores = _strata(rows), [_score(row) for row in rows]
    sizes = Counter(strata[members[0]] for members in groups.values())
    drawn = np.random.default_rng(seed)
    chances = drawn.random(len(groups))
    order = sorted(
        (strata[members[0]], scores[members[0]], chance, members)
        for members, chance in zip(groups.values(), chances, strict=True)
        if sizes[strata[members[0]]] > 1
    )
    # Every 1 / share-th group of the sorted ones: each stratum gives its share, rounded up or down.
    start, held = drawn.random(), set()
    for number, (*_, members) in enumerate(order):
        if math.floor((number + 1) * share + start) > math.floor(number * share + start):
            held.update(members)
    kept = [row for index, row in enumerate(rows) if index not in held]
    return kept, [rows[index] for index in sorted(held)]


def _key(row: Any) -> Hashable:
    """Return the text that rows of one part share."""
    match row:
        case Text():
            return row.text, row.pair
        case QuestionRow():
            return row.context
        case Similar():
            return row.texts[0]
        case Sentence():
            return row.text


def _strata(rows: Sequence[Any]) -> list[str]:
    """Return the name of each row's stratum; of several labels, the one that is rarest in the data."""
    counts = Counter(label for row in rows for label in getattr(row, "labels", ()))
    names = []
    for row in rows:
        match row:
            case Text(labels=labels):
                names.append(min(labels, key=lambda label: (counts[label], label), default=""))
            case Sentence(tags=tags):
                names.append(" ".join(sorted({tag[2:] for tag in tags if tag != "O"})))
            case QuestionRow(answers=answers):
                names.append("answer" if answers else "no answer")
            case Similar(score=score):
                names.append("related" if score is None else "scored")
    return names


def _score(row: Any) -> float:
    return getattr(row, "score", None) or 0.0
