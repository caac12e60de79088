"""The command `quartet`: its table, its help texts and its errors."""

import subprocess
import sys

import pytest

from quartet import command

SLOW_LIBRARIES = ("torch", "onnx", "onnxruntime", "transformers", "fastapi")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["quartet", *arguments])
    return command.main()


def test_the_overview_has_every_command(monkeypatch, capsys):
    assert 0 == run(monkeypatch)
    text = capsys.readouterr().out
    assert all(
        f"\n  {name} " in text and each.example in text for name, each in command.COMMANDS.items()
    )


def test_an_unknown_command_is_corrected(monkeypatch, capsys):
    assert 2 == run(monkeypatch, "sreve")
    assert "no command sreve (did you mean serve?)" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_has_an_example(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert 0 == run(monkeypatch, name, "--help")
    text = capsys.readouterr().out
    assert text.startswith(f"usage: quartet {name} ")
    assert f"Example: {command.COMMANDS[name].example}" in text


def test_help_imports_no_slow_library():
    code = (
        "import sys; from quartet.command import COMMANDS\n"
        "for name, command in COMMANDS.items(): sys.argv = [f'quartet {name}']; command.parser()\n"
        f"print({{*sys.modules}} & {{*{SLOW_LIBRARIES}}})"
    )
    assert "set()\n" == subprocess.check_output([sys.executable, "-c", code], text=True)


def test_a_missing_extra_is_named(monkeypatch, capsys):
    def import_nothing(name):
        raise ModuleNotFoundError(f"No module named 'onnx' in {name}", name="onnx")

    monkeypatch.setattr(command, "import_module", import_nothing)
    assert 1 == run(monkeypatch, "export", "a", "b")
    assert (
        'export needs onnx, which is not installed: pip install "quartet-serving[train]"'
        in capsys.readouterr().err
    )


def test_a_shell_completes_options(tmp_path):
    line = "quartet pull --t"
    variables = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_IFS": "\n",
    }
    code = "import os, sys; os.dup2(1, 8); from quartet.command import main; sys.argv = ['quartet']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    assert "--to" in done.stdout
