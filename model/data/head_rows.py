"""The settings of a head, and its rows: files, with the names of their columns and replacements for their labels."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from model.data import row_warnings
from model.data.labelled_rows import DataError, Sentence
from model.data.labelled_rows import read as read_rows
from model.run_settings import RunSettings, check_choice, setting
from service.core.data_files import sources
from service.core.manifest import Head, PoolingMode, ProblemType, Task

LOGGER = logging.getLogger(__name__)
SINGLE_LABEL: ProblemType = "single_label_classification"
BALANCED = "balanced"
# Tasks that learn from related texts, or from pairs with a score.
PAIRED = ("embedding", "sparse-embedding")
SCALE = 20.0  # factor of cosines before a softmax


class HeadSettings(RunSettings):
    """The settings of one head: a `[heads.<name>]` table of a run's TOML file."""

    task: Task = setting(
        ..., "classification, ner, qa, embedding or sparse-embedding", '"classification"'
    )
    train: list[str] = setting(..., "list of files to train on", '["train.jsonl"]')
    dev: str = setting(
        "", "file to evaluate on; without one, dev_share of the rows is held out", '"dev.jsonl"'
    )
    batch_size: int = setting(
        32, "rows of a micro-batch; of an embedding, groups of related texts", "16", ge=1
    )
    scored_batch_size: int = setting(
        32, "embedding: scored pairs of a separate micro-batch", "32", ge=1
    )
    weight: float = setting(1.0, "weight of this head's loss", "0.5")
    teacher: str = setting(
        "", "checkpoint with this head, whose outputs it learns, too", '"runs/big/checkpoint"'
    )
    replace_words: float = setting(
        0.0, "with a teacher: share of words replaced at the first step", "0.3", ge=0, le=1
    )
    columns: dict[str, str] = setting(
        dict, "names of the columns or fields of the files", '{ text = "body", label = "stars" }'
    )
    label_map: dict[str, str] = setting(
        dict, "classification: replacements for labels of training rows", '{ "very good" = "good" }'
    )
    drop_labels: list[str] = setting(
        list, "classification: rows with these labels are left out of training", '["neutral"]'
    )
    class_weights: str | dict[str, float] = setting(
        dict,
        'classification: weight of each label in the loss, 1 where it has none; or "balanced"',
        '"balanced"',
    )
    max_length: int = setting(0, "tokens of the longest input; 0 for the run's", "384")
    stride: int = setting(64, "ner and qa: tokens that adjacent windows share", "64")
    join_sentences: int = setting(
        1, "ner: from 2 on, adds rows of this many adjacent sentences", "3", ge=1
    )
    loss: Literal["cosent", "cosine"] = setting(
        "cosent", "embedding, scored pairs: cosent or cosine", '"cosine"'
    )
    contrast: Literal["ranking", "triplet"] = setting(
        "ranking", "embedding, related texts: ranking or triplet", '"triplet"'
    )
    scale: float = setting(SCALE, "ranking: factor of cosines", "20.0", gt=0)
    symmetric: bool = setting(True, "ranking: rank anchors for positives, too", "false")
    distance: Literal["euclidean", "cosine"] = setting(
        "euclidean", "triplet: euclidean or cosine", '"cosine"'
    )
    margin: float | None = setting(
        None, "triplet: margin; by default 1 (euclidean) or 0.2 (cosine)", "0.5", gt=0
    )
    flops: float = setting(
        0.003, "sparse-embedding: weight of the FLOPS regularizer", "0.001", ge=0
    )
    flops_ramp: float = setting(
        1 / 3, "sparse-embedding: share of the steps over which the weight rises", "0.5", ge=0, le=1
    )
    labels: list[str] = setting(
        list,
        "labels in order; by default all labels of the data, sorted",
        '["negative", "positive"]',
    )
    problem_type: ProblemType = setting(
        SINGLE_LABEL,
        "single_label_classification, multi_label_classification or regression",
        '"regression"',
    )
    pooling: PoolingMode = setting(
        "mean",
        "embedding: mean, cls, max, lasttoken, weightedmean or mean_sqrt_len_tokens",
        '"cls"',
    )
    normalize: bool = setting(True, "embedding: whether vectors are scaled to length 1", "false")
    max_answer_tokens: int = setting(30, "qa: tokens of the longest answer", "30", ge=1)
    max_query_tokens: int = setting(64, "qa: tokens of the longest question", "64", ge=1)
    demo: bool = setting(
        False, "whether the head shows how things work and is not meant for use", "true"
    )

    @model_validator(mode="after")
    def _fit(self) -> Self:
        self.train = [sources.with_columns(file, self.columns) for file in self.train]
        self.dev = self.dev and sources.with_columns(self.dev, self.columns)
        if self.task in ("late-interaction", "hidden-states"):
            raise ValueError(f"task: heads of {self.task} are not trained here")
        if self.join_sentences > 1 and self.task != "ner":
            raise ValueError("join_sentences: for ner, whose rows are sentences")
        if self.label_map or self.drop_labels:
            if (self.task, self.problem_type) != ("classification", SINGLE_LABEL):
                raise ValueError(
                    "label_map and drop_labels require classification with a single label"
                )
            if both := sorted(set(self.label_map) & set(self.drop_labels)):
                raise ValueError(f"label_map and drop_labels both contain {both[0]!r}")
        if self.class_weights:
            self.check_class_weights()
        if self.problem_type == "regression" and len(self.labels) > 1:
            raise ValueError(f"labels: a regression has one, not {', '.join(self.labels)}")
        return self

    def check_class_weights(self) -> None:
        """Raise ValueError for weights of a head that has no classes, and for weights that are not above 0."""
        if self.task != "classification" or is_graded(self):
            raise ValueError(
                "class_weights: for classification with labels, not for numbers or other tasks"
            )
        if isinstance(self.class_weights, str):
            check_choice("class_weights", self.class_weights, (BALANCED,))
            return
        for label, weight in self.class_weights.items():
            if not weight > 0:
                raise ValueError(f"class_weights: {weight} of {label!r} is not above 0")


