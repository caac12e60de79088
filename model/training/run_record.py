"""The settings and the data of a run, compared before a run continues in a directory.

<output>/record.json   the settings as they were given, and for each setting that names data files the files and their
                       SHA-256

Each checkpoint of the run has the step, the settings with the values that the run chose, and the data, in
`training_settings.json`.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.data import checksums
from model.data.corpus import corpus_files
from model.run_settings import RunSettings
from service.core.data_files import sources

SETTINGS, RECORD, STATE = "settings.json", "record.json", "last.pt"
CHECKPOINT_RECORD = "training_settings.json"
WRITTEN = (
    STATE,
    "plan.json",
    SETTINGS,
    RECORD,
    "metrics.json",
    "loss.png",
    "held_out.json",
    "report.html",
    "report.json",
)
FOLDERS = ("checkpoint", "tensorboard")
# Settings that do not change what a step learns, and settings of the length of a run.
FREE = ("output", "cache", "save_every", "fresh")
LENGTH = ("steps", "epochs", "minutes")
DATA_SETTINGS = ("data", "train", "dev", "corpus", "tokenizer")
MOST = 8  # differences in a message


class OtherRunError(ValueError):
    """A directory has a run with other settings or other data."""


@dataclass(frozen=True)
class RunRecord:
    """The settings of a run, and the files of each setting that names data: `file`, and `sha256` if it is local."""

    settings: dict[str, Any]
    data: dict[str, list[dict[str, str]]]

    @classmethod
    def of(cls, settings: RunSettings) -> "RunRecord":
        """Return the record of settings, with the hashes of the data files."""
        document = describe(settings)
        return cls(document, dict(_data_files(document)))

    @classmethod
    def read(cls, folder: Path) -> "RunRecord | None":
        """Return the record of the run in a directory; None if there is none."""
        if (folder / RECORD).is_file():
            return cls(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
        return None

    def write(self, folder: Path, settings: Any) -> None:
        """Write the record of a run, and its settings with the values that the run chose."""
        _write(folder / RECORD, {"settings": self.settings, "data": self.data})
        _write(folder / SETTINGS, describe(settings))

    def write_to_checkpoint(self, folder: Path, step: int, settings: Any) -> None:
        """Write the settings and the data of a checkpoint that the run had after `step` steps."""
        document = {"step": step, "settings": describe(settings), "data": self.data}
        _write(folder / CHECKPOINT_RECORD, document)


def describe(settings: RunSettings) -> dict[str, Any]:
    """Return settings as JSON has them, without the setting that begins anew."""
    return settings.model_dump(mode="json", exclude={"fresh"})


def check_output(settings: Any, record: RunRecord | None = None) -> RunRecord:
    """Return the record of settings as given, before a run chooses values for those that are unset.

    Raises OtherRunError if `output` has a saved run with other data or settings, except FREE and LENGTH.
    """
    folder = Path(settings.output)
    record = record or RunRecord.of(settings)
    if getattr(settings, "fresh", False) or not (folder / STATE).is_file():
        return record
    if not (before := RunRecord.read(folder)):
        return record
    if found := differences(before, record, settings):
        more = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
        raise OtherRunError(
            f"{folder} has a run that differs: {'; '.join(found[:MOST])}{more}. Choose another output,"
            " restore these settings to continue the run, or delete it and begin anew with --fresh (make train FRESH=1)"
        )
    return record


def delete_run(folder: Path) -> None:
    """Delete the files that a run writes into its directory, and no others."""
    for name in WRITTEN:
        (folder / name).unlink(missing_ok=True)
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


def differences(before: RunRecord, now: RunRecord, settings: Any) -> list[str]:
    """Return the differences of two runs, each as `setting: value (was value)`."""
    old = _complete(before.settings, settings)
    heads = [[*document.get("heads", {})] for document in (old, now.settings)]
    found = []
    if heads[0] != heads[1]:
        found.append(f"heads: {', '.join(heads[1])} (was {', '.join(heads[0])})")
    values = [dict(_flat(document)) for document in (old, now.settings)]
    for name in dict.fromkeys([*values[1], *values[0]]):
        top, *rest = name.split(".")
        if top in (*FREE, *LENGTH) and not rest:
            continue
        if top == "heads" and rest and any(rest[0] not in each for each in heads):
            continue
        if name in before.data and name in now.data:
            found += _file_differences(name, before.data[name], now.data[name])
            continue
        was, value = (each.get(name, _ABSENT) for each in values)
        if was != value:
            found.append(f"{name}: {_show(value)} (was {_show(was)})")
    return found


_ABSENT = object()


def _show(value: Any) -> str:
    return "unset" if value is _ABSENT or value is None else json.dumps(value, ensure_ascii=False)


def _file_differences(
    name: str, old: list[dict[str, str]], new: list[dict[str, str]]
) -> Iterator[str]:
    """Yield the differences of two lists of files; a file that only moved is none."""
    if [_content(entry) for entry in old] == [_content(entry) for entry in new]:
        return
    if [entry["file"] for entry in old] != [entry["file"] for entry in new]:
        names = (", ".join(entry["file"] for entry in each) or "none" for each in (new, old))
        yield "{}: {} (was {})".format(name, *names)
        return
    for was, entry in zip(old, new, strict=True):
        if was != entry:
            sums = [each.get("sha256", "missing")[:12] for each in (entry, was)]
            yield f"{name}: {entry['file']} has changed: SHA-256 {sums[0]}... (was {sums[1]}...)"


def _content(entry: dict[str, str]) -> tuple[str, str]:
    """Return the parts of a file's record that a run depends on: content and columns, or the name of a hub data set."""
    if "sha256" not in entry:
        return "", entry["file"]
    return entry["sha256"], sources.split(entry["file"])[1]


def _data_files(document: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield each setting that names data files, by its dotted name, and its files."""
    for name, value in _flat(document):
        last = name.rpartition(".")[2]
        if last not in DATA_SETTINGS or not value:
            continue
        names = [value] if isinstance(value, str) else value
        files = map(str, corpus_files(names)) if last == "corpus" else names
        yield name, [_describe(file) for file in files]


def _describe(file: str) -> dict[str, str]:
    path = Path(sources.split(file)[0])
    if sources.is_hub(file) or not path.is_file():  # the reader reports a missing file
        return {"file": file}
    return {"file": file, "sha256": checksums.hash_file(path)}


def _flat(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted names."""
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif value != {}:
            yield f"{prefix}{name}", value


def _complete(document: dict[str, Any], settings: RunSettings) -> dict[str, Any]:
    """Return a document with the fields of settings: defaults for new ones, without those that it lacks."""
    complete: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name == "fresh":
            continue
        if name not in document:
            required = field.is_required()
            complete[name] = None if required else field.get_default(call_default_factory=True)
            continue
        complete[name] = document[name]
        if isinstance(value, dict) and isinstance(document[name], dict):
            complete[name] = {
                key: _complete(table, value[key])
                if isinstance(value.get(key), RunSettings)
                else table
                for key, table in document[name].items()
            }
    return complete


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
