"""A run continues with the settings and the data that it has; any other run is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from model.run_settings import RunSettings
from model.training import run_record
from model.training.run_record import OtherRunError, RunRecord, check_output
from tests.json_files import editing


class Head(RunSettings):
    train: list[str]
    weight: float = 1.0
    label_map: dict[str, str] = Field({})


class Settings(RunSettings):
    output: str
    heads: dict[str, Any]
    steps: int = 5
    lr: float | None = 0.1
    save_every: int = 10
    fresh: bool = False


def replace(settings: Any, **fields: Any) -> Any:
    return settings.model_copy(update=fields)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,x\n")
    return path


@pytest.fixture
def settings(tmp_path: Path, data: Path) -> Settings:
    """Settings of a run that is saved in its directory."""
    settings = Settings(output=str(tmp_path / "run"), heads={"topic": Head(train=[str(data)])})
    folder = Path(settings.output)
    folder.mkdir()
    RunRecord.of(settings).write(folder, settings)
    (folder / "last.pt").touch()
    return settings


def refusal(settings: Settings) -> str:
    with pytest.raises(OtherRunError) as refused:
        check_output(settings)
    return str(refused.value)


@pytest.mark.parametrize(
    "change", [{}, {"steps": 9}, {"save_every": 3}, {"lr": 0.5, "fresh": True}]
)
def test_a_run_continues(settings, change):
    """With the same settings, with another length or other saves, or anew with `fresh`."""
    check_output(replace(settings, **change))


def test_a_moved_file_is_the_same(settings, data):
    """Files are compared by their content."""
    moved = data.rename(data.with_name("b.csv"))
    check_output(replace(settings, heads={"topic": Head(train=[str(moved)])}))


def test_a_moved_run_is_the_same(settings, tmp_path):
    shutil.move(settings.output, tmp_path / "moved")
    check_output(replace(settings, output=str(tmp_path / "moved")))


def test_other_settings_are_named_with_what_to_do(settings):
    """One line has every difference, the old values, and the ways on."""
    other = replace(settings, lr=0.5, heads={"topic": replace(settings.heads["topic"], weight=2.0)})
    assert refusal(other) == (
        f"{settings.output} has a run that differs: heads.topic.weight: 2.0 (was 1.0); lr: 0.5 (was 0.1)."
        " Choose another output, restore these settings to continue the run, or delete it and begin anew"
        " with --fresh (make train FRESH=1)"
    )


def test_other_data_is_named(settings, data):
    """A file with another content has both checksums."""
    data.write_text("text,label\na,y\n")
    assert f"heads.topic.train: {data} has changed: SHA-256 " in refusal(settings)


@pytest.mark.parametrize("other", ["b.csv", "a.csv?text=label&label=text"])
def test_another_file_is_named(settings, data, other):
    """Other columns of a file are other data, too."""
    data.with_name("b.csv").write_text("text,label\nb,x\n")
    train = f"{data.parent}/{other}"
    found = refusal(replace(settings, heads={"topic": Head(train=[train])}))
    assert f"heads.topic.train: {train} (was {data})" in found


def test_other_heads_are_named_once(settings):
    """Their settings are not listed in addition; the order of heads counts."""
    head = settings.heads["topic"]
    found = refusal(replace(settings, heads={"mood": head, "topic": head}))
    assert "heads: mood, topic (was topic)." in found
    assert "weight" not in found


def test_an_entry_of_a_table_is_named(settings, data):
    head = Head(train=[str(data)], label_map={"x": "y"})
    assert 'heads.topic.label_map.x: "y" (was unset)' in refusal(
        replace(settings, heads={"topic": head})
    )


def test_settings_that_an_older_version_did_not_have(settings):
    """They count as defaults, and settings that no longer exist are ignored."""
    path = Path(settings.output) / "record.json"
    with editing(path) as document:
        del document["settings"]["lr"], document["settings"]["heads"]["topic"]["weight"]
        document["settings"]["gone"] = 1
    check_output(settings)
    assert "lr: 0.5 (was 0.1)" in refusal(replace(settings, lr=0.5))


def test_settings_are_compared_as_they_are_given(settings):
    """A value that a run chooses for an unset setting, such as one that depends on the steps, is no difference."""
    unset = replace(settings, lr=None)
    record = RunRecord.of(unset)
    record.write(Path(settings.output), replace(settings, lr=0.2))
    check_output(unset)
    check_output(replace(settings, lr=0.3), record)
    assert "lr: 0.2 (was unset)" in refusal(replace(settings, lr=0.2))
    written = json.loads((Path(settings.output) / "settings.json").read_text())
    assert written["lr"] == 0.2


def test_nothing_is_compared_before_a_run_is_saved(settings):
    """A run that ended before its first save has nothing to lose."""
    (Path(settings.output) / "last.pt").unlink()
    check_output(replace(settings, lr=0.5))


def test_only_a_runs_own_files_are_deleted(settings):
    folder = Path(settings.output)
    (folder / "notes.txt").touch()
    (folder / "checkpoint").mkdir()
    run_record.delete_run(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_checkpoint_has_what_made_it(settings, tmp_path, data):
    RunRecord.of(settings).write_to_checkpoint(tmp_path, 3, replace(settings, lr=0.1))
    document = json.loads((tmp_path / "training_settings.json").read_text())
    assert document["step"] == 3
    assert document["settings"]["lr"] == 0.1
    assert "fresh" not in document["settings"]
    [entry] = document["data"]["heads.topic.train"]
    assert entry.keys() == {"file", "sha256"}
    assert entry["file"] == str(data)
