"""The Open Inference Protocol over HTTP, where tritonclient does not reach."""

import json
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.keys import make_key, record
from tests.e2e.client_calls.records import TEXTS
from tests.e2e.conftest import Server, serving

pytestmark = pytest.mark.e2e

INFER = "/v2/models/tasks/infer"


@pytest.fixture(scope="module")
def server(tasks_bundle: Path) -> Iterator[Server]:
    with serving(tasks_bundle, "--max-inputs-per-request", 8) as running:
        yield running


def text(values: object = TEXTS, shape: object = None, **fields: object) -> dict[str, object]:
    """Return a tensor of texts."""
    size = len(values) if isinstance(values, list) else 1
    tensor = {"name": "text", "datatype": "BYTES", "shape": shape or [size], "data": values}
    return tensor | fields


def outputs(*names: str) -> list[dict[str, object]]:
    return [{"name": name} for name in names]


def test_json(server):
    """Tensors without binary data are JSON; the response repeats the id, and has the outputs in their order."""
    body = {"id": "7", "inputs": [text()], "outputs": outputs("entities", "embeddings")}
    found = server.answer(INFER, body)
    assert ("tasks", "1", "7") == (found["model_name"], found["model_version"], found["id"])
    entities, vectors = found["outputs"]
    assert ("entities", "BYTES", [2]) == (entities["name"], entities["datatype"], entities["shape"])
    assert server.answer("/ner", {"inputs": TEXTS})["results"] == [
        *map(json.loads, entities["data"])
    ]
    expected = server.answer("/embed", {"inputs": TEXTS})["embeddings"]
    assert ("embeddings", "FP32", [2, 64]) == tuple(
        vectors[key] for key in ("name", "datatype", "shape")
    )
    np.testing.assert_allclose(np.reshape(vectors["data"], [2, 64]), expected, atol=1e-6)


def test_shapes(server):
    """Texts may be a column, as a list of lists, too."""
    expected = server.answer(INFER, {"inputs": [text()], "outputs": outputs("embeddings")})
    for data in (TEXTS, [[one] for one in TEXTS]):
        body = {"inputs": [text(data, [2, 1])], "outputs": outputs("embeddings")}
        found, known = (one["outputs"][0]["data"] for one in (server.answer(INFER, body), expected))
        np.testing.assert_allclose(found, known, atol=1e-6)


def test_long_texts(server):
    """A long text is read in windows, cut, or refused."""
    long = " ".join(TEXTS * 100)
    for truncate in ("window", True, None):
        body = {"inputs": [text([long])], "parameters": {"truncate": truncate}}
        found = server.answer(INFER, body | {"outputs": outputs("embeddings")})["outputs"][0]
        expected = server.answer("/embed", {"inputs": long, "truncate": truncate or "window"})
        np.testing.assert_allclose(found["data"], expected["embeddings"][0], atol=1e-6)
    body = {"inputs": [text([long])], "parameters": {"truncate": False}}
    refused = server.post(INFER, body)
    assert 400 == refused.status
    assert "text[0]" in refused.json()["error"]


def test_large_tensors(server):
    """A tensor with far more elements than a request may have is refused before they are read."""
    data = elements(b"") * 2_000_000
    for shape in ([1], [2_000_000]):
        began = time.perf_counter()
        refused = post_binary(server, raw(data, shape=shape), data)
        assert refused.status in (400, 413)
        assert time.perf_counter() - began < 10


def test_timeout(server):
    """`timeout` ends the request early."""
    refused = server.post(INFER, {"inputs": [text()], "parameters": {"timeout": 1}})
    assert refused.status in (429, 504)


def binary(header: Any, data: bytes, length: str | None = None) -> tuple[bytes, dict[str, str]]:
    own = json.dumps(header).encode()
    return own + data, {"Inference-Header-Content-Length": length or str(len(own))}


def post_binary(server: Server, header: Any, data: bytes, length: str | None = None) -> Any:
    body, headers = binary(header, data, length)
    return server.send("POST", INFER, body, {"Content-Type": "application/octet-stream"} | headers)


