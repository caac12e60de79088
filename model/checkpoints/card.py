"""What a checkpoint's files state about its origin: `provenance.json`, and the front matter of its card."""

import re
from pathlib import Path
from typing import Any

from model.checkpoints.head_config import CARD
from model.checkpoints.json_files import read_optional_object

LICENSE = re.compile(r"^(license(?:_name)?):\s*(?:-\s*)?[\"']?([^\s\"']+)", re.MULTILINE)
PROVENANCE = "provenance.json"  # fields for the manifest's provenance, where a checkpoint has any


def read_training(folder: Path) -> dict[str, Any]:
    """Return the description of a checkpoint's training that `finetune` wrote, empty if there is none."""
    training = read_optional_object(folder / PROVENANCE).get("training")
    return training if isinstance(training, dict) else {}


def read_license(folder: Path) -> str:
    """Return the license that the front matter of a checkpoint's card names, empty if it names none."""
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    front = re.match(r"\ufeff?---\r?\n(.*?)\n---", text, re.DOTALL)
    names = dict(LICENSE.findall(front[1])) if front else {}
    found: str = names.get("license", "")
    return names.get("license_name", found) if found == "other" else found
