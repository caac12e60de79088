"""The commands train, bench and doctor."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from export.__main__ import read_request
from quartet import bench, doctor, train
from service.core.manifest import Head

ROWS = {
    "classification": "Review,Sentiment\nfine,good\nbad,poor\n",
    "qa": 'question,context,answer,answer_start\nWho?,"Ada wrote.",Ada,0\n',
    "embedding": "anchor,positive\na cat,the cat\na dog,the dog\n",
}


@pytest.mark.parametrize("task", ROWS)
def test_the_task_of_a_file_is_found(tmp_path, task):
    file = tmp_path / "rows.csv"
    file.write_text(ROWS[task])
    assert task == train.find_task(str(file))


def test_the_task_of_tagged_words(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"tokens": ["Ada", "wrote"], "tags": ["B-PER", "O"]}))
    assert "ner" == train.find_task(str(file))


def test_a_file_of_no_task_is_refused_by_each(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"no columns of a task .*ner: tokens and tags; .*'$"):
        train.find_task(str(file))
    file.write_text("")
    with pytest.raises(ValueError, match=r"^[^ ]*rows\.csv: no rows$"):
        train.find_task(str(file))


def test_train_finetunes_and_exports(tmp_path, monkeypatch, capsys):
    """The name is that of the file; options of fine-tuning are handed on."""
    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "run_export", commands.append)
    monkeypatch.setattr(train, "run_training", commands.append)
    Path("my reviews.csv").write_text(ROWS["classification"])
    monkeypatch.setattr(
        sys, "argv", ["quartet train", "my reviews.csv", "--minutes", "3", "--steps", "2"]
    )
    assert 0 == train.main()
    trained, exported, *_ = commands
    assert ["--minutes", "3", "--steps", "2"] == trained[-4:]
    assert "classification" == trained[trained.index("--task") + 1]
    assert ["bundles/my-reviews", "--name", "my-reviews", "--next-version"] == exported[1:]
    printed = capsys.readouterr().out
    assert "classification (label=Sentiment, text=Review)" in printed
    assert "quartet serve my-reviews" in printed


@pytest.mark.parametrize("arguments", [["absent.csv"], ["rows.csv", "--name", "a b"]])
def test_train_refuses_bad_names_before_it_imports_torch(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text(ROWS["classification"])
    monkeypatch.setattr(sys, "argv", ["quartet train", *arguments])
    with pytest.raises(SystemExit, match="2"):
        train.main()


def test_train_without_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["quartet train", "rows.csv"])
    with pytest.raises(ModuleNotFoundError) as missing:
        train.main()
    assert "torch" == missing.value.name


def test_ctrl_c_waits_for_the_training():
    """A terminal sends the signal to both processes. The training saves its state, and then both end."""
    child = (
        "import signal, sys, time; signal.signal(2, lambda *_: (time.sleep(0.5), sys.exit(130)));"
        " print('ready', flush=True); time.sleep(60)"
    )
    command = f"[sys.executable, '-c', {child!r}]"
    code = f"import sys; from quartet.train import run_training; sys.exit(run_training({command}))"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        assert "ready\n" == run.stdout.readline()
        os.killpg(run.pid, signal.SIGINT)
        assert ("", 130) == (run.stdout.read(), run.wait())


@pytest.mark.slow
def test_bench_measures_the_default_model(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["quartet bench", "--seconds", "0.3", "--connections", "1", "4"]
    )
    assert 0 == bench.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("   ")]
    assert ["1", "4"] == [row[0] for row in rows]
    assert all(float(row[2]) <= float(row[3]) for row in rows)


def test_bench_sends_a_text_of_each_task():
    assert ("/ner", {"inputs": "Ada"}) == bench.request(Head.model_construct(task="ner"), "Ada")
    path, body = bench.request(Head.model_construct(task="qa"), "Ada wrote.")
    assert ("/qa", "Ada wrote.") == (path, body["context"])


def test_doctor_reports_each_check(tmp_path, monkeypatch, capsys):
    """What needs an action has `!!` and the action; then the exit status is 1."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (24, 24))
    monkeypatch.setattr(sys, "argv", ["quartet doctor"])
    assert 1 == doctor.main()
    lines = capsys.readouterr().out.splitlines()
    assert [*doctor.CHECKS] == list(dict.fromkeys(line.split()[0] for line in lines))
    assert "files      !!  24 open files: ulimit -n 1100, or lower max_connections" in lines


def test_the_next_version_leaves_bundles_as_they_are(tmp_path):
    """A bundle that may be served is not replaced."""
    for name in ("reviews", "reviews-v2", "reviews-of-books-v7", "my-reviews-v3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    request = read_request([str(tmp_path), str(tmp_path / "reviews"), "--next-version"])
    assert ("reviews", "3", tmp_path / "reviews-v3") == (request.name, request.version, request.out)
    request = read_request([str(tmp_path), str(tmp_path / "other"), "--next-version"])
    assert ("1", tmp_path / "other") == (request.version, request.out)
