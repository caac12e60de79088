"""The table of models with real weights, without a hub."""

import json

from benchmarks.real_models import COLUMNS, Row, measure, read_names, table


def test_names():
    """Names of the hub have a revision, and stand in the page of models."""
    names = read_names()
    assert all("@" in name for name in names if ":" not in name)
    with open("docs/reference/models.md", encoding="utf-8") as file:
        page = file.read()
    for name in names:
        short = name.partition("@")[0].rpartition("/")[2]
        assert ":" in name or short in page, name


def test_a_refusal_is_a_row(tmp_path):
    """An architecture that export refuses by name, and a directory that is missing."""
    config = {"model_type": "embedding_gemma2", "architectures": ["EmbeddingGemma2Model"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    row = measure(str(tmp_path), tmp_path / "bundle", [])
    assert row.state.startswith("refused: ")
    assert "embedding_gemma2" in row.state
    assert measure(str(tmp_path / "none"), tmp_path / "bundle", []).state.startswith("not read: ")


def test_table():
    rows = {"a": Row("embedding", "served", 2e-7, 0.98), "b": Row("", "refused: x | y")}
    lines = table(rows).splitlines()
    assert "| `a` | embedding | served | 2e-07 | 0.980 |" == lines[2]
    assert "refused: x / y |  |  |" in lines[3]
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 1}