def read(file: str | Path, head: HeadSettings | Head) -> list[Any]:
    """Read the rows of a file for a head. Raises DataError as `labelled_rows.read` does.

    Tags that are numbers are named by the labels of the head.
    """
    names = head.labels if head.task == "ner" else ()
    kind = "regression" if is_graded(head) else head.problem_type
    return read_rows(file, "embedding" if head.task in PAIRED else head.task, kind, names)


def read_training(settings: HeadSettings) -> list[Any]:
    """Read a head's training rows, with `label_map` and `drop_labels` applied, and log what is probably not meant.

    Raises DataError as `labelled_rows.read` does, and for a label to map or drop that no row has.
    """
    files = [read(file, settings) for file in settings.train]
    if settings.join_sentences > 1:
        files += [join_sentences(rows, settings.join_sentences) for rows in files]
    rows = _mapped(settings, [row for rows in files for row in rows])
    for warning in row_warnings.find_warnings(rows):
        LOGGER.warning("%s: %s", ", ".join(settings.train), warning)
    return rows


def join_sentences(rows: Sequence[Sentence], count: int) -> list[Sentence]:
    """Return each `count` adjacent sentences as one row; the last row may have fewer.

    A tagger that has only read single sentences has not seen a full stop within a text.
    """
    parts = [rows[start : start + count] for start in range(0, len(rows), count)]
    return [
        Sentence(
            part[0].where,
            [word for row in part for word in row.words],
            [tag for row in part for tag in row.tags],
            " ".join(row.text for row in part),
        )
        for part in parts
        if len(part) > 1
    ]


def _mapped(settings: HeadSettings, rows: list[Any]) -> list[Any]:
    if not (settings.label_map or settings.drop_labels):
        return rows
    labels = {label for row in rows for label in row.labels}
    if unknown := [n for n in (*settings.label_map, *settings.drop_labels) if n not in labels]:
        files = ", ".join(settings.train)
        raise DataError(f"{files}: no row has the label {unknown[0]!r} of label_map or drop_labels")
    return [
        replace(row, labels=tuple(settings.label_map.get(label, label) for label in row.labels))
        for row in rows
        if not set(row.labels) & set(settings.drop_labels)
    ]


def is_graded(head: HeadSettings | Head) -> bool:
    """Return whether a text's label is a number: of any size (regression), or from 0 to 1 (a single label)."""
    single = len(head.labels) == 1 and head.problem_type != "multi_label_classification"
    return head.task == "classification" and (head.problem_type == "regression" or single)
