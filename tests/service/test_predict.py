"""The results of a file equal the service's, row by row, for every format of the file."""

import asyncio
import csv
import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from service import predict
from service.bulk.input_files import read_rows
from service.bulk.output_files import Output, writing
from service.bulk.rows import Outcome
from service.core.data_files.columns import Needs
from tests import samples
from tests.served import app_of, living

TEXTS = [samples.text(1 + number % 30, seed=number) for number in range(150)]


async def served(bundle: Path, path: str, **body: Any) -> Any:
    """The response of the service over its own HTTP stack."""
    async with living(app_of(bundle)) as client:
        return (await client.post(path, json=body)).raise_for_status().json()


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(bundle: Path, source: Path, output: Path, *options: str) -> int:
    return predict.main([str(bundle), str(source), str(output), *options])


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_as_served(tiny_bundle, tmp_path):
    """Every row keeps its fields, and gets the labels and scores that the service returns for it."""
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    source = jsonl(tmp_path / "in.jsonl", rows)
    expected = await served(tiny_bundle, "/classify", inputs=TEXTS)

    code = await asyncio.to_thread(run, tiny_bundle, source, tmp_path / "out.jsonl")

    found = read_lines(tmp_path / "out.jsonl")
    assert 0 == code
    assert rows == [{"id": row["id"], "text": row["text"]} for row in found]
    for row, labels in zip(found, expected["results"], strict=True):
        assert [each["label"] for each in labels] == [each["label"] for each in row["result"]]
        assert [each["score"] for each in labels] == pytest.approx(
            [each["score"] for each in row["result"]], abs=1e-5
        )


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("in.csv", '\ufefftext,id\n"a, ""b""\nc",1\nthe sea,2\n', []),
        ("in.csv", 'id;Body\n1;the sky\n2;"a;b"\n', ["--columns", '{"text": "Body"}']),
        ("in.tsv", 'text\tid\nthe "sea\t1\nsky\t2\n', []),
        ("in.txt", "\ufeffthe sea\nthe sky\n", []),
        ("IN.CSV", "sep=;\nText;id\nthe sea;1\nthe sky;2\n", []),
        ("in.csv.gz", "sentence,id\nthe sea,1\nthe sky,2\n", []),
        ("in.json", '[{"text": "the sea"}, {"text": "the sky"}]', []),
        ("in.data", '{"text": "the sea"}\n{"text": "the sky"}\n', []),
    ],
)
def test_formats(name, content, options, tiny_bundle, tmp_path):
    """The files that training reads are predicted, in UTF-16, too; CSV is written."""
    encoded = content.encode("utf-8" if content.startswith("\ufeff") else "utf-16")
    (tmp_path / name).write_bytes(gzip.compress(encoded) if name.endswith(".gz") else encoded)

    assert 0 == run(tiny_bundle, tmp_path / name, tmp_path / "out.csv", *options)

    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert 2 == len(found)
    assert all(row["predicted_label"] and 0 < float(row["score"]) <= 1 for row in found)


@pytest.mark.parametrize(
    ("head", "row", "options"),
    [
        ("entities", {"text": "Ada met Grace."}, {}),
        ("answers", {"question": "who?", "context": "Ada met Grace."}, {"top_k": 2}),
        ("embeddings", {"text": "Ada met Grace."}, {"dimensions": 8}),
        ("sentiment", {"text": "Ada", "text_pair": "Grace"}, {"top_k": 1}),
    ],
)
def test_tasks(head, row, options, tiny_bundle, tmp_path):
    """Every task has its route and its options."""
    source = jsonl(tmp_path / "in.jsonl", [row] * 3)
    chosen = ["--head", head, "--options", json.dumps(options)]

    assert 0 == run(tiny_bundle, source, tmp_path / "out.jsonl", *chosen)

    found = [each["result"] for each in read_lines(tmp_path / "out.jsonl")]
    assert 3 == len(found)
    assert all(found)
    if sizes := [*options.values()]:
        assert sizes[0] >= len(found[0])


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_columns_of_the_user(tiny_bundle, tmp_path, suffix):
    """Every cell of the input stays, also under names of the results and under none, in a second prediction, too."""
    text = 'text,score,error,result,,"predicted_label"\nsea,5,typo,mine,x,old\n"",6,"a\rb",,,\n'
    (tmp_path / "in.csv").write_text(text)

    assert 1 == run(tiny_bundle, tmp_path / "in.csv", tmp_path / f"a{suffix}")
    assert 1 == run(tiny_bundle, tmp_path / f"a{suffix}", tmp_path / "b.csv")

    with (tmp_path / "b.csv").open(newline="") as file:
        header, *cells = csv.reader(file)
    assert ["text", "score", "error", "result"] == header[:4]
    assert [["sea", "5", "typo", "mine", "x", "old"], ["", "6", "a\rb", ""]] == [
        cells[0][:6],
        cells[1][:4],
    ]
    assert len({*header}) == len(header)
    assert f"error_{2 + (suffix == '.csv')}" in header


