"""The name of a program in its help text."""

import sys
from pathlib import Path

COMMANDS = ("quartet", "quartet-serve", "quartet-export")  # of the installed package


def program_name(module: str) -> str:
    """Return the words with which the user called `module`: `quartet serve`, `quartet-serve` or `python -m service`."""
    called = Path(sys.argv[0]).name
    return called if called.partition(" ")[0] in COMMANDS else f"python -m {module}"
