"""OpenAI's JavaScript client, unmodified, in a page of another origin than the service's."""

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.e2e.client_calls.environments import COMMAND, JAVASCRIPT
from tests.e2e.conftest import serving
from tests.http_thread import serving_in_thread

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = Path("/usr/bin/chromium")
CALL = """async url => {
    const {default: OpenAI} = await import("/package/index.mjs");
    const options = {baseURL: url, apiKey: "any text", maxRetries: 0, dangerouslyAllowBrowser: true};
    const request = {model: "text-embedding-3-small", input: "Ada drew a comet."};
    return (await new OpenAI(options).embeddings.create(request)).data[0].embedding;
}"""
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed"),
    pytest.mark.skipif(not (JAVASCRIPT / "package").exists(), reason=f"run {COMMAND}"),
]


class Modules(SimpleHTTPRequestHandler):
    extensions_map: ClassVar = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript"}

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def origin():
    """A site with the modules of the client."""
    site = ThreadingHTTPServer(("127.0.0.1", 0), partial(Modules, directory=str(JAVASCRIPT)))
    with serving_in_thread(site):
        yield f"http://127.0.0.1:{site.server_port}"


def test_a_page_embeds(mini_bundle, origin):
    """The client's own headers pass the preflight, and a name of a model that it invents is answered."""
    options = ("--cors-origins", origin, "--unknown-model", "default")
    with serving(mini_bundle, *options) as server, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(origin)
        found = page.evaluate(CALL, f"{server.url}/v1")
        expected = server.answer("/embed", {"inputs": "Ada drew a comet."})["embeddings"][0]
        browser.close()
    assert found == pytest.approx(expected, abs=1e-6)
