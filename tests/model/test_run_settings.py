"""Settings of training scripts: read from a file and flags, refused by name, and explained by `--help`."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import Field

from model import distill, finetune, pretrain
from model.data.head_rows import HeadSettings
from model.run_settings import RunSettings, is_text, read_settings

KINDS = (finetune.FinetuneSettings, distill.DistillSettings, pretrain.PretrainSettings)


class Settings(RunSettings):
    output: str
    steps: int
    lr: float = 0.1
    pairs: bool = True
    files: list[str] = Field([])
    phases: list[list[float]] | None = None
    tables: dict[str, Any] = Field({})
    fresh: bool = False


def read(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Settings:
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    return read_settings(Settings, "Train.")


Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The error message for arguments with which no run can begin."""

    def said(*arguments: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            read(monkeypatch, *arguments)
        return capsys.readouterr().err

    return said


class TestSources:
    def test_command_line(self, monkeypatch):
        """Settings come from the command line: text as it is, all else as JSON."""
        arguments = ["--output", "3", "--steps", "7", "--lr", "1e-3", "--pairs", "false", "--files"]

        settings = read(monkeypatch, *arguments, '["a", "b"]', "--phases", "[[1, 8]]")

        assert settings == Settings(
            output="3", steps=7, lr=0.001, pairs=False, files=["a", "b"], phases=[[1, 8]]
        )

    def test_file(self, monkeypatch, tmp_path):
        """Settings come from a TOML file, and the rest are defaults."""
        path = tmp_path / "run.toml"
        path.write_text('output = "runs/a"\nsteps = 7\nphases = [[0.5, 8], [0.5, 16]]\n')

        settings = read(monkeypatch, str(path))

        assert settings == Settings(output="runs/a", steps=7, phases=[[0.5, 8], [0.5, 16]])

    def test_whole_numbers(self, monkeypatch):
        """1e4 is a whole number, too."""
        settings = read(monkeypatch, "--output", "a", "--steps", "1e4")

        assert repr(settings.steps) == "10000"

    def test_booleans_need_no_value(self, monkeypatch, tmp_path):
        """The option alone sets a boolean, also before the name of a file; the value false unsets it."""
        path = tmp_path / "run.toml"
        path.write_text('output = "runs/a"\nsteps = 7\npairs = false\n')

        assert read(monkeypatch, "--pairs", str(path)).pairs is True
        assert read(monkeypatch, str(path), "--pairs").pairs is True
        assert read(monkeypatch, str(path), "--pairs", "false").pairs is False

    def test_command_line_wins(self, monkeypatch, tmp_path):
        """The command line overrides the file."""
        path = tmp_path / "run.toml"
        path.write_text('output = "runs/a"\nsteps = 7\nlr = 0.5\n')

        assert read(monkeypatch, str(path), "--steps", "8") == Settings(
            output="runs/a", steps=8, lr=0.5
        )

    def test_a_file_that_extends_another(self, monkeypatch, tmp_path):
        """It contains only differences, also within tables; lists are replaced. The base may extend a third file."""
        (tmp_path / "first.toml").write_text(
            'output = "runs/a"\nsteps = 7\nlr = 0.5\nfiles = ["a", "b"]\n'
            "[tables.one]\nsize = 1\nrate = 2\n[tables.two]\nsize = 3\n"
        )
        (tmp_path / "second.toml").write_text('extends = "first.toml"\nsteps = 8\n')
        last = tmp_path / "last.toml"
        last.write_text(
            'extends = "second.toml"\nfiles = ["c"]\nlr = 0.25\n[tables.one]\nsize = 4\n'
        )
        monkeypatch.chdir("/")

        settings = read(monkeypatch, str(last))

        tables = {"one": {"size": 4, "rate": 2}, "two": {"size": 3}}
        assert settings == Settings(output="runs/a", steps=8, lr=0.25, files=["c"], tables=tables)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('extends = "wrong.toml"\n', "wrong.toml extends itself"),
            ('extends = "base.toml"\n', "base.toml extends itself"),
            ('extends = "nowhere.toml"\n', "[Errno 2] No such file or directory"),
            ('extends = "broken.toml"\n', "broken.toml: Invalid value (at line 2"),
        ],
        ids=["itself", "in a circle", "nothing", "no TOML"],
    )
    def test_a_file_that_extends_what_cannot_be(self, refused, tmp_path, text, message):
        (tmp_path / "base.toml").write_text('extends = "middle.toml"\n')
        (tmp_path / "middle.toml").write_text('extends = "base.toml"\n')
        (tmp_path / "broken.toml").write_text("steps = 7\nlr = fast\n")
        path = tmp_path / "wrong.toml"
        path.write_text(text)

        assert message in refused(str(path))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--output", "a"], "missing: steps"),
            (["--outptu", "a"], "unrecognized arguments: --outptu"),
            (["--out", "a"], "unrecognized arguments: --out"),
            (["--output", "a", "--steps", "many"], "--steps: 'many' is not JSON"),
            (
                ["--output", "a", "--steps", "7.5"],
                "steps: Input should be a valid integer, not 7.5",
            ),
            (["nowhere.toml"], "nowhere.toml: [Errno 2]"),
        ],
    )
    def test_refusals(self, refused, arguments, message):
        """Missing, unknown, shortened and unreadable settings are refused by name."""
        assert message in refused(*arguments)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("stpes = 7\n", "unknown setting 'stpes': one of output, steps, lr"),
            ("steps = 7\nlr = fast\n", "at line 2"),
            ("fresh = true\n", "fresh: give --fresh on the command line, for one run only"),
        ],
        ids=["unknown name", "no TOML", "fresh"],
    )
    def test_wrong_file(self, refused, tmp_path, text, message):
        """It is refused by name: with the names there are, or with where it goes wrong."""
        path = tmp_path / "run.toml"
        path.write_text(text)

        _, said, reason = refused(str(path)).partition(f"{path}: ")
        assert said
        assert message in reason


