"""The settings in a checkpoint's JSON files: which are honored, which have no effect, and which are refused.

The rule: a setting that the reference library reads has the same meaning here, or the checkpoint is refused by name.
Each file has one `SettingsFile`. A setting that is in no table is unknown to the reference library, too
(`tests/parity/test_settings.py` compares the tables with what the library reads); `unknown_settings` names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from model.checkpoints.errors import CheckpointError

LONGEST_SHOWN = 80  # characters of a value in a message


class Handling(StrEnum):
    """What happens to a setting."""

    HONORED = "honored"
    NO_EFFECT = "no effect"  # on any answer: the reference library computes the same
    REFUSED = "refused"  # for every value that changes an answer


@dataclass(frozen=True)
class Setting:
    """One setting of a file."""

    name: str  # or a pattern of names, such as `*_token`
    handling: Handling
    # For REFUSED, the values with which the reference library computes what Quartet computes.
    harmless: tuple[Any, ...] = ()
    # For readers of the table in the docs and, for REFUSED, of the message: the reason, and what to do.
    note: str = ""


def honored(*names: str, note: str = "") -> tuple[Setting, ...]:
    """Return settings that have the reference library's meaning."""
    return tuple(Setting(name, Handling.HONORED, note=note) for name in names)


def no_effect(*names: str, note: str = "") -> tuple[Setting, ...]:
    """Return settings that change no answer."""
    return tuple(Setting(name, Handling.NO_EFFECT, note=note) for name in names)


def refused(name: str, *harmless: Any, note: str = "") -> Setting:
    """Return a setting that is refused unless it is null or has a harmless value."""
    return Setting(name, Handling.REFUSED, harmless=(None, *harmless), note=note)


@dataclass(frozen=True)
class SettingsFile:
    """The settings of one file, by the name of the file and the library that defines it."""

    file: str
    reference: Literal["transformers", "sentence-transformers"]
    settings: tuple[Setting, ...]

    def check(self, path: Path, document: Mapping[str, Any]) -> None:
        """Raise CheckpointError naming the first refused setting in a file's content, with its value."""
        for setting in self.settings:
            if setting.handling is not Handling.REFUSED or setting.name not in document:
                continue
            value = document[setting.name]
            if not any(_is_same(value, harmless) for harmless in setting.harmless):
                reason = f" ({setting.note})" if setting.note else ""
                raise CheckpointError(
                    f"{path}: {setting.name} = {shown(value)} is not supported{reason}"
                )

    def unknown_settings(self, document: Mapping[str, Any]) -> list[str]:
        """Return the names in a file's content that are in no table, sorted."""
        patterns = [setting.name for setting in self.settings]
        return sorted(
            name for name in document if not any(fnmatchcase(name, known) for known in patterns)
        )


def shown(value: Any) -> str:
    """Return a value for a one-line message, shortened."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _is_same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def render_table(files: Sequence[SettingsFile], versions: Mapping[str, str]) -> str:
    """Return the Markdown table of all settings; versions: of the reference libraries, by name."""
    rows = [
        "| file | setting | handling | note | compared with |",
        "| --- | --- | --- | --- | --- |",
    ]
    for file in files:
        compared = f"{file.reference} {versions[file.reference]}"
        rows += [
            f"| `{file.file}` | `{setting.name}` | {setting.handling} | {setting.note} | {compared} |"
            for setting in file.settings
        ]
    return "\n".join(rows)
