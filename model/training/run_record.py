"""The settings and the data of a run, compared before a run continues in a directory.

<output>/settings.json   the settings
<output>/data.json       for each setting that names data files: the files and their SHA-256

Each checkpoint of the run has both, with the step, in `training_settings.json`.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.data import checksums, sources
from model.data.corpus import corpus_files

SETTINGS, DATA, STATE = "settings.json", "data.json", "last.pt"
CHECKPOINT_RECORD = "training_settings.json"
WRITTEN = (STATE, "plan.json", SETTINGS, DATA, "metrics.json", "loss.png", "report.html")
FOLDERS = ("checkpoint", "tensorboard")
# Settings that do not change what a step learns, and settings of the length of a run.
FREE = ("output", "cache", "save_every", "fresh")
LENGTH = ("steps", "epochs", "minutes")
DATA_SETTINGS = ("train", "dev", "corpus", "tokenizer")
MOST = 8  # differences in a message


class OtherRunError(ValueError):
    """A directory has a run with other settings or other data."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The settings of a run, and the files of each setting that names data: `file`, and `sha256` if it is local."""

    settings: dict[str, Any]
    data: dict[str, list[dict[str, str]]]

    @classmethod
    def of(cls, settings: Any) -> "RunRecord":
        """Return the record of a dataclass of settings. Hashes the data files; raises OSError for a missing one."""
        document = json.loads(json.dumps(dataclasses.asdict(settings)))
        document.pop("fresh", None)
        return cls(document, dict(_data_files(document)))

    @classmethod
    def read(cls, folder: Path) -> "RunRecord | None":
        """Return the record of the run in a directory; None if there is none. `data` is empty in old runs."""
        if not (folder / SETTINGS).is_file():
            return None
        documents = [
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            for path in (folder / SETTINGS, folder / DATA)
        ]
        return cls(*documents)

    def write(self, folder: Path) -> None:
        """Write both files of a run."""
        _write(folder / SETTINGS, self.settings)
        _write(folder / DATA, self.data)

    def write_to_checkpoint(self, folder: Path, step: int) -> None:
        """Write the record of a checkpoint that the run had after `step` steps."""
        document = {"step": step, "settings": self.settings, "data": self.data}
        _write(folder / CHECKPOINT_RECORD, document)


def check_output(settings: Any, record: RunRecord | None = None) -> None:
    """Raise OtherRunError if `output` has a saved run with other settings or other data than these.

    Its length may differ, and so may the settings in FREE.
    """
    folder = Path(settings.output)
    if getattr(settings, "fresh", False) or not (folder / STATE).is_file():
        return
    if not (before := RunRecord.read(folder)):
        return
    found = differences(before, record or RunRecord.of(settings), settings)
    if found:
        more = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
        raise OtherRunError(
            f"{folder} has a run that differs: {'; '.join(found[:MOST])}{more}. Choose another output,"
            " restore these settings to continue the run, or delete it and begin anew with --fresh"
        )


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
    return "unset" if value is _ABSENT else json.dumps(value, ensure_ascii=False)


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
            sums = entry["sha256"][:12], was["sha256"][:12]
            yield "{}: {} has changed: SHA-256 {}... (was {}...)".format(name, entry["file"], *sums)


def _content(entry: dict[str, str]) -> tuple[str, str]:
    """Return what a file contributes to a run: its content and its columns; of the hub, its name."""
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
    path = sources.split(file)[0]
    if sources.is_hub(file):
        return {"file": file}
    return {"file": file, "sha256": checksums.hash_file(Path(path))}


def _flat(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted names."""
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif value != {}:
            yield f"{prefix}{name}", value


def _complete(document: dict[str, Any], settings: Any) -> dict[str, Any]:
    """Return a document with the fields of a dataclass: defaults for new ones, without those that it lacks."""
    complete = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name == "fresh":
            continue
        if field.name not in document:
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            complete[field.name] = None if default is dataclasses.MISSING else default
            continue
        complete[field.name] = document[field.name]
        if isinstance(value, dict) and isinstance(document[field.name], dict):
            complete[field.name] = {
                name: _complete(table, value[name])
                if name in value and dataclasses.is_dataclass(value[name])
                else table
                for name, table in document[field.name].items()
            }
    return complete


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