def elements(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def raw(data: bytes, **fields: object) -> dict[str, object]:
    tensor = text() | {"parameters": {"binary_data_size": len(data)}} | fields
    return {"inputs": [{key: value for key, value in tensor.items() if key != "data"}]}


def test_binary(server):
    """Some outputs can be binary data, and others JSON."""
    data = elements(*(one.encode() for one in TEXTS))
    wanted = [{"name": "embeddings", "parameters": {"binary_data": True}}, {"name": "topics"}]
    found = post_binary(server, raw(data) | {"outputs": wanted}, data)
    size = int(found.headers["inference-header-content-length"])
    vectors, topics = json.loads(found.body[:size])["outputs"]
    assert {"binary_data_size": 2 * 64 * 4} == vectors["parameters"]
    expected = server.answer("/embed", {"inputs": TEXTS})["embeddings"]
    np.testing.assert_allclose(
        np.frombuffer(found.body[size:], "<f4").reshape(2, 64), expected, atol=1e-6
    )
    assert 8 == len(topics["data"])


DATA = elements(b"a", b"b")


@pytest.mark.parametrize(
    ("header", "data", "length", "named"),
    [
        (raw(DATA), DATA, "9999", "Inference-Header-Content-Length"),
        (raw(DATA), DATA, "-1", "Inference-Header-Content-Length"),
        (raw(DATA), DATA, "3", "JSON"),
        (raw(DATA), DATA[:-1], None, "binary_data_size"),
        (raw(DATA), DATA + b"a", None, "binary_data_size"),
        (raw(DATA[:-1]), DATA[:-1], None, "ends after the data"),
        (raw(DATA[:7]), DATA[:7], None, "ends within"),
        (raw(DATA, shape=[3]), DATA, None, "3"),
        (raw(elements(b"\xff", b"a")), elements(b"\xff", b"a"), None, "UTF-8"),
        ({"inputs": [text() | {"parameters": {"binary_data_size": 1}}]}, b"a", None, "binary"),
        (raw(DATA, parameters={"binary_data_size": "10"}), DATA, None, "binary_data_size"),
    ],
)
def test_binary_errors(server, header, data, length, named):
    """Sizes that do not fit are refused."""
    refused = post_binary(server, header, data, length)
    assert (400, ["error"]) == (refused.status, [*refused.json()])
    assert named in refused.json()["error"]


QUESTION = text(["What?"], name="question")
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [4], "data": [2, 5, 6, 3]}
LENGTHS = {"name": "lengths", "datatype": "INT32", "shape": [2], "data": [2, 2]}


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ([], 400, "JSON object"),
        ({}, 400, "inputs"),
        ({"inputs": []}, 400, "inputs"),
        ({"inputs": [1]}, 400, "inputs[0]"),
        ({"inputs": [text(), text()]}, 400, "together"),
        ({"inputs": [text(name="words")]}, 400, "words"),
        ({"inputs": [QUESTION]}, 400, "question with context"),
        ({"inputs": [QUESTION, text([" "], name="context")]}, 400, "context[0]"),
        ({"inputs": [QUESTION, text(name="context")]}, 400, "shape"),
        ({"inputs": [text(shape=[3])]}, 400, "3"),
        ({"inputs": [text([], [0])]}, 400, "shape"),
        ({"inputs": [text(shape=[1, 2])]}, 400, "shape"),
        ({"inputs": [text(datatype="FP32")]}, 400, "BYTES"),
        ({"inputs": [text([1, 2])]}, 400, "texts"),
        ({"inputs": [text("a")]}, 400, "texts"),
        ({"inputs": [text([[["a"]]])]}, 400, "texts"),
        ({"inputs": [text(data=None)]}, 400, "data"),
        ({"inputs": [text(["a"] * 9)]}, 413, "9"),
        ({"inputs": [text(parameters={"shared_memory_region": "a"})]}, 400, "shared_memory_region"),
        ({"inputs": [text()], "outputs": outputs("logits")}, 404, "logits"),
        ({"inputs": [text()], "outputs": outputs("topics", "topics")}, 400, "twice"),
        ({"inputs": [text()], "outputs": outputs("topics", "answers")}, 400, "answers"),
        ({"inputs": [text()], "outputs": outputs("answers")}, 400, "answers"),
        (
            {
                "inputs": [text()],
                "outputs": [{"name": "entities", "parameters": {"classification": 2}}],
            },
            400,
            "classification",
        ),
        ({"inputs": [text()], "parameters": {"sequence_id": 1}}, 400, "sequence_id"),
        ({"inputs": [text()], "parameters": {"timeout": -1}}, 400, "timeout"),
        ({"inputs": [text()], "parameters": {"top_k": 2}}, 400, "top_k"),
        ({"inputs": [IDS, LENGTHS], "parameters": {"truncate": True}}, 400, "truncate"),
        ({"inputs": [text()], "model": "other"}, 400, "model"),
        ({"inputs": [IDS]}, 400, "input_ids with lengths"),
        ({"inputs": [IDS, LENGTHS | {"data": [2, 3]}]}, 400, "lengths"),
        ({"inputs": [IDS, LENGTHS | {"data": [4, 0]}]}, 400, "lengths"),
        ({"inputs": [IDS, LENGTHS | {"data": [2.5, 1]}]}, 400, "integers"),
        ({"inputs": [IDS | {"data": [2, 5, -6, 3]}, LENGTHS]}, 400, "vocabulary"),
        ({"inputs": [IDS | {"data": [2, 5, 10**20, 3]}, LENGTHS]}, 400, "integers"),
        ({"inputs": [IDS, LENGTHS], "outputs": outputs("entities")}, 400, "entities"),
    ],
)
def test_errors(server, body, status, named):
    """They have the protocol's form, with our messages."""
    refused = server.post(INFER, body)
    assert (status, ["error"]) == (refused.status, [*refused.json()])
    assert named in refused.json()["error"]


