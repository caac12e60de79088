"""The directories of a trained model's versions: NAME has version 1, NAME-v2 has version 2. Imports nothing slow."""

import re
from pathlib import Path

MANIFEST = "manifest.json"


def versions_of(out: Path) -> dict[int, Path]:
    """Return the bundles of a name by version. out: the directory of version 1, which need not exist"""
    found = {}
    for manifest in out.parent.glob(f"*/{MANIFEST}"):
        folder = manifest.parent
        if match := re.fullmatch(rf"{re.escape(out.name)}(?:-v(\d+))?", folder.name):
            found[int(match[1] or 1)] = folder
    return found


def next_version(out: Path) -> tuple[int, Path]:
    """Return the version after the newest one, and its directory."""
    version = max(versions_of(out), default=0) + 1
    return version, out if version == 1 else out.with_name(f"{out.name}-v{version}")