def test_fields_of_some_rows(tiny_bundle, tmp_path):
    """A table of JSON lines has the fields of all rows; lists and objects are JSON, and no value becomes another."""
    rows = [{"text": "sea"}, {"text": "sky", "tags": ["a"], "is": True}, {"is": None, "text": "a"}]
    source = jsonl(tmp_path / "in.jsonl", rows)

    assert 0 == run(tiny_bundle, source, tmp_path / "out.csv")

    with (tmp_path / "out.csv").open(newline="") as file:
        found = [(row["text"], row["tags"], row["is"]) for row in csv.DictReader(file)]
    assert [("sea", "", ""), ("sky", '["a"]', "true"), ("a", "", "")] == found


def test_pairs(tiny_bundle, tmp_path):
    """A row has the result of /classify, with its pair or without one, whatever other rows have."""
    rows = [
        {"text": "sea"},
        {"text": "sea", "text_pair": "sky"},
        {"text": "sea", "text_pair": None},
    ]
    for name, chosen in (("every", rows), ("first", rows[:1]), ("second", rows[1:2])):
        assert 0 == run(tiny_bundle, jsonl(tmp_path / name, chosen), tmp_path / f"{name}.jsonl")

    every, first, second = (
        [row["result"] for row in read_lines(tmp_path / f"{name}.jsonl")]
        for name in ("every", "first", "second")
    )
    assert every[0] == every[2] == first[0] != second[0]
    assert every[1] == second[0]


@pytest.mark.parametrize("seed", range(20))
def test_random_tables(tmp_path, seed):
    """Tables as RFC 4180 has them are read and written without a change, with any delimiter and quotation."""
    drawn = random.Random(seed)
    needs = Needs("classification", ("text", "text_pair"), (("text",),))
    for number in range(20):
        width = drawn.randint(1, 4)
        header = ["text", "id", "note", "label"][:width]
        cells = [
            ["".join(drawn.choices("ab ,;\t|\"'\n\ré=", k=drawn.randint(0, 9))) for _ in header]
            for _ in range(drawn.randint(1, 5))
        ]
        path = tmp_path / f"{number}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            quoting = drawn.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
            delimiter = drawn.choice(",;\t|") if width > 1 else ","
            table = csv.writer(file, delimiter=delimiter, quoting=quoting)
            table.writerows([header, *cells])

        rows = [*read_rows(str(path), needs)]

        assert [(header, row) for row in cells] == [(row.names, row.values) for row in rows]
        path = tmp_path / "out.csv"
        with writing(path, Output(path, ".csv"), header, header=True) as write:
            for row in rows:
                write(row, Outcome([{"label": "x", "score": 1}], ""))
        with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
            assert [[*row, "x", "1", ""] for row in cells] == [*csv.reader(file)][1:]


def test_bad_rows(tiny_bundle, tmp_path):
    """Each has an error with its line, and the others have results; an empty line shifts no row."""
    (tmp_path / "in.txt").write_text("sea\n\nsky\n")
    context = {"context": "Ada met Grace."}
    questions = [
        {"question": "who?", **context},
        {"question": " ", **context},
        {"question": 3, **context},
        context,
        {"question": "who " * 400_000, **context},
        {"question": "\ud800", **context},
        {"question": "whom?", **context},
    ]
    source = jsonl(tmp_path / "in.jsonl", questions)

    assert 1 == run(tiny_bundle, tmp_path / "in.txt", tmp_path / "lines.jsonl")
    assert 1 == run(tiny_bundle, source, tmp_path / "out.jsonl", "--head", "answers")

    assert [bool(row["result"]) for row in read_lines(tmp_path / "lines.jsonl")] == [1, 0, 1]
    found = read_lines(tmp_path / "out.jsonl")
    assert questions == [
        {k: v for k, v in row.items() if k not in ("result", "error")} for row in found
    ]
    assert [bool(row["result"]) for row in found] == [1, 0, 0, 0, 0, 0, 1]
    for number, reason in {2: "no question", 3: "may not be 3", 4: "no question"}.items():
        assert f"in.jsonl:{number}: " in found[number - 1]["error"]
        assert reason in found[number - 1]["error"]


