"""The documentation as a site: it builds without a warning, and needs no other host."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=[\"']?([^\"'\s>]+)")
CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The directory of the built site."""
    folder = tmp_path_factory.mktemp("site")
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == run.returncode, run.stderr
    assert "WARNING" not in run.stderr
    return folder


def test_every_page_is_in_the_site(site):
    """Strict mode found no warning, and each page of docs/ became one of the site."""
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    indexes = {page.with_name("index.html") for page in pages if page.stem == "README"}
    names = indexes | {page.with_suffix(".html") for page in pages if page.stem != "README"}

    assert names - built == set()
    assert "service.core.bundle.load" in (site / "reference" / "python_api.html").read_text("utf-8")
    assert "<svg" in (site / "explanation" / "architecture.html").read_text("utf-8")


def test_site_loads_nothing_from_another_host(site):
    """Scripts, styles, pictures and fonts are files of the site."""
    loaded = {
        target
        for path in site.rglob("*.html")
        for target in LOADED.findall(path.read_text("utf-8"))
    }

    assert [] == [target for target in loaded if re.match(r"(?:https?:)?//", target)]
    assert len(loaded) > 10


@pytest.mark.e2e
def test_search_works_from_disk(site):
    """A browser without network finds a page by its words, and asks no other host."""
    if not CHROMIUM.exists():
        pytest.skip("needs Chromium at /usr/bin/chromium")
    from playwright.sync_api import sync_playwright

    requests = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.click("input[name=query]")
        page.keyboard.type("batch-invariant")
        results = page.locator(".md-search-result__item", has_text="Batch invariance")
        results.first.wait_for(state="attached")
        browser.close()
    assert [] == [url for url in requests if not url.startswith(("file:", "data:"))]
