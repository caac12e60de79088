from pathlib import Path

import pytest

from model.checkpoints.errors import CheckpointError
from model.checkpoints.settings_table import Handling, Setting, SettingsFile, render_table

FILE = SettingsFile(
    "some_config.json",
    "transformers",
    (
        Setting("length", Handling.HONORED),
        Setting("author", Handling.NO_EFFECT),
        Setting("side", Handling.REFUSED, harmless=("right", None), note="the end of a text"),
        Setting("legacy", Handling.REFUSED, harmless=(0,)),
    ),
)
PATH = Path("folder/some_config.json")


def test_a_refused_setting_is_named_with_its_value():
    """The error has the file, the setting, the value and the reason."""
    with pytest.raises(CheckpointError) as raised:
        FILE.check(PATH, {"length": 8, "side": "left"})

    expected = "folder/some_config.json: side = 'left' is not supported (the end of a text)"
    assert expected == str(raised.value)


@pytest.mark.parametrize("document", [{}, {"side": "right"}, {"side": None, "author": "x"}])
def test_a_harmless_value_passes(document):
    """A refused setting may have a value that changes nothing, or be absent."""
    FILE.check(PATH, document)


def test_a_truth_value_is_no_number():
    """`False` is not taken for the harmless 0."""
    with pytest.raises(CheckpointError, match="legacy = False"):
        FILE.check(PATH, {"legacy": False})


def test_unknown_settings_are_listed():
    """A name that is in no table is reported, in alphabetical order."""
    assert ["a", "b"] == FILE.unknown_settings({"b": 1, "length": 2, "a": 3})


def test_the_table_has_a_row_for_each_setting():
    """Each row has the file, the setting, its handling, the note and the library's version."""
    table = render_table([FILE], {"transformers": "5.0"}).splitlines()

    assert 2 + len(FILE.settings) == len(table)
    expected = "| `some_config.json` | `side` | refused | the end of a text | transformers 5.0 |"
    assert expected == table[4]
