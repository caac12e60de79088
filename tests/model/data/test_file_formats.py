"""Each task reads each format that its rows can have, with and without a byte order mark."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from model.data import labelled_rows
from model.data.labelled_rows import DataError, QuestionRow, Sentence, Similar, Text
from service.core.data_files import columns

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "training.md"

# Rows of each task, as JSON objects and as our rows.
ROWS: dict[str, list[dict[str, Any]]] = {
    "classification": [
        {"text": 'He said "no";\nthen, nothing', "label": "x"},
        {"text": "café", "label": "y"},
    ],
    "ner": [
        {"tokens": ["Ada", "Byron", "sat"], "ner_tags": ["B-PER", "E-PER", "O"]},
        {"tokens": ["Turin"], "ner_tags": ["S-LOC"]},
    ],
    "qa": [
        {
            "question": "Who?",
            "context": "Ada drew it.",
            "answers": {"text": ["Ada"], "answer_start": [0]},
        },
        {
            "question": "Why?",
            "context": "Ada drew it.",
            "answers": {"text": [], "answer_start": []},
        },
    ],
    "embedding": [
        {"anchor": "a, b", "positive": "p", "negative": "n"},
        {"anchor": "c", "positive": "q", "negative": "m"},
    ],
}
EXPECTED: dict[str, list[Any]] = {
    "classification": [
        Text("", 'He said "no";\nthen, nothing', None, ("x",)),
        Text("", "café", None, ("y",)),
    ],
    "ner": [
        Sentence("", ["Ada", "Byron", "sat"], ["B-PER", "I-PER", "O"]),
        Sentence("", ["Turin"], ["B-LOC"]),
    ],
    "qa": [
        QuestionRow("", "Who?", "Ada drew it.", (("Ada", 0),)),
        QuestionRow("", "Why?", "Ada drew it.", ()),
    ],
    "embedding": [Similar("", ("a, b", "p"), None, ("n",)), Similar("", ("c", "q"), None, ("m",))],
}


def table(rows: list[dict[str, Any]], delimiter: str) -> str:
    """Return rows as a quoted table with the line ends of RFC 4180; lists and objects are JSON."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*rows[0]], delimiter=delimiter)
    writer.writeheader()
    for row in rows:
        cells = {n: v if isinstance(v, str) else json.dumps(v) for n, v in row.items()}
        writer.writerow(cells)
    return text.getvalue()


def conll(rows: list[dict[str, Any]]) -> str:
    sentences = [zip(row["tokens"], row["ner_tags"], strict=True) for row in rows]
    return "\n\n".join("\n".join(map(" ".join, sentence)) for sentence in sentences)


def squad(rows: list[dict[str, Any]]) -> str:
    paragraphs = []
    for row in rows:
        pairs = zip(*row["answers"].values(), strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in pairs]
        question = {"id": "1", "question": row["question"], "answers": answers}
        paragraphs.append({"context": row["context"], "qas": [question]})
    return json.dumps({"data": [{"paragraphs": paragraphs}]})


# The writer of each format, and the end of the file's name.
FORMATS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {
    "CSV": (".csv", lambda rows: table(rows, ",")),
    "TSV": (".tsv", lambda rows: table(rows, "\t")),
    "JSON lines": (".jsonl", lambda rows: "\n".join(map(json.dumps, rows))),
    "JSON": (".json", json.dumps),
    "CoNLL": (".conll", conll),
    "SQuAD": (".json", squad),
}
ONLY = {"CoNLL": "ner", "SQuAD": "qa"}
MARKS = {"none": "utf-8", "UTF-8": "utf-8-sig", "UTF-16": "utf-16"}


def without_places(rows: list[Any]) -> list[Any]:
    return [type(row)(**{**vars(row), "where": ""}) for row in rows]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(
    ("name", "task"),
    [(name, task) for name in FORMATS for task in ROWS if ONLY.get(name, task) == task],
)
def test_formats_of_tasks(tmp_path, name, task, mark):
    """Equal rows come from every format; a byte order mark is no character."""
    suffix, write = FORMATS[name]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(write(ROWS[task]).encode(MARKS[mark]))

    assert without_places(labelled_rows.read(path, task)) == EXPECTED[task]


