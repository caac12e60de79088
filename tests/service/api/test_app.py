import asyncio
import re
import subprocess
import sys
from contextlib import asynccontextmanager, suppress

import pytest
from fastapi import FastAPI
from starlette.types import Message

from service.api.app import PAGES, create_app
from service.core.bundle import BundleError
from service.observability.metrics import Metrics
from service.settings import Settings
from service.shutdown import Stage
from tests.served import client_of, living
from tests.service.fakes import FakeEngine

PAGE_FILES = sorted(path.name for path in PAGES.iterdir() if path.is_file())


async def live(app: FastAPI) -> list[Message]:
    """What an app answers to the lifespan protocol, from startup to shutdown or failure."""
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    answers: list[Message] = []

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        answers.append(message)

    with suppress(BundleError):
        await app({"type": "lifespan", "state": {}}, receive, send)
    return answers


async def test_a_life_opens_and_closes_the_engines(engines, app):
    """The engines are open between startup and shutdown."""
    answers = await live(app)
    assert [answer["type"] for answer in answers] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    assert engines.closed


async def test_what_was_opened_is_logged(app, lines):
    """The log names each model and what it runs on."""
    await live(app)
    opened = {"event": "opened", "log_level": "info", "model": "tiny@1"}
    assert lines == [{**opened, "runs": FakeEngine.fingerprint}]


async def test_a_failed_start_is_logged_in_one_line():
    """The server gets the reason, without a traceback."""

    @asynccontextmanager
    async def fail(_):
        raise BundleError("bundles/x", "the bundle directory does not exist")
        yield

    assert await live(create_app(Settings(), fail, Metrics())) == [
        {
            "type": "lifespan.startup.failed",
            "message": "cannot start: bundles/x: the bundle directory does not exist",
        }
    ]


async def test_it_is_not_ready_before_it_starts(app):
    """Alive at once, ready only with its engines."""
    async with client_of(app) as client:
        assert (await client.get("/health/live")).status_code == 200
        ready = await client.get("/health/ready")
        classify = await client.post("/classify", json={"inputs": "a"})
    for response in (ready, classify):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")


async def test_it_is_unready_from_the_signal_on(client, app):
    """While it drains, readiness is 503 and requests are answered."""
    app.state.service.shutdown.advance(Stage.DRAINING)
    ready = await client.get("/health/ready")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "draining")
    assert ready.headers["Retry-After"] == "1"
    assert (await client.post("/classify", json={"inputs": "a"})).status_code == 200


async def test_a_request_under_way_is_answered_while_draining(client, app, engine):
    """What was accepted is answered."""
    engine.hold = asyncio.Event()
    asking = asyncio.create_task(client.post("/classify", json={"inputs": "a"}))
    await engine.reached.wait()
    app.state.service.shutdown.advance(Stage.DRAINING)
    engine.hold.set()
    assert (await asking).status_code == 200


@pytest.mark.parametrize("origins", [(), ("http://page",)], ids=["here", "elsewhere, too"])
async def test_every_answer_passes_the_middleware(engines, origins):
    """Answers and refusals of tasks carry the request's id, and permit the page of an allowed origin."""
    app = create_app(Settings(cors_origins=origins), engines.open, Metrics())
    async with living(app) as client:
        asked = {"headers": {"Origin": "http://page"}, "json": {"inputs": "a"}}
        answers = [await client.post(path, **asked) for path in ("/classify", "/embed")]
        answers.append(await client.post("/classify", **{**asked, "json": {}}))
        assert [200, 200, 422] == [answer.status_code for answer in answers]
        for answer in answers:
            assert answer.headers["X-Request-Id"]
            assert ("Access-Control-Allow-Origin" in answer.headers) == bool(origins)
        assert 405 == (await client.get("/classify")).status_code
        assert 404 == (await client.post("/classify/", json={})).status_code


@pytest.mark.parametrize("path", ["/nothing", "/classify/", "/static/nothing", "/static/../app.py"])
async def test_unknown_paths_are_not_found(client, path):
    """There are no redirects and no other shapes of error."""
    response = await client.get(path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/classify", "POST"),
        ("OPTIONS", "/embed", "POST"),
        ("HEAD", "/qa", "POST"),
        ("POST", "/health/live", "GET, HEAD"),
        ("DELETE", "/", "GET, HEAD"),
        ("POST", "/static/app.js", "GET, HEAD"),
    ],
)
async def test_other_methods_are_not_allowed(client, method, path, allow):
    """A 405 names what is allowed."""
    response = await client.request(method, path)
    assert (response.status_code, response.headers["Allow"]) == (405, allow)
    assert method == "HEAD" or response.json()["error"]["code"] == "method_not_allowed"


SWAGGER_UI = ("swagger-ui-bundle.js", "swagger-ui.css")
STATIC = [f"/static/{name}" for name in (*PAGE_FILES, *SWAGGER_UI)]


