"""An administrator's HTTP request becomes a validated command with the name of the administrator's key."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from service.engines.commands import ListModels, LoadModel, PromoteModel, RollBackModel, UnloadModel
from service.errors import BadBundle, Conflict
from service.keys import Key, digest, make_key


@pytest.fixture
async def admin(client_with: Callable[..., Any]) -> AsyncIterator[httpx.AsyncClient]:
    """An administrator, whose key is called ops."""
    key = make_key()
    async with client_with(keys={"ops": Key(sha256=digest(key).hex(), may=("admin",))}) as client:
        client.headers["Authorization"] = f"Bearer {key}"
        yield client


@pytest.mark.parametrize(
    ("method", "path", "body", "command"),
    [
        ("GET", "", None, ListModels()),
        ("POST", "", {"path": "a"}, LoadModel(path="a", by="ops")),
        (
            "POST",
            "",
            {"path": "a", "promote": False, "keep_old": False, "allow_new_embedding_space": True},
            LoadModel(
                path="a", by="ops", promote=False, keep_old=False, allow_new_embedding_space=True
            ),
        ),
        ("POST", "", {"path": "a", "aliases": ["x/y"]}, LoadModel(path="a", by="ops", aliases=["x/y"])),
        ("DELETE", "/BAAI/a@1", None, UnloadModel(model="BAAI/a@1", by="ops")),
        ("DELETE", "/a@1", None, UnloadModel(model="a@1", by="ops")),
        ("POST", "/a@1/promote", None, PromoteModel(model="a@1", by="ops")),
        (
            "POST",
            "/a@1/promote",
            {"keep_old": False, "max_changed": 0.1, "aliases": []},
            PromoteModel(model="a@1", by="ops", keep_old=False, max_changed=0.1, aliases=[]),
        ),
        ("POST", "/a/rollback", None, RollBackModel(model="a", by="ops")),
    ],
)  # fmt: skip
async def test_requests_become_commands(admin, engines, method, path, body, command):
    """Each request becomes one command with all its fields, and the response is the command's result."""
    content = {} if body is None else {"json": body}
    response = await admin.request(method, f"/admin/models{path}", **content)
    assert (200, {"did": command.name}) == (response.status_code, response.json())
    assert [command] == engines.commands


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {}, "path"),
        ("", {"path": 3}, "path"),
        ("", {"path": "a", "keep": True}, "keep"),
        ("", {"path": "a", "keep_old": 1}, "keep_old"),
        ("/a@1/promote", {"path": "a"}, "path"),
        ("", [], None),
    ],
)
async def test_what_makes_no_sense_is_refused(admin, engines, path, body, param):
    """Nothing is done of what is not understood."""
    response = await admin.post(f"/admin/models{path}", json=body)
    error = response.json()["error"]
    assert (422, "invalid", param) == (response.status_code, error["code"], error["param"])
    assert [] == engines.commands


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PATCH", "", "GET, HEAD, POST"),
        ("DELETE", "", "GET, HEAD, POST"),
        ("GET", "/a@1", "DELETE"),
        ("GET", "/a@1/promote", "POST"),
    ],
)
async def test_a_path_allows_what_any_of_its_routes_does(admin, method, path, allow):
    """Not only the first of them."""
    response = await admin.request(method, f"/admin/models{path}")
    assert (405, allow) == (response.status_code, response.headers["Allow"])
    assert f"{method} is not allowed here, but {allow}" == response.json()["error"]["message"]


async def in_chunks() -> AsyncIterator[bytes]:
    yield b'{"max_changed": 0.01}'


@pytest.mark.parametrize(
    "body", [b'{"max_changed": 0.01}', in_chunks()], ids=["length", "in-chunks"]
)
async def test_a_body_of_no_type_is_not_passed_over(admin, engines, body):
    """It may hold what keeps a version from being promoted."""
    response = await admin.post("/admin/models/a@1/promote", content=body)
    error = response.json()["error"]
    assert (415, "unsupported_media_type") == (response.status_code, error["code"])
    assert [] == engines.commands


@pytest.mark.parametrize("error", [Conflict("no"), BadBundle("no")], ids=["conflict", "bad"])
async def test_refusals_come_through(admin, engine, error):
    """With their status, code and reason."""
    engine.error = error
    response = await admin.post("/admin/models", json={"path": "a"})
    assert (error.status, error.body) == (response.status_code, response.json())


async def test_without_keys_there_is_no_administration(client, engines):
    """Without keys, every client may send inference requests, and none may change the models."""
    response = await client.post("/admin/models", json={"path": "a"})
    assert (403, "forbidden") == (response.status_code, response.json()["error"]["code"])
    assert [] == engines.commands