@pytest.mark.parametrize("task", ROWS)
def test_parquet(tmp_path, task, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(ROWS[task]).to_parquet(path)

    assert without_places(labelled_rows.read(path, task)) == EXPECTED[task]


# -- tables ---------------------------------------------------------------------------------------


def read(path: Path, text: str | bytes, task: str = "classification", *more: Any) -> list[Any]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return labelled_rows.read(path, task, *more)


def pairs(rows: list[Any]) -> list[tuple[str, str]]:
    return [(row.text, row.labels[0]) for row in rows]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|", ":", "^", "~"])
def test_delimiters(tmp_path, delimiter):
    """The columns decide, also where a text has more of another delimiter."""
    text = f'text{delimiter}label\r\n"a, b; c, d; e, f; g"{delimiter}x\r\nh{delimiter}y\r\n'
    assert pairs(read(tmp_path / "a.csv", text)) == [("a, b; c, d; e, f; g", "x"), ("h", "y")]


def test_excel_exports(tmp_path):
    """Its line `sep=;`, empty columns and rows at the end, and a line end in a cell; lines are the file's own."""
    text = '\N{BYTE ORDER MARK}sep=;\r\nText;Label;;\r\n"a\nb";x;;\r\n;;;\r\nc;y;;\r\n'
    path = tmp_path / "a.csv"
    assert read(path, text) == [
        Text(f"{path}:3", "a\nb", None, ("x",)),
        Text(f"{path}:6", "c", None, ("y",)),
    ]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ('"a"\tx\nb\ty\n', '"a"'),  # a title in quotation marks
        ('"a ""b"" c"\tx\nb\ty\n', 'a "b" c'),
        ('"a, b"\tx\nb\ty\n', "a, b"),
        ('"a, b"\tx\nb, c\ty\n', '"a, b"'),  # Excel would have quoted the second one, too
        ('"a\tb"\tx\nb\ty\n', "a\tb"),
        ('"I came.\tx\nI saw."\ty\n', '"I came.'),  # speech over two rows
        ('a "b"\tx\nb\ty\n', 'a "b"'),
    ],
)
def test_quotation_marks_in_tsv(tmp_path, text, first):
    """They are text, unless the file is as those that writers of tables quote."""
    assert read(tmp_path / "a.tsv", f"text\tlabel\n{text}")[0].text == first


def test_old_line_ends(tmp_path):
    assert pairs(read(tmp_path / "a.csv", "text,label\ra,x\rb,y\r")) == [("a", "x"), ("b", "y")]


@pytest.mark.parametrize(
    "header", ["Text,Label", " TEXT , label ", "sentence,LABEL", "question,label"]
)
def test_names_of_columns(tmp_path, header):
    """In any case, with blanks around them."""
    assert pairs(read(tmp_path / "a.csv", f"{header}\na,x\n")) == [("a", "x")]


def test_pairs_in_tables(tmp_path):
    found = read(tmp_path / "a.tsv", "index\tSentence1\tSentence2\tlabel\n0\ta\tb\tx\n")
    assert [(row.text, row.pair) for row in found] == [("a", "b")]


def test_columns_of_other_names(tmp_path):
    """The source names them, exactly as the file writes them."""
    path = tmp_path / "a.csv"
    path.write_text("Review text;Stars & more\na;5\n")
    source = f"{path}?text=Review text&label=Stars %26 more"
    assert pairs(labelled_rows.read(source, "classification")) == [("a", "5")]


def test_a_question_mark_in_a_files_name(tmp_path):
    assert pairs(read(tmp_path / "what?.csv", "text,label\na,x\n")) == [("a", "x")]


def test_lists_in_cells(tmp_path):
    """Names of several labels are separated by commas or a JSON list; words of a sentence by blanks."""
    text = 'text,labels\na,"x, y"\nb,\nc,"[""z""]"\n'
    found = read(tmp_path / "a.csv", text, "classification", "multi_label_classification")
    assert [row.labels for row in found] == [("x", "y"), (), ("z",)]
    [sentence] = read(tmp_path / "b.csv", "tokens,tags\nAda sat,B-PER O\n", "ner")
    assert (sentence.words, sentence.tags) == (["Ada", "sat"], ["B-PER", "O"])


