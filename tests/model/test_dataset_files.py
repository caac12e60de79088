"""The lock says what data sets are, and what is read from under a locked path is what was locked."""

import re
import sys
from pathlib import Path

import pytest

from model import dataset_files, tokenizer
from model.data import checksums, corpus, labelled_rows
from model.data.checksums import DataError
from model.run_settings import read_config
from service.core import bundle

ROOT = Path(__file__).parents[2]
SHARED = "../shared/data/"
KIND = 'name = "Made up"\norigin = "https://example.org"\nterms = "CC0"\ncommercial_use = "yes"\nrows = "texts"\n'


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with one locked file, the lock its own."""
    file = tmp_path / "data" / "made" / "up.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"text": "a", "label": "x"}\n')
    (tmp_path / "dataset_files.toml").write_text(
        f"# A comment.\n[made-up]\n{KIND}\n[made-up.files]\n"
        f'"made/up.jsonl" = "{bundle.hash_file(file)}"\n"made/other.jsonl" = "{"0" * 64}"\n'
    )
    monkeypatch.setattr(checksums, "LOCK", tmp_path / "dataset_files.toml")
    return tmp_path / "data"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["lock", *map(str, arguments)])
    dataset_files.main()


def told(text: str) -> list[tuple[str, ...]]:
    """The cells of the table that was printed."""
    return [tuple(re.findall(r"[\w./-]+", line)) for line in text.splitlines() if "│" in line]


def test_a_file_that_is_as_locked_is_read(data):
    assert 1 == len(labelled_rows.read(data / "made/up.jsonl", "classification"))


def test_a_changed_file_is_refused_with_both_sums(data):
    """The error says how to lock what is there."""
    file = data / "made/up.jsonl"
    locked = bundle.hash_file(file)
    labelled_rows.read(file, "classification")
    file.write_text('{"text": "b", "label": "x"}\n')
    with pytest.raises(DataError, match="Made up") as refused:
        labelled_rows.read(file, "classification")
    message = str(refused.value)
    assert [bundle.hash_file(file), locked] == re.findall(r"\b[0-9a-f]{64}\b", message)
    assert f"python -m model.dataset_files {data}/ --update" in message


def test_a_corpus_is_compared_before_it_is_read(data, tokenizer_file, monkeypatch):
    """By pretraining, and when a tokenizer is made."""
    file = data / "made/up.jsonl"
    file.write_text("changed")
    with pytest.raises(DataError, match="Made up"):
        corpus.load([file], tokenizer_file, data / "cache")
    monkeypatch.setattr(sys, "argv", ["tokenizer", str(data / "t.json"), str(file)])
    with pytest.raises(SystemExit, match="Made up"):
        tokenizer.main()


@pytest.mark.parametrize("where", ["data/made", "data"])
def test_the_path_counts_wherever_one_stands(data, where, monkeypatch):
    """A relative path is known by where it leads."""
    (data / "made/up.jsonl").write_text("changed")
    monkeypatch.chdir(data.parent / where)
    with pytest.raises(DataError, match="Made up"):
        checksums.check((data / "made/up.jsonl").relative_to(Path.cwd()))


@pytest.mark.parametrize("name", ["made/another.jsonl", "up.jsonl", "unmade/up.jsonl"])
def test_other_files_are_not_even_hashed(data, name, monkeypatch):
    """People have data of their own."""
    (data / name).parent.mkdir(exist_ok=True)
    (data / name).write_text('{"text": "b", "label": "x"}\n')
    monkeypatch.setattr(bundle, "hash_file", None)
    assert 1 == len(labelled_rows.read(data / name, "classification"))


def test_a_file_is_hashed_once_until_it_is_changed(data, monkeypatch):
    file, hashed, real = data / "made/up.jsonl", [], bundle.hash_file
    monkeypatch.setattr(bundle, "hash_file", lambda path: hashed.append(path) or real(path))
    before = [checksums.hash_file(file), checksums.hash_file(file)]
    file.write_text("longer than it was before, whatever the clock says")
    after = checksums.hash_file(file)
    assert (2, [before[0]] * 2, True) == (len(hashed), before, after != before[0])


def test_a_folder_is_compared(data, monkeypatch, capsys):
    """A missing file is accepted; a changed one is reported with a non-zero exit status."""
    run(monkeypatch, data)
    assert [
        ("made-up", "made/up.jsonl", "present"),
        ("made-up", "made/other.jsonl", "missing"),
    ] == told(capsys.readouterr().out)
    (data / "made/up.jsonl").write_text("changed")
    with pytest.raises(SystemExit, match=r"changed: made/up\.jsonl"):
        run(monkeypatch, data)
    assert ("made-up", "made/up.jsonl", "changed") == told(capsys.readouterr().out)[0]


@pytest.mark.parametrize("was", ["", "1" * 64])
def test_update_locks_what_is_there(data, was, monkeypatch):
    """All else in the lock stays, what is missing too."""
    before = checksums.LOCK.read_text().replace(bundle.hash_file(data / "made/up.jsonl"), was)
    checksums.LOCK.write_text(before)
    (data / "made/up.jsonl").write_text("changed")
    run(monkeypatch, data, "--update")
    now = bundle.hash_file(data / "made/up.jsonl")
    assert before.replace(f'"{was}"', f'"{now}"') == checksums.LOCK.read_text()
    checksums.check(data / "made/up.jsonl")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("CC0", 'CC0"\nterm = "'), "term"),
        (('"yes"', '"perhaps"'), "commercial_use"),
        (("0" * 64, ""), r"made/other\.jsonl"),
        (("[made-up]", "[made-up"), "line 2"),
    ],
)
def test_what_is_wrong_in_the_lock_is_named(data, change, reason, monkeypatch):
    checksums.LOCK.write_text(checksums.LOCK.read_text().replace(*change))
    with pytest.raises(SystemExit, match=f"dataset_files.toml: .*(?s:.*){reason}"):
        run(monkeypatch, data)


def test_a_folder_that_is_not_there_is_an_error(data, monkeypatch):
    with pytest.raises(SystemExit, match="nowhere: no such folder"):
        run(monkeypatch, data / "nowhere")


def named() -> dict[str, set[str]]:
    """The data files that the configs and benchmarks name, below the data folder; a folder ends with a slash."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "model" / "configs").glob("*.toml"):
        config = read_config(path)
        heads = config.get("heads", {}).values()
        files = [file for head in heads for file in (*head["train"], head.get("dev", ""))]
        below = [f.removeprefix(SHARED) for f in files + config.get("corpus", []) if SHARED in f]
        found[path.name] = {file if "." in file else f"{file}/" for file in below}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        packed = re.findall(
            r'"([\w./-]+/[\w.-]+\.(?:jsonl|conll|json|txt)\.[gx]z)"', path.read_text()
        )
        found[path.name] = {file.removeprefix(SHARED) for file in packed}
    return {name: files for name, files in found.items() if files}


@pytest.mark.parametrize("reader", named())
def test_all_that_is_read_is_locked(reader):
    """Every file that a config or benchmark names is a data set's, so that its terms are known."""
    files = [file for locked in checksums.read_lock().values() for file in locked.files]
    assert [] == [n for n in named()[reader] if not any(file.startswith(n) for file in files)]


def test_a_file_belongs_to_one_data_set():
    locked = checksums.read_lock().values()
    files = [file for data_set in locked for file in data_set.files]
    assert len(files) == len(set(files)) > 50
    assert all(data_set.files and data_set.rows for data_set in locked)
    assert all(data_set.origin.startswith("http") for data_set in locked)
