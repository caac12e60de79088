"""The page of performance, held against the result files that it is made from."""

import json

from PIL import Image

from benchmarks import performance_page


def test_page_is_current():
    """The figures on the page are those of the result files: `python -m benchmarks.performance_page`."""
    page = performance_page.PAGE.read_text(encoding="utf-8")

    assert page == performance_page.render(page)
    assert all(content() in page for content in performance_page.BLOCKS.values())


def test_chart_is_current():
    """The chart was drawn from the result file that the table shows."""
    with Image.open(performance_page.CHART) as chart:
        assert performance_page.source_hash() == chart.info["Source"]


def test_another_result_changes_the_page(tmp_path, monkeypatch):
    """A figure of a result file appears on the page."""
    for name in vars(performance_page).values():
        if isinstance(name, str) and name.endswith(".json"):
            result = performance_page.read(name)
            (tmp_path / name).write_text(json.dumps(result))
    result = performance_page.read(performance_page.SERVERS)
    result["results"][0]["servers"][0]["closed"]["32"]["rate"] = 4321.0
    (tmp_path / performance_page.SERVERS).write_text(json.dumps(result))
    monkeypatch.setattr(performance_page, "RESULTS", tmp_path)

    page = performance_page.PAGE.read_text(encoding="utf-8")
    assert "| 4321 |" not in page
    assert "| 4321 |" in performance_page.render(page)


def test_chart_of_measured_servers(tmp_path):
    """A server that was not measured has no line, and the picture names its source."""
    load = {"rate": 3.0, "p99_ms": 4.0}
    rows = [
        {"server": "quartet fp32", "closed": {"8": load, "1": load}},
        {"server": "absent", "closed": {}, "skipped": "not here"},
    ]
    performance_page.draw(rows, tmp_path / "chart.png", {"Source": "x"})
    with Image.open(tmp_path / "chart.png") as chart:
        assert chart.info["Source"] == "x"