class TestHelp:
    @pytest.mark.parametrize("kind", KINDS)
    def test_examples_are_read(self, kind):
        """Each setting has a meaning and an example, which is one word of the command line: text or JSON."""
        for field in kind.model_fields.values():
            [example] = field.examples or ()
            [word] = shlex.split(example)
            assert field.description
            assert is_text(field) or json.loads(word) is not None

    def test_examples_of_heads_are_read(self):
        """Examples of a head's settings are TOML, and are accepted by themselves."""
        for name, field in HeadSettings.model_fields.items():
            [example] = field.examples or ()
            value = tomllib.loads(f"{name} = {example}")
            assert field.description
            task = "ner" if field.description.startswith("ner:") else "classification"
            HeadSettings(**{"task": task, "train": [], **value})

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ("absent.csv", "absent.csv: No such file or directory"),
            ("rows.csv", "rows.csv:1: the first line, which names the columns: no text"),
            ("rows.csv?text=a&label=b", "rows.csv:3: no b"),
        ],
    )
    def test_wrong_data_is_reported_before_torch_is_imported(self, tmp_path, data, message):
        """The import of torch takes seconds."""
        (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
        (tmp_path / "rows.csv").write_text("a,b\nc,d\ne,\n")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "model.finetune", "--data", str(tmp_path / data)),
                *("--init-from", "absent", "--output", str(tmp_path / "run")),
            ],
            check=False,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert (1, True) == (done.returncode, message in done.stderr), done.stderr

    def test_help(self):
        """The page of the command has meaning, type, default and example, and the settings of heads."""
        command = [sys.executable, "-m", "model.finetune", "--help"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        page = " ".join(done.stdout.split())

        expected = (
            "--gradient-accumulation VALUE micro-batches of each head whose gradients one step adds up. "
            "whole number; default: 1. Example: --gradient-accumulation 4"
        )
        assert expected in page
        assert "class_weights classification: weight of each label in the loss" in page
