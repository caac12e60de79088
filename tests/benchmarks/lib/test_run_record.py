"""The record of a benchmark run."""

import subprocess
from datetime import datetime

import numpy as np

from benchmarks.lib import run_record
from service.core.bundle import hash_file


def test_record_states_what_ran(tmp_path):
    """A record has the date, the command, versions, and the hash of each manifest below a folder."""
    manifest = tmp_path / "scratch" / "model" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")

    record = run_record.describe_run(tmp_path / "scratch")

    assert datetime.fromisoformat(record["date"]).tzinfo is not None
    assert record["command"].startswith("python ")
    assert np.__version__ == record["versions"]["numpy"]
    assert {"scratch/model": hash_file(manifest)} == record["bundles"]


def test_record_states_commit_and_changes(tmp_path, monkeypatch):
    """`dirty` is true only if a tracked file differs from the commit; outside a checkout both are None."""
    monkeypatch.setattr(run_record, "ROOT", tmp_path)
    assert (None, None) == commit_and_changes()

    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "file").write_text("one")
    for command in (["init", "-q"], ["add", "."], [*settings, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    commit, dirty = commit_and_changes()
    assert (40, False) == (len(commit), dirty)

    (tmp_path / "file").write_text("two")
    assert (commit, True) == commit_and_changes()


def commit_and_changes():
    record = run_record.describe_run()
    return record["commit"], record["dirty"]
