"""The index of research/: `python -m research.index` renews research/README.md from the entries' front matter."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
INDEX = HERE / "README.md"
FIELDS = ("question", "machine", "commit", "command", "result", "decision", "superseded_by")
ENTRY = re.compile(r"---\n(?P<fields>.*?)---\n\n# (?P<title>[^\n]+)\n", re.DOTALL)
INTRODUCTION = """# Research

Each file records one measurement or experiment, failures included: how something was found out, not how Quartet is
used. The title states the result. The header states the question, machine, commit, command, result and decision, and
the entry that superseded it. "not recorded" means that nobody wrote it down at the time. A figure from a shared machine
is an indication; ratios of interleaved runs are safer.

The entries until 2026-11-26 come from one file, newest first. Where they mention the next entry, or the one below, they
mean the older one. What was tried in training is also in [one table](training.md).

To add an entry, copy the header of another one, and run `python -m research.index`, which renews this page.
"""


@dataclass(frozen=True)
class Entry:
    """One file of research/: its name, its title and the fields of its header."""

    name: str
    title: str
    fields: dict[str, str]


def read_entry(path: Path) -> Entry:
    """Return the entry in a file. Raises ValueError if its header lacks a field or has another one."""
    match = ENTRY.match(path.read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{path.name}: expected a header between --- lines, and a title")
    pairs = (line.split(": ", 1) for line in match["fields"].splitlines())
    fields = {name: json.loads(value) for name, value in pairs}
    if tuple(fields) != FIELDS:
        raise ValueError(f"{path.name}: expected the fields {', '.join(FIELDS)}")
    return Entry(path.name, match["title"], fields)


def read_entries() -> list[Entry]:
    """Return every entry, the newest first."""
    return [read_entry(path) for path in sorted(HERE.glob("[0-9]*.md"), reverse=True)]


def render() -> str:
    """Return the text of research/README.md."""
    lines = ["| date | result | question | superseded by |", "|---|---|---|---|"]
    for entry in read_entries():
        later = entry.fields["superseded_by"]
        later = "" if later == "none" else re.sub(r"^(\d{4}-\S+)", r"[\1](\1.md)", later)
        link = f"[{entry.title}]({entry.name})"
        lines.append(f"| {entry.name[:10]} | {link} | {entry.fields['question']} | {later} |")
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    INDEX.write_text(render(), encoding="utf-8")