def test_answers_in_cells(tmp_path):
    """One answer with its start; an empty cell is a question without an answer."""
    text = "question,context,answer,answer_start\nWho?,Ada sat.,Ada,0\nWhy?,Ada sat.,,\n"
    assert [row.answers for row in read(tmp_path / "a.csv", text, "qa")] == [(("Ada", 0),), ()]


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        (["Entailment", " entailment", "NEUTRAL", "contradiction"], [0, 1]),
        (["1", "0", "1"], [0, 2]),
        (["true", "False", "TRUE"], [0, 2]),
        (["equivalent", "not equivalent", "Not-Duplicate"], [0]),
    ],
)
@pytest.mark.parametrize("column", ["labels", "is_duplicate"])
def test_labels_of_pairs(tmp_path, caplog, labels, kept, column):
    """They are read in any case, and training logs how many pairs it leaves out."""
    lines = [f'{number},b,"{label}"' for number, label in enumerate(labels)]
    text = "\n".join([f"question1,question2,{column}", *lines])
    found = read(tmp_path / "a.csv", text, "embedding")
    assert [row.texts[0] for row in found] == [*map(str, kept)]
    assert f"are left out; {len(kept)} rows stay" in caplog.text
    objects = [
        json.dumps({"text": str(n), "text_pair": "b", "label": _value(label)})
        for n, label in enumerate(labels)
    ]
    assert read(tmp_path / "a.jsonl", "\n".join(objects), "embedding") == [
        Similar(f"{tmp_path / 'a.jsonl'}:{number + 1}", row.texts, None)
        for number, row in zip(kept, found, strict=True)
    ]


def _value(label: str) -> Any:
    """Return a number or a truth value where a label is one, as JSON has it."""
    return json.loads(label.lower()) if label.lower() in ("true", "false", "0", "1") else label


def test_numbers_in_cells(tmp_path):
    """A label of a regression is a number; so is one of pairs with fractions."""
    found = read(tmp_path / "a.csv", "text,label\na,2.5\nb,3\n", "classification", "regression")
    assert [row.score for row in found] == [2.5, 3.0]
    text = "sentence1,sentence2,label\na,b,0.5\nc,d,2.5\ne,f,1\n"
    assert [row.score for row in read(tmp_path / "b.csv", text, "embedding")] == [0.0, 1.0, 0.25]


# -- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"Text": "a", "Label": "x"}',
        '[{"text": "a", "label": "x"}]',
        '{\n  "data": [\n    {"text": "a", "label": "x"}\n  ]\n}',
        '{"text": "a", "label": "x"}\n',
    ],
)
def test_json(tmp_path, text):
    """A list, an object with a list, one object, and lines, whatever the file is called."""
    for name in ("a.json", "a.data"):
        assert pairs(read(tmp_path / name, text)) == [("a", "x")]


def test_tags_that_are_numbers(tmp_path):
    """The labels name them, in their order; BIOES becomes BIO."""
    text = '{"tokens": ["Ada", "Byron"], "ner_tags": [1, 2]}'
    labels = ["O", "B-PER", "E-PER"]
    [found] = read(tmp_path / "a.jsonl", text, "ner", None, labels)
    assert found.tags == ["B-PER", "I-PER"]
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*set the head's labels in their order"):
        labelled_rows.read(tmp_path / "a.jsonl", "ner")
    with pytest.raises(DataError, match=r"a\.jsonl:1: a tag may not be 2: the head has 2 labels"):
        labelled_rows.read(tmp_path / "a.jsonl", "ner", None, labels[:2])