def test_one_bad_row(tiny_bundle, tmp_path, capsys):
    """A text that is refused has an error, the others have results, and the exit status is 1."""
    source = jsonl(tmp_path / "in.jsonl", [{"text": "sea"}, {"text": "sea " * 900}])

    code = run(tiny_bundle, source, tmp_path / "out.jsonl", "--options", '{"truncate": false}')

    good, bad = read_lines(tmp_path / "out.jsonl")
    assert 1 == code
    assert good["result"]
    assert bad["result"] is None
    assert "tokens" in bad["error"]
    assert "2 rows, 1 with an error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("in.jsonl", '{"txt": "b"}\n', [], "in.jsonl:1: no text (recognized names: text, premise"),
        ("in.jsonl", '{"text": "a"}\n{', [], "in.jsonl:2: column 2: not JSON"),
        ("in.jsonl", "[1]\n", [], "in.jsonl:1: not a JSON object"),
        ("in.jsonl", "\n", [], "in.jsonl: no rows"),
        ("in.csv", "text,id\na\n", [], "in.csv:2: 1 columns, and the first line names 2"),
        ("in.csv", "text,id\na,b,c\n", [], "in.csv:2: 3 columns, and the first"),
        ("in.txt", "a\n", ["--head", "mood"], "--head: mood is none of sentiment"),
        ("in.txt", "a\n", ["--options", '{"topk": 1}'], "topk"),
        ("in.txt", "a\n", ["--options", '{"calibrated": true}'], "no calibration_temperature"),
        ("none.txt", None, [], "none.txt"),
        ("in.conll", "Ada O\n", [], "in.conll: conll is not predicted"),
    ],
)
def test_refusals(name, content, options, message, tiny_bundle, tmp_path, capsys):
    """A wrong file is reported with line and columns, a wrong option by name; an old output file stays."""
    if content is not None:
        (tmp_path / name).write_text(content)
    (tmp_path / "out.jsonl").write_text("old")

    assert 2 == run(tiny_bundle, tmp_path / name, tmp_path / "out.jsonl", *options)

    assert message in capsys.readouterr().err
    assert "old" == (tmp_path / "out.jsonl").read_text()
    assert {"out.jsonl"} == {path.name for path in tmp_path.iterdir()} - {name}


def test_a_bad_bundle(tiny_bundle, tmp_path, capsys):
    """A damaged bundle is refused with status 3."""
    shutil.copytree(tiny_bundle, tmp_path / "bad")
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    (tmp_path / "in.txt").write_text("a\n")

    assert 3 == run(tmp_path / "bad", tmp_path / "in.txt", tmp_path / "out.jsonl")
    assert "tokenizer.json has SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["a.csv", "out.doc"],
        ["a.csv", "b.csv", "--options", "3"],
        ["a.csv", "b.csv", "--columns", '{"text": 3}'],
    ],
)
def test_arguments(arguments, capsys):
    """Unknown endings and options that are no object are errors of the command line."""
    with pytest.raises(SystemExit, match="2"):
        predict.main(["bundle", *arguments])
    assert "must" in capsys.readouterr().err


FORMULAS = [
    '=HYPERLINK("http://a.org")',
    "+1+2",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "\uff1d1+1",
    *("=1", "-1\n", "-1-"),
]
NO_FORMULAS = ["-1.5", "+3", "-0,5", "a=b", "'=1", " =1", "-.5", "-1e-5"]


def test_formulas_of_spreadsheets(tiny_bundle, tmp_path, capsys):
    """Cells and names of columns are written as they are, or with an apostrophe before those that would be computed."""
    cells = [*FORMULAS, *NO_FORMULAS]
    source = jsonl(tmp_path / "in.jsonl", [{"text": "the sea", "=1+1": cell} for cell in cells])

    def column(*options):
        assert 0 == run(tiny_bundle, source, tmp_path / "out.csv", *options)
        with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
            return [row[1] for row in csv.reader(file)]

    assert ["=1+1", *cells] == column()
    escaped = [f"'{cell}" for cell in ("=1+1", *FORMULAS)]
    assert [*escaped, *NO_FORMULAS] == column("--escape-formulas")
    with pytest.raises(SystemExit):
        run(tiny_bundle, source, tmp_path / "out.jsonl", "--escape-formulas")
    assert "must end with .csv" in capsys.readouterr().err
