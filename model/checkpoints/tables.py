"""All settings of checkpoints that are read: `python -m model.checkpoints.tables [--write FILE]`.

The table goes to standard output or, with --write, between the two marks of a Markdown file.
"""

import argparse
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from model.checkpoints.config_table import CONFIG_TABLES, unknown_settings
from model.checkpoints.gliclass import is_gliclass
from model.checkpoints.json_files import read_optional_object
from model.checkpoints.sentence_config import (
    SENTENCE_TABLES,
    encoder_folder,
    static_folder,
    unknown_sentence_settings,
)
from model.checkpoints.settings_table import SettingsFile, render_table
from model.checkpoints.tokenizer_tables import (
    ADDED_TOKENS,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
)

TOKENIZER_TABLES = (TOKENIZER_CONFIG, TOKENIZER_JSON, SPECIAL_TOKENS_MAP, ADDED_TOKENS)
TABLES: tuple[SettingsFile, ...] = (*TOKENIZER_TABLES, *CONFIG_TABLES, *SENTENCE_TABLES)


def versions() -> Mapping[str, str]:
    """Return the installed version of each reference library. Raises PackageNotFoundError."""
    return {name: version(name) for name in sorted({file.reference for file in TABLES})}


def insert(text: str, name: str, table: str) -> str:
    """Return a Markdown text with this table between its marks. Raises ValueError unless each mark occurs once."""
    marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    for mark in marks:
        if text.count(mark) != 1:
            raise ValueError(f"{mark} occurs {text.count(mark)} times, not once")
    before, _, rest = text.partition(marks[0])
    return f"{before}{marks[0]}\n{table}\n{marks[1]}{rest.partition(marks[1])[2]}"


def write(page: Path, name: str, table: str) -> None:
    """Insert a table into a Markdown file. Raises ValueError as `insert` does."""
    page.write_text(insert(page.read_text(encoding="utf-8"), name, table), encoding="utf-8")


def unread_settings(folder: Path) -> str:
    """Return the settings that no library reads: `config.json: a, b; 1_Pooling/config.json: c`. Empty for none."""
    path = encoder_folder(folder) / "config.json"
    is_other = static_folder(folder) is not None or is_gliclass(folder)
    document = {} if is_other else read_optional_object(path)
    names = {str(path.relative_to(folder)): unknown_settings(document)}
    names |= unknown_sentence_settings(folder)
    return "; ".join(f"{file}: {', '.join(unknown)}" for file, unknown in names.items() if unknown)


def main() -> None:
    parser = argparse.ArgumentParser("python -m model.checkpoints.tables", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="a Markdown file with the marks")
    arguments = parser.parse_args()
    table = render_table(TABLES, versions())
    if arguments.write is None:
        print(table)
    else:
        write(arguments.write, "settings", table)


if __name__ == "__main__":
    main()