SPANS = [
    {
        "text": "Ada, née\tByron!",
        "entities": [{"start": 0, "end": 3, "label": "PER"}, [9, 14, "PER"]],
    },
    {
        "text": "Ada, née\tByron!",
        "label": [[9, 14, "PER"], [0, 3, "PER"]],  # doccano
    },
    {
        "text": "Ada, née\tByron!",
        "tokens": [{"text": "Ada", "id": 0}],
        "spans": [{"start": s, "end": e, "label": "PER"} for s, e in ((0, 3), (9, 14))],  # Prodigy
    },
    {
        "data": {"text": "Ada, née\tByron!"},  # Label Studio
        "annotations": [
            {
                "result": [
                    {"value": {"start": s, "end": e, "labels": ["PER"]}, "type": "labels"}
                    for s, e in ((0, 3), (9, 14))
                ]
            }
        ],
    },
    {
        "text": "Ada, née\tByron!",
        "result": [
            {"entity_group": "PER", "start": s, "end": e, "word": w}
            for s, e, w in ((0, 3, "ada"), (9, 14, "by ##ron"))
        ],
    },
]


@pytest.mark.parametrize("row", SPANS)
def test_entities_as_spans(tmp_path, row):
    """The text stays as it is, and its words have the tags of the spans."""
    [found] = read(tmp_path / "a.json", json.dumps([row]), "ner")
    assert found.text == "Ada, née\tByron!"
    assert found.words == ["Ada", ",", "née", "Byron", "!"]
    assert found.tags == ["B-PER", "O", "O", "B-PER", "O"]
    assert found.starts.tolist() == [0, 3, 5, 9, 14]


def test_spans_that_cut_words(tmp_path, caplog):
    """They are reported, and learned as they stand; Chinese has no spaces to cut between."""
    lines = [
        {"text": "Parisian 東京都", "entities": [[0, 5, "LOC"], [9, 11, "LOC"]]},
        {"text": "Ada Byron", "entities": [[0, 3, "A"], [3, 9, "B"]]},
    ]
    first, second = read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)), "ner")
    assert first.words == ["Paris", "ian", "東京", "都"]
    assert first.tags == ["B-LOC", "O", "B-LOC", "O"]
    assert second.tags == ["B-A", "B-B"]
    assert caplog.messages == [f"{tmp_path / 'a.jsonl'}:1: the entity 'Paris' (0-5) cuts a word"]


def choices(*names: str, **annotation: bool) -> dict[str, Any]:
    """Return a task of Label Studio."""
    values = [{"value": {"choices": [name]}, "type": "choices"} for name in names]
    return {"data": {"text": "a"}, "annotations": [{"result": values, **annotation}]}


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        ({"text": "a", "label": ["x"]}, ["x"]),  # doccano
        ({"text": "a", "labels": "x"}, ["x"]),
        ({"text": "a", "accept": ["x"], "options": [], "answer": "accept"}, ["x"]),  # Prodigy
        (choices("x"), ["x"]),
        (
            {"text": "a", "label": ["x", "y"]},
            r"may not be \['x', 'y'\]: several labels of a row need",
        ),
        (choices("x", "y"), "labels may not be .*: several labels of a row need problem_type"),
        ({"text": "a", "label": []}, "no label"),
        ({"text": "a", "label": [{"start": 0}]}, "label may not be .*: labels are text"),
        ({"text": ["a", "b"], "label": ["x", "y"]}, 'text may not be .* orient="records"'),
        (
            {"text": {"0": "a" * 200}, "label": {"0": "x"}},
            r"text may not be \{'0': 'a+\.\.\.: a row is",
        ),
    ],
)
def test_labels_of_annotation_tools(tmp_path, row, labels):
    """A list of one label is that label; other lists need another type of problem."""
    text = json.dumps([row])
    if isinstance(labels, str):
        with pytest.raises(DataError, match=labels):
            read(tmp_path / "a.json", text)
    else:
        assert pairs(read(tmp_path / "a.json", text)) == [("a", label) for label in labels]


