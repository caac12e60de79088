"""The results of a file equal the service's, row by row, for every format of the file."""

import asyncio
import csv
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from service import predict
from service.api.app import create_app
from service.observability.metrics import Metrics
from service.processes.single_process import open_local_engines
from service.settings import Settings
from tests import samples

pytestmark = pytest.mark.usefixtures("logging_as_it_was")

TEXTS = [samples.text(1 + number % 30, seed=number) for number in range(150)]


async def served(bundle: Path, path: str, **body: Any) -> Any:
    """The response of the service over its own HTTP stack."""
    metrics = Metrics()
    settings = Settings(bundles=(bundle,))
    app = create_app(settings, partial(open_local_engines, metrics), metrics)
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://quartet") as client,
    ):
        return (await client.post(path, json=body)).raise_for_status().json()


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(bundle: Path, source: Path, output: Path, *options: str) -> int:
    return predict.main([str(bundle), str(source), str(output), *options])


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_as_served(tiny_bundle: Path, tmp_path: Path) -> None:
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
        ("in.txt", "\ufeffthe sea\n\nthe sky\n", []),
    ],
)
def test_formats(
    name: str, content: str, options: list[str], tiny_bundle: Path, tmp_path: Path
) -> None:
    """CSV with quotes and any delimiter, TSV and plain lines are read, with a BOM or without; CSV is written."""
    (tmp_path / name).write_text(content, encoding="utf-8")

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
def test_tasks(
    head: str, row: dict[str, str], options: dict[str, Any], tiny_bundle: Path, tmp_path: Path
) -> None:
    """Every task has its route and its options."""
    source = jsonl(tmp_path / "in.jsonl", [row] * 3)
    chosen = ["--head", head, "--options", json.dumps(options)]

    assert 0 == run(tiny_bundle, source, tmp_path / "out.jsonl", *chosen)

    found = [each["result"] for each in read_lines(tmp_path / "out.jsonl")]
    assert 3 == len(found)
    assert all(found)
    if sizes := [*options.values()]:
        assert sizes[0] >= len(found[0])


def test_one_bad_row(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        (
            "in.jsonl",
            '{"text": "a"}\n{"txt": "b"}\n',
            [],
            "in.jsonl:2: column 'text' is no text; found txt.",
        ),
        ("in.jsonl", '{"text": "a"}\n{', [], "in.jsonl:2: not JSON"),
        ("in.jsonl", "[1]\n", [], "in.jsonl:1: not a JSON object"),
        ("in.jsonl", "\n", [], "in.jsonl: no rows"),
        ("in.csv", "text,id\na\n", [], "in.csv:2: not 2 columns"),
        ("in.csv", "text,id\na,b,c\n", [], "in.csv:2: not 2 columns"),
        ("in.txt", "a\n", ["--head", "mood"], "--head: mood is none of sentiment"),
        ("in.txt", "a\n", ["--options", '{"topk": 1}'], "topk"),
        ("in.txt", "a\n", ["--options", '{"calibrated": true}'], "no calibration_temperature"),
        ("none.txt", None, [], "none.txt"),
    ],
)
def test_refusals(
    name: str,
    content: str | None,
    options: list[str],
    message: str,
    tiny_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong file is reported with line and columns, a wrong option by name; an old output file stays."""
    if content is not None:
        (tmp_path / name).write_text(content)
    (tmp_path / "out.jsonl").write_text("old")

    assert 2 == run(tiny_bundle, tmp_path / name, tmp_path / "out.jsonl", *options)

    assert message in capsys.readouterr().err
    assert "old" == (tmp_path / "out.jsonl").read_text()
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_a_bad_bundle(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged bundle is refused with status 3."""
    shutil.copytree(tiny_bundle, tmp_path / "bad")
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    (tmp_path / "in.txt").write_text("a\n")

    assert 3 == run(tmp_path / "bad", tmp_path / "in.txt", tmp_path / "out.jsonl")
    assert "tokenizer.json has SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["a.doc", "out.csv"], ["a.csv", "out.doc"], ["a.csv", "b.csv", "--options", "3"]]
)
def test_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown endings and options that are no object are errors of the command line."""
    with pytest.raises(SystemExit, match="2"):
        predict.main(["bundle", *arguments])
    assert "must" in capsys.readouterr().err