async def test_only_the_documentation_page_may_set_styles_inline(client):
    """Swagger UI needs inline styles and data URLs of images; every other page is stricter."""
    policies = {
        path: (await client.get(path)).headers["Content-Security-Policy"]
        for path in ("/", "/docs", *STATIC)
    }

    assert {"/docs"} == {path for path, policy in policies.items() if "unsafe" in policy}
    assert {"/docs"} == {path for path, policy in policies.items() if "data:" in policy}
    assert {"/docs"} == {path for path, policy in policies.items() if "trusted-types" not in policy}
    assert "script-src 'self';" in policies["/docs"]


@pytest.mark.parametrize("path", ["/", "/docs", *STATIC])
async def test_pages_may_load_nothing_from_outside(client, path):
    """The service serves each page, and the page may load files from its own origin only."""
    response = await client.get(path)
    assert response.status_code == 200
    policy = response.headers["Content-Security-Policy"].split("; ")
    assert "default-src 'none'" in policy
    assert {part.split()[1] for part in policy if "-src" in part} == {"'none'", "'self'"}
    assert not [part for part in policy if re.search(r"https?:|\*", part)]
    assert "frame-ancestors 'none'" in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert response.headers["Cache-Control"] == "no-cache"
    for part in ("zz", "bytes=0-3", "bytes=999999999-"):  # of which nothing has to be known
        again = await client.get(path, headers={"Range": part})
        assert (again.status_code, again.content) == (200, response.content)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/../../service/api/app.py",
        "/static//etc/passwd",
        "/static/..\\app.py",
        "/static/..",
        "/static/",
        "/static/app.js\0.png",
        f"/static/{'a' * 300}",
    ],
)
async def test_no_path_leads_out_of_the_pages(app, path):
    """No path leads out, however it is written. Client libraries normalize paths, so these go straight to the app."""
    assert await get_status(app, path) == 404


async def test_no_link_leads_out_of_the_pages(app, monkeypatch, tmp_path):
    """A symbolic link that leads elsewhere is not followed."""
    pages = tmp_path / "pages"
    pages.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (pages / "plain.txt").write_text("a page")
    (pages / "link.txt").symlink_to(tmp_path / "secret.txt")
    (route,) = (route for route in app.routes if getattr(route, "name", "") == "static")
    monkeypatch.setattr(route.app, "all_directories", [str(pages)])
    assert await get_status(app, "/static/plain.txt") == 200
    assert await get_status(app, "/static/link.txt") == 404


async def get_status(app: FastAPI, path: str) -> int:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    await app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


@pytest.mark.parametrize("name", [name for name in PAGE_FILES if name.endswith(".html")])
def test_pages_refer_to_nothing_outside(name):
    """Links are relative, so that a page also works behind a prefix."""
    text = (PAGES / name).read_text()
    links = re.findall(r'(?:href|src)="([^"#]*)"', text)
    assert links
    assert not [link for link in links if re.match(r"[a-z]+:|/", link)]


async def test_an_unchanged_page_is_not_sent_again(client):
    """A browser with the current page gets 304."""
    etag = (await client.get("/docs")).headers["ETag"]
    assert (await client.get("/docs", headers={"If-None-Match": etag})).status_code == 304


def test_serving_needs_no_torch():
    """Importing the service loads nothing of the training side."""
    script = (
        "import sys, service.api.app, service.__main__\n"
        "print({'torch', 'model', 'export', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "set()"


ORIGIN = "https://app.example.org"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    "Access-Control-Request-Private-Network": "true",
}
KEYS = {"search": {"sha256": "a" * 64}}


@pytest.mark.parametrize("settings", [{}, {"keys": KEYS}])
async def test_pages_of_others_may_ask_nothing(client_with, settings):
    """Unless origins are named, no answer says that one may."""
    async with client_with(**settings) as client:
        answers = [
            await client.options("/embed", headers=PREFLIGHT),
            await client.get("/health/live", headers={"Origin": ORIGIN}),
            await client.post("/embed", json={"inputs": "a"}, headers={"Origin": ORIGIN}),
        ]
    told = {name for answer in answers for name in answer.headers}
    assert not {name for name in told if name.startswith("access-control-")}


async def test_pages_of_named_origins_may_ask(client_with):
    """Preflights need no key, and a page can read the responses, also refusals."""
    async with client_with(cors_origins=[ORIGIN], keys=KEYS) as client:
        preflight = await client.options("/embed", headers=PREFLIGHT)
        refused = await client.post("/embed", json={"inputs": "a"}, headers={"Origin": ORIGIN})
        other = await client.options("/embed", headers=PREFLIGHT | {"Origin": "https://evil.org"})
        elsewhere = await client.get("/health/live", headers={"Origin": "https://evil.org"})
    assert preflight.status_code == 200
    requested = PREFLIGHT["Access-Control-Request-Headers"]
    assert requested == preflight.headers["Access-Control-Allow-Headers"]
    assert "true" == preflight.headers["Access-Control-Allow-Private-Network"]
    assert refused.status_code == 401
    for answer in (preflight, refused):
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "Access-Control-Allow-Credentials" not in answer.headers
    exposed = refused.headers["Access-Control-Expose-Headers"].split(", ")
    assert {"Accept-Encoding", "Allow", "Retry-After", "WWW-Authenticate"} <= {*exposed}
    for answer in (other, elsewhere):
        assert "Access-Control-Allow-Origin" not in answer.headers
