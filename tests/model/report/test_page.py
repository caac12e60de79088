"""A page is one file that loads nothing, shows texts as they are, and keeps its sections for later additions."""

import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.figure
import pytest
from playwright.sync_api import sync_playwright

from model.report import page
from model.report.page import Figure, Report, Section

EXTERNAL = re.compile(
    r"""(?:src|href)\s*=\s*["'](?!data:)|url\(|@import|<script|<link|<iframe""", re.IGNORECASE
)
CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = "<script>alert(1)</script> & \"x\" 'y' </td> \ud800"


class Text(HTMLParser):
    """The text of a page, and its tags."""

    def __init__(self, document: str):
        super().__init__()
        self.parts: list[str] = []
        self.tags: set[str] = set()
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def test_texts_are_escaped(tmp_path):
    """Titles, cells, facts, remarks and descriptions are text, whatever they contain."""
    figure = matplotlib.figure.Figure(figsize=(1, 1))
    body = "".join(
        [
            page.table([HOSTILE], [[HOSTILE], [Figure(HOSTILE, 0.5)]], [0]),
            page.facts({HOSTILE: HOSTILE}),
            page.note(HOSTILE),
            page.figures({HOSTILE: "<svg></svg>"}),
            page.picture(figure, HOSTILE),
        ]
    )
    Report(HOSTILE, [Section("a", HOSTILE, body)]).write(tmp_path)

    document = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = Text(document)
    assert "script" not in found.tags
    assert HOSTILE.replace("\ud800", "?") in "".join(found.parts)
    assert not EXTERNAL.search(document)


def test_sections_are_added_later(tmp_path):
    """A stored report gets another section, or a new one in the place of the old."""
    report = Report("run")
    report.add(Section("curves", "Curves", "one"))
    report.add(Section("export", "Export", "two"))
    report.write(tmp_path)

    later = Report.read(tmp_path)
    assert report == later
    later.add(Section("curves", "Curves", "three"))
    later.add(Section("more", "More", "four"))
    later.write(tmp_path)

    assert ["three", "two", "four"] == [each.body for each in Report.read(tmp_path).sections]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"title": "a", "sections": [{}]}'])
def test_no_report(tmp_path, content):
    """A directory without a report, or with a damaged one, has none."""
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    assert Report.read(tmp_path) is None


def test_numbers_are_aligned():
    """A column of numbers is one; a column with a text is not."""
    found = page.table(["a", "b"], [[1, "x"], [12345, 2.0]])
    assert '<td class="number">12,345</td><td>2.0000</td>' in found


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed")
def test_a_page_fits_a_phone(tmp_path):
    """Nothing is wider than 390 pixels but tables, which scroll by themselves."""
    report = Report(f"Training {'runs/of-a-long-name/' * 5}")
    body = page.table(["label", *"abcdefgh"], [["one of many words", *[0.5] * 8]] * 3)
    report.add(
        Section("wide", "x" * 80, body + page.figures({"y" * 80: "<svg width='900'></svg>"}))
    )
    report.write(tmp_path)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 390, "height": 800})
        view.goto((tmp_path / page.PAGE).as_uri())
        assert 390 == view.evaluate("document.documentElement.scrollWidth")
        browser.close()
