"""Rows that are readable and probably not meant are counted and named, and training goes on."""

import logging

import pytest

from model.data import head_rows
from model.data.head_rows import HeadSettings
from model.data.labelled_rows import Sentence, Text
from model.data.row_warnings import find_warnings


def text(place: int, text: str, label: str) -> Text:
    return Text(f"a.csv:{place}", text, None, (label,))


def test_labels_that_differ_in_case_or_blanks():
    """The most frequent one stays; the message has the setting that merges them."""
    labels = ["very good", "very good", "Very  Good", "bad"]
    rows = [text(number, str(number), label) for number, label in enumerate(labels)]
    assert list(find_warnings(rows)) == [
        "the labels 'very good' (2 rows), 'Very  Good' (1 row) differ in case, blanks, dashes, invisible characters or"
        ' .0 alone and are learned as different ones: label_map = { "Very  Good" = "very good" } merges them; see'
        " a.csv:2"
    ]


@pytest.mark.parametrize(
    ("labels", "warning"),
    [
        (["1", "1", "1.0"], "labels '1' (2 rows), '1.0' (1 row) differ"),
        (["1", "10", "1.5", "-1"], ""),
        (
            ["non-fiction", "non_fiction", "nonfiction"],
            "'non_fiction' (1 row), 'nonfiction' (1 row) differ",
        ),
        (["c++", "c", "1-2", "12"], ""),
        (["neg", "neg", "neg\u200b"], '{ "neg\\u200b" = "neg" } merges them; see a.csv:2'),
        (["x;y", "x", "y|z"], "separate several: 'x;y' (1 row: a.csv:0), 'y|z' (1 row: a.csv:2)"),
        (["a/b", "a", "x, y", ";)"], ""),
        ([f"{n}.5" for n in range(10)], 'set problem_type = "regression"'),
        ([*"abcdef", *"xxxxx"], "6 labels are in one row only, of 11 rows: 'a' (a.csv:0), 'b'"),
        ([*"abcde", *"xxxxx"], ""),
    ],
)
def test_labels_that_are_probably_not_meant(labels, warning):
    rows = [text(number, str(number), label) for number, label in enumerate(labels)]
    found = list(find_warnings(rows))
    assert len(found) == bool(warning)
    assert warning in "".join(found)


def test_texts_with_different_labels():
    rows = [text(n, f"{' ' * n}same" if n < 4 else str(n), "xy"[n % 2]) for n in range(8)]
    assert list(find_warnings(rows)) == [
        "1 text has different labels in several rows, such as 'same': 'x' (a.csv:0), 'y' (a.csv:1)"
    ]


def test_types_of_entities_that_differ_in_case():
    rows = [Sentence("", ["Ada"], ["B-PER"]), Sentence("", ["Ada"], ["B-Per"])]
    [warning] = find_warnings(rows)
    assert warning.startswith("the labels 'PER' (1 row), 'Per' (1 row) differ in case")


def test_values_that_look_missing():
    """They are counted by value and named by their places; other words stay what they are."""
    rows = [text(2, "NaN", "x"), text(3, "a", "N/A"), text(4, " NaN ", "x"), text(5, "nano", "x")]
    assert list(find_warnings(rows)) == [
        "the text 'NaN' looks like a missing value (2 rows): a.csv:2, a.csv:4",
        "the label 'N/A' looks like a missing value (1 row): a.csv:3",
    ]


def test_training_logs_them(tmp_path, caplog):
    """Blanks around a label are none of its own; what label_map merges is no warning."""
    path = tmp_path / "a.csv"
    path.write_text('text,label\na,"NUM "\nb,NUM\nc,Num\nd,HUM\n')
    settings = HeadSettings(task="classification", train=[str(path)])
    with caplog.at_level(logging.WARNING):
        rows = head_rows.read_training(settings)
    assert [row.labels[0] for row in rows] == ["NUM", "NUM", "Num", "HUM"]
    [record] = caplog.records
    assert record.getMessage().startswith(f"{path}: the labels 'NUM' (2 rows), 'Num' (1 row)")

    caplog.clear()
    head_rows.read_training(
        HeadSettings(task="classification", train=[str(path)], label_map={"Num": "NUM"})
    )
    assert not caplog.records


def test_columns_of_a_head(tmp_path):
    """The setting holds for all files of the head that name none of their own, and once."""
    path = tmp_path / "a.csv"
    path.write_text("Body,Kind\na,x\n")
    columns = {"text": "Body", "label": "Kind"}
    settings = HeadSettings(
        task="classification", train=[str(path)], dev=str(path), columns=columns
    )
    assert [row.text for row in head_rows.read_training(settings)] == ["a"]
    assert settings.dev == f"{path}?text=Body&label=Kind"
    again = HeadSettings(**vars(settings))
    assert again.train == settings.train
