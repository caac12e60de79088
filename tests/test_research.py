"""The entries of research/, and their index."""

import pytest

from research import index


def test_index_is_current():
    """research/README.md lists every entry: `python -m research.index` renews it."""
    assert index.INDEX.read_text(encoding="utf-8") == index.render()


def test_superseding_entries_exist():
    """An entry that another one supersedes names a file of research/ or of benchmarks/results."""
    later = {entry.fields["superseded_by"].split()[0].rstrip(":") for entry in index.read_entries()}
    later.discard("none")

    root = index.HERE.parent
    missing = [
        name
        for name in later
        if not (index.HERE / f"{name}.md").exists() and not (root / name).exists()
    ]
    assert [] == missing
    assert len(later) > 5


def test_an_entry_without_a_field_is_refused(tmp_path):
    """A header needs every field."""
    path = tmp_path / "2026-01-01-nothing.md"
    path.write_text('---\nquestion: "Why?"\n---\n\n# Nothing\n')

    with pytest.raises(ValueError, match=r"nothing\.md: expected the fields question, "):
        index.read_entry(path)