@pytest.mark.parametrize(
    ("task", "row", "others"),
    [
        (
            "classification",
            {"text": "a", "label": "x"},
            [{"answer": "reject"}, {"answer": "ignore"}],
        ),
        ("ner", {"text": "a", "spans": []}, [{"answer": "reject"}, {"answer": "ignore"}]),
        ("ner", SPANS[3], [{"annotations": []}, {"annotations": [{"was_cancelled": True}]}]),
        ("classification", choices("x"), [choices("x", was_cancelled=True), {"annotations": []}]),
    ],
)
def test_rows_that_the_annotator_left_out(tmp_path, caplog, task, row, others):
    """They are no training data, and counted."""
    rows = [{**row, **other} for other in others]
    [_] = read(tmp_path / "a.json", json.dumps([*rows, {**row, "answer": "accept"}]), task)
    assert [
        f"{tmp_path / 'a.json'}: rows left out because annotators rejected or skipped them, or disagreed: 2"
    ] == (caplog.messages)


def test_rejected_rows_of_a_table(tmp_path):
    """A column `answer` of question answering has answers."""
    text = "text,label,answer\na,x,accept\nb,x,reject\n"
    assert pairs(read(tmp_path / "a.csv", text)) == [("a", "x")]
    text = "gold_label\tsentence1\tsentence2\n-\ta\tb\nneutral\tc\td\n"  # SNLI
    [row] = read(tmp_path / "a.tsv", text)
    assert (row.text, row.pair, row.labels) == ("c", "d", ("neutral",))
    text = "question,context,answer,answer_start\nWhat?,we reject it,reject,3\n"
    [row] = read(tmp_path / "b.csv", text, "qa")
    assert row.answers == (("reject", 3),)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "text,label\na,x\ncafé,y\n".encode("latin-1"),
            "a.csv:3: column 4: the byte 0xE9 is not UTF-8 ('é' in Windows-1252 and Latin-1): save",
        ),
        ("a.jsonl", b"\xff\n", "a.jsonl:1: column 1: the byte 0xFF is not UTF-8"),
        ("a.csv", b"PK\x03\x04....", "a.csv is no text but a ZIP archive or an Excel workbook"),
        (
            "a.csv",
            b"PAR1....",
            "a.csv is no text but a Parquet file: its name must end in .parquet",
        ),
        ("a.csv.zst", b"\x28\xb5\x2f\xfd..", "a.csv.zst is no text but a Zstandard file"),
        ("a.csv", b"BZh91AY&SY", "a.csv is no text but a bzip2 file: its name must end in .bz2"),
        ("a.csv.bz2", b"text,label\na,x\n", "a.csv.bz2 cannot be read to its end: Invalid data"),
        ("a.csv", b"\x1f\x8b....", "a.csv is no text but a gzip file: its name must end in .gz"),
        ("a.csv", b"text,label,label\na,x,y\n", "a.csv:1: 2 columns are called 'label': rename"),
        (
            "a.csv",
            b"Text,text,label\na,b,x\n",
            "a.csv:1: the first line, which names the columns: several columns for text: 'Text', 'text': 'FILE?text=",
        ),
        (
            "a.csv",
            b"Report;Stars\na;5\n",
            "a.csv:1: the first line, which names the columns: no text (recognized names: text, premise, sentence1,"
            " question1, question, sentence, review, content, comment, message, tweet, body):"
            " classification needs text and label, or text and labels, or text and score; the columns are"
            " Report, Stars. Say which is which: 'FILE?text=COLUMN&label=COLUMN', or the setting columns",
        ),
        ("a.csv", b"text,label\na,x,y\n", "a.csv:2: 3 columns, and the first line names 2"),
        ("a.csv", b"text,label\na\n", "a.csv:2: 1 columns, and the first line names 2"),
        ("a.csv", b"text,label\na,x\n\xef\xbb\xbftext,label\n", "a.csv:3: repeats the first line"),
        ("a.csv", b"text,label\na,x\nLabel, TEXT\n", "a.csv:3: repeats the first line"),
        ("a.csv", b'text,label\n"a,x\nb,y\n', "a.csv:2: a quotation mark opens a cell and none"),
        ("a.csv", b'text,label\nb,y\n"a"b,x\n', "a.csv:3: ',' expected after '\"': quotation"),
        ("a.csv", b"text,label\na,x\nb,\n", "a.csv:3: no label"),
        (
            "a.csv",
            b"sentence,Label\na,\nb,x\nc,\nd, \n",
            "a.csv:2: no Label (and 4, 5; 3 rows in all): fill the cells, or remove the rows",
        ),
        ("a.jsonl", b'{"text": "a", "label": "x"}\n{"text" 1}\n', "a.jsonl:2: column 9: not JSON"),
        ("a.json", b'[\n{"text" 1}]', "a.json:2: column 9: not JSON"),
        ("a.json", b"3", "a.json: not a list of JSON objects"),
        ("a.json", b"[3]", "a.json: row 1: not a JSON object"),
        (
            "a.jsonl",
            b'{"text": "a", "label": "x", "label": "y"}',
            "a.jsonl:1: two fields are called 'label'",
        ),
        ("a.jsonl", b'{"report": "a"}', "a.jsonl:1: no text (recognized names: text, premise,"),
        ("a.conll", b"Ada O\n", "a.conll: CoNLL files are for ner, not for classification"),
    ],
)
def test_a_wrong_file(tmp_path, name, content, message):
    """The message has the line and the column, what is there, and what is accepted, in one line."""
    with pytest.raises(DataError) as refused:
        read(tmp_path / name, content)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("flag", [False, 0, "false", "False", "0", None, True, 1, "true", "TRUE"])
