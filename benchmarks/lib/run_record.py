"""The record of a benchmark run, which its result file keeps: what ran, of which code, when."""

import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.lib import machine
from benchmarks.lib.environments import ROOT
from service.core.bundle import MANIFEST, hash_file

PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "tokenizers", "torch", "transformers")


def write(results: dict[str, object], out: Path | None, *folders: Path) -> None:
    """Print results with the run and the machine as one JSON line, and write it to a file."""
    described = {"run": describe_run(*folders), "machine": machine.describe()}
    line = json.dumps({**described, **results}, default=float)
    print(line)
    if out:
        out.write_text(line + "\n")


def describe_run(*folders: Path) -> dict[str, object]:
    """Return date, command, commit, whether files differ from it, versions, and hashes of bundles' manifests.

    folders: bundles, or directories that contain bundles at any depth

    Outside a Git checkout, the commit and the flag are None.
    """
    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": commit,
        "dirty": None if commit is None else bool(changes),
        "versions": dict(installed_versions()),
        "bundles": {
            path.parent.relative_to(folder.parent).as_posix(): hash_file(path)
            for folder in folders
            for path in sorted(folder.rglob(MANIFEST))
        },
    }


def installed_versions() -> Iterable[tuple[str, str]]:
    """Yield name and version of each of PACKAGES that is installed."""
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def git(*arguments: str) -> str | None:
    """Return the output of a Git command in the checkout; None where that fails."""
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None
