"""The table of families lists the families in the code, and its figures are measured."""

from pathlib import Path

import pytest

from benchmarks import families
from model.checkpoints import tables
from model.families.registry import FAMILIES

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "families.md"


def test_the_page_has_the_table_of_the_code():
    """All families in their order, with what the code says of each, and a figure in every cell."""
    _, block = PAGE.read_text(encoding="utf-8").split("<!-- families: begin -->")
    table = block.partition("<!-- families: end -->")[0].splitlines()
    head, _, *lines = [line for line in table if line.startswith("|")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert head.strip("| ").split(" | ") == [*families.COLUMNS]
    assert [row[:5] for row in rows] == [families.described(f) for f in FAMILIES.values()]
    for row in rows:
        *differences, speed = map(float, row[5:])
        assert len(differences) == 4
        assert max(differences) < 1e-4
        assert speed > 0


@pytest.mark.slow
def test_a_family_is_measured(tmp_path, monkeypatch):
    """Differences are at rounding level, and the packed graph takes measurable time."""
    monkeypatch.setattr(families, "ROUNDS", 1)
    row = families.measure("distilbert", tmp_path)
    assert max(row.hidden, row.packed, row.batch_difference, row.batch_difference_int8) < 1e-4
    assert row.speed > 0


def test_a_difference_is_reported(tmp_path):
    """A model that is not transformers' is far from it."""
    peer = families.save_peer("distilbert", tmp_path)
    model = families.reader.load_model(tmp_path)
    batch = families.sample(model)
    assert families.compare_hidden(model, peer, batch) < 1e-4
    model.encoder.layers[0].attention.output.bias.data[0] += 1
    assert families.compare_hidden(model, peer, batch) > 1e-2


def test_writing_between_the_marks(tmp_path):
    """Text outside the marks is kept. A file without marks is refused and unchanged."""
    begin, end = "<!-- a: begin -->", "<!-- a: end -->"
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    tables.write(page, "a", "new")
    assert page.read_text() == f"before\n{begin}\nnew\n{end}\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="occurs 0 times"):
        tables.write(page, "a", "new")
    assert page.read_text() == "no marks\n"