def test_a_question_that_is_impossible(tmp_path, flag):
    """The flag is read as the value that it says, also as text; anything else is refused."""
    entry = {"id": "1", "question": "q?", "answers": [{"text": "Paris", "answer_start": 0}]}
    paragraph = {"context": "Paris is big", "qas": [{**entry, "is_impossible": flag}]}
    [row] = read(tmp_path / "a.json", json.dumps({"data": [{"paragraphs": [paragraph]}]}), "qa")
    is_impossible = str(flag).lower() in ("true", "1")
    assert is_impossible == (row.answers == ())
    table = f"question,context,answer,answer_start,is_impossible\nq?,Paris,Paris,0,{flag}\n"
    assert read(tmp_path / "a.csv", table, "qa")[0].answers == row.answers
    with pytest.raises(DataError, match=r"a\.csv:2: is_impossible may not be 'no': true or false"):
        read(tmp_path / "a.csv", table.replace(f"0,{flag}", "0,no"), "qa")


def test_an_empty_answer(tmp_path):
    """An answer without characters is no answer, in a list as in a cell; an answer has a start within the context."""
    row = {"question": "q?", "context": "a", "answers": {"text": ["", " "], "answer_start": [0, 0]}}
    assert read(tmp_path / "a.jsonl", json.dumps(row), "qa")[0].answers == ()
    row["answers"] = {"text": ["a"], "answer_start": [-1]}
    with pytest.raises(DataError, match="the answer 'a' may not start at -1"):
        read(tmp_path / "b.jsonl", json.dumps(row), "qa")


