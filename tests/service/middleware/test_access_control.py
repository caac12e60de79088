from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from service.api.app import PAGES, create_app
from service.errors import QuartetError, RateLimited
from service.keys import Key, digest
from service.middleware import access_control
from service.middleware.request_context import RequestContext
from service.observability.metrics import Metrics
from service.settings import Settings

BODY = {"inputs": "a text"}
TASKS = ["/classify", "/ner", "/qa", "/embed"]
OPEN = ["/", "/docs", "/live", "/openapi.json", "/health/live", "/health/ready", "/static/app.js"]
CLOSED = ["/models", "/metrics", "/live/events", "/nothing", "/static", "//models", "/Models"]

Connect = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


def plain(name: str) -> str:
    return f"quartet_{name:_>43}"


def kept(name: str, **fields: Any) -> Key:
    return Key(sha256=digest(plain(name)).hex(), **fields)


def bearing(name: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {plain(name)}", **headers}


KEYS = {
    "search": kept("search"),
    "nightly": kept("nightly", priority="bulk"),
    "prometheus": kept("prometheus", may=["metrics"]),
    "ops": kept("ops", may=["admin", "metrics"]),
}


@pytest.fixture
async def locked(client_with: Connect) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service with keys."""
    async with client_with(keys=KEYS) as client:
        yield client


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("path", OPEN)
async def test_health_and_pages_are_open(locked, path):
    """Orchestrators and browsers have no key."""
    assert (await locked.get(path)).status_code == 200


def test_every_file_of_the_pages_is_open():
    """The pages can load what they are made of."""
    assert all(
        f"/static/{path.name}".startswith(access_control.OPEN_BELOW) for path in PAGES.iterdir()
    )


@pytest.mark.parametrize("path", CLOSED + TASKS)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
async def test_all_else_needs_a_key(locked, method, path):
    """Whatever it is, and whether or not it is there."""
    response = await locked.request(method, f"http://quartet{path}")
    assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        plain("search"),
        f"Basic {plain('search')}",
        f"Bearer {plain('search')[:-1]}",
        f"Bearer {plain('search')} {plain('search')}",
        f"Bearer {KEYS['search'].sha256}",
        "Bearer sch\xfcssel",
    ],
)
async def test_other_keys_are_refused(locked, authorization):
    """A key is known or it is not; its hash is no key."""
    header = {b"Authorization": authorization.encode("latin-1")}
    assert code(await locked.post("/embed", json=BODY, headers=header)) == (401, "unauthorized")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
async def test_a_known_key_is_let_in(locked, scheme):
    """The scheme may be written in any case."""
    headers = {"Authorization": f"{scheme} {plain('search')}"}
    assert (await locked.post("/embed", json=BODY, headers=headers)).status_code == 200


async def test_a_refused_body_is_not_read(engines):
    """The answer is there before the first byte of the body."""
    app = create_app(Settings(keys=KEYS), engines.open, Metrics())
    sent = []

    async def receive():
        raise AssertionError("the body was asked for")

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/embed", "query_string": b"", "headers": []}
    await app(scope, receive, send)
    assert sent[0]["status"] == 401


@pytest.mark.parametrize(
    ("name", "method", "path", "status"),
    [
        ("search", "POST", "/embed", 200),
        ("search", "GET", "/models", 200),
        ("search", "GET", "/nothing", 404),
        ("search", "GET", "/metrics", 403),
        ("search", "GET", "/live/events", 403),
        ("search", "GET", "/native/live/events", 403),
        ("search", "GET", "/admin/bundles", 403),
        ("search", "GET", "/admin", 403),
        ("prometheus", "GET", "/metrics", 200),
        ("prometheus", "POST", "/embed", 403),
        ("ops", "GET", "/admin/nothing", 404),
        ("ops", "GET", "/metrics", 200),
        ("ops", "POST", "/embed", 403),
        ("ops", "GET", "/administration", 403),
    ],
)
async def test_a_key_is_for_what_it_says(locked, name, method, path, status):
    """Administration, metrics and inference are apart."""
    body = BODY if method == "POST" else None
    response = await locked.request(method, path, json=body, headers=bearing(name))
    assert response.status_code == status
    assert status != 403 or code(response) == (403, "forbidden")


@pytest.mark.parametrize("path", ["/admin", "/admin/bundles"])
async def test_without_keys_administration_is_refused(client, path):
    """What changes the service is never open to all."""
    response = await client.post(path, json={})
    assert code(response) == (403, "forbidden")
    assert "no key is configured" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "asked", "priority"),
    [
        ("search", None, 0),
        ("search", "interactive", 0),
        ("search", "bulk", 1),
        ("search", "Bulk", 1),
        ("nightly", None, 1),
        ("nightly", "bulk", 1),
        ("nightly", "interactive", 1),
    ],
)
async def test_a_request_may_only_lower_its_priority(locked, engine, name, asked, priority):
    """The key sets the class; the engine gets the class and the tenant."""
    headers = bearing(name) | ({"X-Priority": asked} if asked else {})
    await locked.post("/embed", json=BODY, headers=headers)
    assert (engine.ticket.tenant, engine.ticket.priority) == (name, priority)


async def test_without_keys_requests_have_no_tenant(client, engine):
    """They are interactive unless their header has another priority."""
    await client.post("/embed", json=BODY)
    assert (engine.ticket.tenant, engine.ticket.priority) == ("", 0)
    await client.post("/embed", json=BODY, headers={"X-Priority": "bulk"})
    assert (engine.ticket.tenant, engine.ticket.priority) == ("", 1)


async def test_an_unknown_priority_is_invalid(client):
    """The error names the words that there are."""
    response = await client.post("/embed", json=BODY, headers={"X-Priority": "urgent"})
    error = response.json()["error"]
    assert (code(response), error["param"]) == ((422, "invalid"), "X-Priority")
    assert "interactive or bulk" in error["message"]


@pytest.mark.parametrize("path", ["/", "/docs", "/health/live", "/health/ready"])
async def test_what_is_open_has_no_priority(client, locked, path):
    """With keys or without, these routes ignore the priority header."""
    for each in (client, locked):
        assert 200 == (await each.get(path, headers={"X-Priority": "urgent"})).status_code


async def test_a_request_above_its_rate_gets_retry_after(client_with):
    """One key's rate is no concern of another's."""
    keys = {"slow": kept("slow", requests_per_minute=2), "search": KEYS["search"]}
    async with client_with(keys=keys) as client:
        answers = [
            await client.post("/embed", json=BODY, headers=bearing("slow")) for _ in range(3)
        ]
        other = await client.post("/embed", json=BODY, headers=bearing("search"))
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert code(answers[2]) == (429, "rate_limited")
    assert 1 <= int(answers[2].headers["Retry-After"]) <= 30
    assert other.status_code == 200


async def test_tokens_are_charged_when_the_answer_is_there(client_with):
    """The engine says 7 tokens; what is above the rate has to be waited for."""
    keys = {"slow": kept("slow", tokens_per_minute=12)}
    async with client_with(keys=keys) as client:
        answers = [
            await client.post("/embed", json=BODY, headers=bearing("slow")) for _ in range(3)
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 10 <= int(answers[2].headers["Retry-After"]) <= 15  # 12 - 14, up to 1, at 5 s a token


def test_rates_are_divided_among_processes():
    """Each of several HTTP processes lets its part through."""
    settings = Settings(keys={"slow": kept("slow", requests_per_minute=8)}, http_workers=4)
    (check,) = access_control.access_checks(settings)
    scope, headers = {"path": "/embed"}, {"authorization": bearing("slow")["Authorization"]}
    check(scope, RequestContext("a", 0.0, headers))
    check(scope, RequestContext("b", 0.0, headers))
    with pytest.raises(RateLimited):
        check(scope, RequestContext("c", 0.0, headers))


def test_keys_may_be_replaced():
    """A key that came is let in and one that went is not; what is left of an unchanged rate stays as it was."""

    def outcome(name):
        headers = {"authorization": bearing(name)["Authorization"]}
        try:
            check({"path": "/embed"}, RequestContext("a", 0.0, headers))
        except QuartetError as error:
            return error.code
        return "ok"

    slow = kept("slow", requests_per_minute=1)
    keys = {"slow": slow, "raised": kept("raised", requests_per_minute=1), "gone": kept("gone")}
    (check,) = access_control.access_checks(Settings(keys=keys))
    assert isinstance(check, access_control.KeyCheck)
    assert ["ok"] * 3 == [outcome(name) for name in keys]

    check.replace(
        {
            "slow": kept("rotated", requests_per_minute=1),
            "raised": kept("raised", requests_per_minute=2),
            "new": kept("new"),
        }
    )
    expected = {
        "slow": "unauthorized",
        "rotated": "rate_limited",
        "raised": "ok",
        "gone": "unauthorized",
        "new": "ok",
    }
    assert expected == {name: outcome(name) for name in expected}


@pytest.mark.parametrize("keys", [{}, KEYS])
@pytest.mark.parametrize(
    ("port", "path", "status"),
    [
        (9100, "/metrics", 200),
        (9100, "/health/ready", 200),
        (9100, "/live", 200),
        (9100, "/static/live.js", 200),
        (9100, "/models", 404),
        (9100, "/", 404),
        (9100, "/admin", 404),
        (9100, "/docs", 404),
        (8000, "/metrics", 404),
        (8000, "/live", 404),
        (8000, "/live/events", 404),
        (8000, "/health/ready", 200),
        (8000, "/docs", 200),
    ],
)
async def test_metrics_may_have_a_port_of_their_own(client_with, keys, port, path, status):
    """The metrics need no key on their own port, are on no other, and share it with health only."""
    async with client_with(metrics_port=9100, keys=keys) as client:
        assert (await client.get(f"http://quartet:{port}{path}")).status_code == status


async def test_a_port_for_metrics_opens_nothing_else(client_with):
    """On the other port, a key is needed as before, and one for metrics has nowhere to go."""
    async with client_with(metrics_port=9100, keys=KEYS) as client:
        url = "http://quartet:8000/models"
        assert (await client.get(url)).status_code == 401
        assert (await client.get(url, headers=bearing("search"))).status_code == 200
        headers = bearing("prometheus")
        assert (await client.get("http://quartet:8000/metrics", headers=headers)).status_code == 404


async def test_the_line_names_the_tenant_and_never_the_key(locked, lines):
    """The log says whose a request was, also one that was refused."""
    await locked.post("/embed", json=BODY, headers=bearing("search"))
    await locked.post("/embed", json=BODY, headers=bearing("ops"))
    await locked.post("/embed", json=BODY, headers={"Authorization": "Bearer guessed"})
    requests = [line for line in lines if line["event"] == "request"]
    assert [(line["tenant"], line["status"]) for line in requests] == [
        ("search", 200),
        ("ops", 403),
        ("", 401),
    ]
    assert not [secret for secret in (plain("search"), "guessed") if secret in str(lines)]


def test_keys_that_were_not_read_keep_the_service_from_starting(tmp_path):
    """A mistake of ours must not leave a service open that should be closed."""
    with pytest.raises(AssertionError, match="our bug"):
        access_control.access_checks(Settings(api_key="0123456789abcdef"))
    with pytest.raises(AssertionError, match="our bug"):
        access_control.access_checks(Settings(api_keys=tmp_path))


LOCAL = [
    "127.0.0.1:8000",
    "[::1]:80",
    "10.1.2.3",
    "localhost",
    "LOCALHOST:8000",
    "a.localhost",
    "quartet:8000",
]
FOREIGN = [
    "a.org",
    "a.org:8000",
    "a.org.",
    "127.0.0.1.a.org",
    "localhost.a.org",
    "[::1].a.org",
    "a.org:8000x",
]


@pytest.mark.parametrize("path", ["/embed", "/health/live", "/metrics", "/", "/tei/embed"])
async def test_pages_of_other_names_are_refused(client_with, path):
    """Without keys on a loopback address, a browser must not reach the service under the name of a page."""
    async with client_with() as client:
        for host in FOREIGN:
            response = await client.post(path, json=BODY, headers={"Host": host})
            assert response.status_code == 403, host
            assert "allowed_hosts" in response.text
        for host in LOCAL:
            response = await client.post(path, json=BODY, headers={"Host": host})
            assert response.status_code != 403, host


@pytest.mark.parametrize(
    "settings", [{"host": "0.0.0.0"}, {"keys": KEYS}, {"uds": "q.sock"}, {"allowed_hosts": ["*"]}]
)
async def test_other_services_have_any_name(client_with, settings):
    """With keys, on other addresses and behind a proxy's socket, the service may have a public name."""
    async with client_with(**settings) as client:
        assert (await client.get("/health/live", headers={"Host": "a.org"})).status_code == 200


@pytest.mark.parametrize("settings", [{}, {"host": "0.0.0.0"}, {"keys": KEYS}])
async def test_listed_names_are_allowed(client_with, settings):
    """A list holds at every address, and with keys."""
    async with client_with(**settings, allowed_hosts="A.org, *.b.org") as client:
        for host, status in [
            *(("a.ORG:80", 200), ("c.b.org", 200), ("127.0.0.1", 200)),
            *(("b.org", 403), ("c.a.org", 403), ("cb.org", 403)),
        ]:
            response = await client.get("/health/live", headers={"Host": host})
            assert response.status_code == status, host
