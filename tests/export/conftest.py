"""Where an export of a test goes, and where it may leave nothing."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files go where a test can see whether they went."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The path of an export in an otherwise empty folder."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "tiny"