@pytest.mark.parametrize(
    ("name", "text", "task", "message"),
    [
        ("a.parquet", "text,label", "classification", r"a\.parquet: not a Parquet file"),
        (
            "a.jsonl",
            '{"text": "a", "score": NaN}',
            "regression",
            r"a\.jsonl:1: score may not be nan",
        ),
        ("a.conll", "Ada O", "ner", "has no named columns"),
        # Choices are no entities: training on them would learn that no word is one.
        (
            "a.json",
            json.dumps([choices("x")]),
            "ner",
            "row 1: no result has labels, which ner needs: .*choices",
        ),
        *(
            (
                "a.json",
                f'{{"data": [{{"paragraphs": {data}}}]}}',
                "qa",
                r"a\.json: (data|paragraphs) (must|may not) be",
            )
            for data in ("[3]", "3")
        ),
        *(
            (
                "a.csv",
                f'text,Score\na,"{number}"',
                "regression",
                rf"a\.csv:2: Score may not be '{number}'",
            )
            for number in ("2,5", "nan", "inf", "high")
        ),
        *(
            ("a.csv", f"text,text_pair,label\n{lines}", "embedding", message)
            for lines, message in (
                (
                    "a,b,0\nc,d,2",
                    "a.csv:3: the label '2' is neither .* similarities in a column score",
                ),
                ("a,b,same\nc,d,1", "a.csv:2: the label 'same' is neither"),
                ("a,b,0.5\nc,d,x", "a.csv:2: the label '0.5' is neither"),
                ("a,b,0\nc,d,0", r"a.csv: no rows but pairs with the label '0' \(2 rows\)"),
                ("a,b,1\nc,d,", "a.csv:3: no label"),
            )
        ),
        (
            "a.csv",
            "text,text_pair,label,score\na,b,x,1\nc,d,x,\ne,f,x,2",
            "embedding",
            r"a\.csv:3: no score",
        ),
        *(
            (
                "a.jsonl",
                json.dumps({"text": "Ada sat", "entities": entities}),
                "ner",
                rf"a\.jsonl:1: {message}",
            )
            for entities, message in (
                ([[0, 9, "X"]], r"an entity may not be \[0, 9, 'X'\]: .*the 7 characters"),
                ([[2, 2, "X"]], "an entity may not be"),
                ([[3, 4, "X"]], "an entity may not be"),
                ([{"start": 0, "end": 3}], r"an entity may not be \[0, 3, None\]"),
                (
                    [{"start": 1, "end": 3, "label": "X", "text": "Ada"}],
                    "the entity 'Ada' is not at 1-3, where 'da' is: offsets count code points",
                ),
                (
                    [[0, 3, "X"], [2, 5, "Y"]],
                    r"the entities 'Ada' \(0-3\) and 'a s' \(2-5\) overlap",
                ),
            )
        ),
    ],
)
def test_wrong_values(tmp_path, name, text, task, message):
    """What a task cannot read is refused with the file's own name of the column."""
    kind = ("classification", "regression") if task == "regression" else (task,)
    (tmp_path / name).write_text(text)
    query = "?tokens=a&tags=b" if name == "a.conll" else ""
    with pytest.raises(DataError, match=message):
        labelled_rows.read(f"{tmp_path / name}{query}", *kind)


# -- the tables of the documentation --------------------------------------------------------------


def formats_table() -> str:
    tasks = [*columns.TRAINING]
    lines = [f"| format | {' | '.join(tasks)} |", f"|---|{'---|' * len(tasks)}"]
    for name in [*FORMATS, "Parquet"]:
        marks = ["yes" if ONLY.get(name, task) == task else "" for task in tasks]
        lines.append(f"| {name} | {' | '.join(marks)} |")
    return "\n".join(lines)


def columns_table() -> str:
    lines = ["| task | field | recognized names |", "|---|---|---|"]
    for task, fields in [(task, needs.fields) for task, needs in columns.TRAINING.items()]:
        every = [*fields, "negative"] if task == "embedding" else fields
        for field in every:
            names = [f"`{name}`" for name in columns.accepted(columns.TRAINING[task], field)]
            names += ["`neg`", "`negatives`", "`negative_1`, `negative_2`, ..."] * (
                field == "negative"
            )
            lines.append(f"| {task} | `{field}` | {', '.join(names)} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "make"), [("formats", formats_table), ("columns", columns_table)])
def test_tables_of_the_documentation(name, make):
    """They are made of the formats that the tests above read, and of the names that the code has."""
    block = re.search(
        rf"<!-- {name}: begin -->\n(.*?)\n<!-- {name}: end -->", PAGE.read_text(), re.S
    )
    assert block, f"docs/how-to/training.md has no block {name}"
    assert block[1] == make(), make()


@pytest.mark.parametrize("task", columns.TRAINING)
def test_recognized_names_are_read(task):
    """Each name of the table stands for its field."""
    for field in columns.TRAINING[task].fields:
        for name in columns.accepted(columns.TRAINING[task], field):
            if field == "text_pair" or name in ("premise", "sentence1", "question1"):
                continue  # pairs are tested as pairs
            assert columns.recognize(columns.TRAINING[task], (name.upper(),))[field] == name.upper()
