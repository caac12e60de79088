"""`--help` explains every setting of every training script: meaning, type, default and an example that is accepted."""

import dataclasses
import json
import shlex
import subprocess
import sys
import tomllib

import pytest

from model import distill, finetune, pretrain
from model.data.examples import HeadSettings
from model.training import settings_help

KINDS = (finetune.FinetuneSettings, distill.DistillSettings, pretrain.PretrainSettings)


def test_every_setting_is_explained() -> None:
    """No setting is without help, and no help is for a setting that does not exist."""
    names = {field.name for kind in KINDS for field in dataclasses.fields(kind)}
    of_heads = {field.name for field in dataclasses.fields(HeadSettings)}

    assert names == settings_help.SETTINGS.keys()
    assert of_heads == settings_help.HEAD_SETTINGS.keys()


@pytest.mark.parametrize("name", settings_help.SETTINGS)
def test_examples_are_read(name: str) -> None:
    """An example is one word of the command line: text where the setting is text, otherwise JSON."""
    _, example = settings_help.SETTINGS[name]
    kinds = {
        field.type for kind in KINDS for field in dataclasses.fields(kind) if field.name == name
    }

    [word] = shlex.split(example)
    assert kinds == {str} or json.loads(word) is not None


def test_examples_of_heads_are_read() -> None:
    """Examples of a head's settings are TOML, and are accepted by themselves."""
    for name, (meaning, example) in settings_help.HEAD_SETTINGS.items():
        value = tomllib.loads(f"{name} = {example}")
        task = "ner" if meaning.startswith("ner:") else "classification"
        HeadSettings(**{"task": task, "train": [], **value})


def test_help() -> None:
    """The page of the command has type, default and example, and the settings of heads."""
    command = [sys.executable, "-m", "model.finetune", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    page = " ".join(done.stdout.split())

    expected = (
        "--gradient-accumulation VALUE micro-batches of each head whose gradients one step adds up. "
        "whole number; default: 1. Example: --gradient-accumulation 4"
    )
    assert expected in page
    assert "class_weights classification: weight of each label in the loss" in page