def test_pages(server):
    """The protocol's descriptions of the server and its models."""
    assert "binary_tensor_data" in server.get("/v2").json()["extensions"]
    assert {"ready": True} == server.get("/v2/health/ready").json()
    for path in ("/v2/models/tasks", "/v2/models/tasks@1", "/v2/models/tasks/versions/1"):
        found = server.get(path).json()
        assert ("tasks", ["1"]) == (found["name"], found["versions"])
        assert 200 == server.get(f"{path}/ready").status
    assert [-1, 64] == {one["name"]: one["shape"] for one in found["outputs"]}["embeddings"]
    assert {"text", "question", "input_ids"} < {one["name"] for one in found["inputs"]}
    for path in ("/v2/models/huge", "/v2/models/tasks/versions/2/ready", "/v2/models/tasks/stats"):
        refused = server.get(path)
        assert (404, ["error"]) == (refused.status, [*refused.json()]), path
    for body in (b"{", b"[]", b'{"ready": 1}', b'{"other": true}', b"\xff"):
        refused = server.post("/v2/repository/index", body)
        assert (400, ["error"]) == (refused.status, [*refused.json()]), body
    refused = server.send("POST", INFER, b"{}", {"Content-Type": "text/plain"})
    assert (415, ["error"]) == (refused.status, [*refused.json()])


def test_repository(tasks_bundle, tiny_bundle, tmp_path):
    """Loading and unloading need a key for administration."""
    for bundle in (tasks_bundle, tiny_bundle):
        shutil.copytree(bundle, tmp_path / "models" / bundle.name)
    key, admin, keys = make_key(), make_key(), tmp_path / "keys.toml"
    keys.write_text(
        record("search", key) + record("admin", admin) + 'may = ["inference", "admin"]\n'
    )
    options = ("--models-dir", tmp_path / "models", "--api-keys", keys)
    with serving(tmp_path / "models" / tasks_bundle.name, *options) as server:

        def post(path, key, body=None):
            data = b"" if body is None else json.dumps(body).encode()
            return server.send("POST", f"/v2/repository/{path}", data, {"api-key": key})

        def names():
            return [one["name"] for one in post("index", key).json()]

        load, unload = f"models/{tiny_bundle.name}/load", "models/tiny/unload"
        assert 200 == server.get("/v2/health/live").status
        assert 401 == server.get("/v2").status
        assert 403 == post(load, key).status
        refused = post(load, admin, {"parameters": {"config": "{}"}})
        assert (400, True) == (refused.status, "config" in refused.json()["error"])
        loaded = post(load, admin, {})
        assert 200 == loaded.status, loaded.body
        assert ["tasks", "tiny"] == sorted(names())
        assert 403 == post(unload, key).status
        assert 200 == post(unload, admin, {"parameters": {"unload_dependents": False}}).status
        assert ["tasks"] == names()
        assert 404 == post(unload, admin).status
