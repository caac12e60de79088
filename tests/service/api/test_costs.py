"""Every route and every RPC counts the text that it tokenizes, and bounds its answer."""

import json
import re
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from benchmarks.lib.servers import free_port
from service.api import engine_call, ndjson
from service.api.json_responses import JsonResponse
from service.engines import engine as engine_module
from service.engines.engine import INLINE_CHARACTERS, INLINE_TOKENS, Engine, Reply
from service.engines.task_plan import Limits, TaskPlan
from service.server.server import Server
from service.settings import Settings
from service.tasks import sparse_embedding
from service.tasks.classification import Classification
from service.tasks.mask_filling import MaskFilling
from service.tasks.zero_shot import TEMPLATE, ZeroShot
from tests.conftest import run_export
from tests.parity import gliner_checkpoints
from tests.served import app_of, living

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT, MASKED, IDS = "the ferry", "the ferry [MASK]", [5, 6]
LONG = "The ferry to the harbour was late. " * 150  # more than the event loop may tokenize
MANY = [7] * 5000
ITEMS, MOST = 5, 90  # of a grown list, and a grown number of results
THREATS = Path(__file__).parents[3] / "docs" / "explanation" / "threat_model.md"
LABELLED = "spans-modernbert"  # a checkpoint whose head takes labels from the request
INFER = "/v2/models/{model}/infer"
Service = tuple[FastAPI, httpx.AsyncClient]


def tensors(output: str | None = None, **texts: str) -> dict[str, Any]:
    """The body of the Open Inference Protocol."""
    columns = [
        {"name": name, "shape": [1], "datatype": "BYTES", "data": [text]}
        for name, text in texts.items()
    ]
    return {"inputs": columns, **({"outputs": [{"name": output}]} if output else {})}


RANKED = {"query": TEXT, "documents": [TEXT, TEXT]}
PAIR = {"question": TEXT, "context": TEXT}
# Requests of each route, with each text that a client may send.
BODIES: Mapping[str, list[dict[str, Any]]] = {
    "/classify": [{"inputs": [TEXT]}, {"inputs": [TEXT], "text_pair": [TEXT]}],
    "/ner": [{"inputs": [TEXT], "aggregation_strategy": "none"}],
    "/qa": [{**PAIR, "top_k": 20}, {"inputs": [PAIR]}],
    "/embed": [{"inputs": [TEXT], "prompt": "the "}],
    "/embed-tokens": [{"inputs": [TEXT], "truncate": "window"}],
    "/rerank": [
        {**RANKED, "return_text": True},
        *({**RANKED, "head": head} for head in ("embeddings", "tokens", "weights")),
    ],
    "/similarity": [{"source": TEXT, "inputs": [TEXT]}],
    "/zero-shot": [
        {"inputs": [TEXT], "labels": [TEXT, "sea"]},
        {"inputs": [TEXT], "labels": ["sea"], "hypothesis_template": f"{{}}{TEXT}"},
    ],
    "/analyze": [{"inputs": [TEXT]}],
    "/fill-mask": [
        {"inputs": [MASKED], "top_k": 9},
        {"inputs": [MASKED * 3]},
        {"inputs": ["[MASK]"], "targets": ["a", TEXT]},
    ],
    "/embed-sparse": [{"inputs": [TEXT], "return_tokens": True}, {"inputs": [TEXT], "top_k": 3}],
    "/attention": [{"inputs": [TEXT], "text_pair": [TEXT]}],
    "/tokenize": [{"inputs": [TEXT], "text_pair": [TEXT]}],
    "/detokenize": [{"ids": [IDS]}],
    "/v1/embeddings": [{"input": [TEXT], "model": "tasks"}, {"input": [IDS], "model": "tasks"}],
    "/v1/rerank": [{**RANKED, "return_documents": True}],
    "/tei/embed": [{"inputs": [TEXT]}],
    "/tei/embed_all": [{"inputs": [TEXT]}],
    "/tei/embed_sparse": [{"inputs": [TEXT]}],
    "/tei/predict": [{"inputs": [[TEXT], [TEXT, TEXT]]}],
    "/tei/rerank": [{"query": TEXT, "texts": [TEXT], "return_text": True}],
    "/tei/similarity": [{"inputs": {"source_sentence": TEXT, "sentences": [TEXT]}}],
    "/tei/tokenize": [{"inputs": [TEXT]}],
    "/tei/decode": [{"ids": [IDS]}],
    "/cohere/v1/embed": [{"texts": [TEXT], "input_type": "clustering", "embedding_types": ["float", "base64"]}],
    "/cohere/v2/embed": [{"texts": [TEXT], "input_type": "clustering"}],
    "/cohere/v1/rerank": [{**RANKED, "return_documents": True}],
    "/cohere/v2/rerank": [RANKED],
    "/cohere/v1/tokenize": [{"text": TEXT}],
    "/cohere/v1/detokenize": [{"tokens": IDS}],
    "/infinity/embeddings": [{"input": [TEXT]}],
    "/infinity/classify": [{"input": [TEXT]}],
    "/infinity/rerank": [{**RANKED, "return_documents": True}],
    "/vllm/classify": [{"input": [TEXT], "truncate_prompt_tokens": -1}],
    "/vllm/score": [
        {"text_1": TEXT, "text_2": [TEXT, TEXT], "truncate_prompt_tokens": -1},
        {"text_1": [TEXT, TEXT], "text_2": [TEXT, TEXT], "truncate_prompt_tokens": -1},
    ],
    "/vllm/pooling": [
        {"input": [TEXT], "task": task, "truncate_prompt_tokens": -1}
        for task in ("embed", "token_embed", "classify")
    ],
    "/vllm/rerank": [{**RANKED, "truncate_prompt_tokens": -1}],
    "/hf/pipeline/text-classification": [{"inputs": TEXT}],
    "/hf/pipeline/token-classification": [{"inputs": TEXT, "parameters": {"aggregation_strategy": "none"}}],
    "/hf/pipeline/question-answering": [{"inputs": PAIR}],
    "/hf/pipeline/feature-extraction": [{"inputs": TEXT}],
    "/hf/pipeline/sentence-similarity": [{"inputs": {"source_sentence": TEXT, "sentences": [TEXT]}}],
    "/hf/pipeline/fill-mask": [{"inputs": MASKED}, {"inputs": "[MASK]", "parameters": {"targets": [TEXT]}}],
    "/hf/pipeline/zero-shot-classification": [
        {"inputs": TEXT, "parameters": {"candidate_labels": f"{TEXT}, sea"}},
        {
            "inputs": TEXT,
            "parameters": {"candidate_labels": ["sea"], "hypothesis_template": f"{{}}{TEXT}"},
        },
    ],
    INFER: [
        tensors(text=TEXT),
        tensors("sentiment", text=TEXT, text_pair=TEXT),
        tensors("answers", question=TEXT, context=TEXT),
        *(tensors(head, text=MASKED) for head in ("masks", "weights", "tokens", "entities")),
        {
            "inputs": [
                {"name": "input_ids", "shape": [2], "datatype": "INT64", "data": IDS},
                {"name": "lengths", "shape": [1], "datatype": "INT64", "data": [2]},
            ]
        },
    ],
}  # fmt: skip
# Routes and calls that compute nothing.
WITHOUT_TASK = {"/admin/models", "/admin/models/{model}/promote", "/admin/models/{name}/rollback"}

CALLS_WITHOUT_TASK = {
    *("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata"),
    *("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
}


def grown(body: Any) -> Iterator[Any]:
    """Yield a body with each of its texts, lists and numbers of results made large in turn."""
    if body == IDS:
        yield MANY
    elif isinstance(body, str) and TEXT in body:
        yield body.replace(TEXT, LONG)
    elif type(body) is int and 1 < body < MOST:
        yield MOST
    elif isinstance(body, dict) and body.get("datatype") == "BYTES":
        (text,) = body["data"]
        yield from ({**body, "data": [longer]} for longer in grown(text))
    elif isinstance(body, dict):
        for key, value in body.items():
            yield from ({**body, key: larger} for larger in grown(value))
    elif isinstance(body, list):
        if 0 < len(body) < ITEMS:
            yield body * ITEMS
        for index, value in enumerate(body):
            if value not in body[:index] and not isinstance(value, int):
                yield from ([*body[:index], larger, *body[index + 1 :]] for larger in grown(value))


def products(body: Any) -> list[Any]:
    """Return a body, and the body with each field, and each pair of fields, made large."""
    once = [*grown(body)]
    every = [body, *once, *(twice for one in once for twice in grown(one))]
    return [*{json.dumps(one): one for one in every}.values()]


class Counting:
    """A tokenizer that counts the characters of the texts, or ids, that it gets, by thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.all = self.in_loop = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tokenizer, name)
        assert name != "decode", "decode_batch does not hold the interpreter's lock"
        if name not in ("encode", "encode_batch", "encode_batch_fast", "decode_batch"):
            return method

        def count(texts: Any, *more: Any, **options: Any) -> Any:
            size = len(texts) if name == "encode" else sum(map(len, texts))
            if options.get("is_pretokenized"):
                size = sum(len(word) for words in texts for word in words)
            self.all += size if name != "decode_batch" else 0
            self.in_loop += size * (threading.current_thread() is threading.main_thread())
            return method(texts, *more, **options)

        return count


@asynccontextmanager
async def serving(bundle: Path, **settings: Any) -> AsyncIterator[Service]:
    app = app_of(bundle, **settings)
    async with living(app) as client:
        yield app, client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tasks_bundle: Path) -> AsyncIterator[Service]:
    async with serving(tasks_bundle) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def no_answers(tasks_bundle: Path) -> AsyncIterator[Service]:
    """A service in which every answer is too large."""
    async with serving(tasks_bundle, max_response_bytes=1) as opened:
        yield opened


@dataclass
class Spied:
    """The tokenizer, the characters that each plan declares, and the sizes that the engine expects of answers."""

    tokenizer: Counting
    declared: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)

    def clear(self) -> None:
        self.tokenizer.all = self.tokenizer.in_loop = 0
        self.declared.clear()
        self.answers.clear()

    def check(self, asked: object) -> None:
        assert self.tokenizer.in_loop <= INLINE_CHARACTERS, asked
        assert self.tokenizer.all <= sum(self.declared), asked


@pytest.fixture
def spied(service: Service, monkeypatch: pytest.MonkeyPatch) -> Spied:
    return spy(service, monkeypatch)


def spy(service: Service, monkeypatch: pytest.MonkeyPatch) -> Spied:
    encoder = service[0].state.service.open_engines().get(None).encoder
    spied = Spied(Counting(encoder.tokenizer))
    monkeypatch.setattr(encoder, "tokenizer", spied.tokenizer)
    monkeypatch.setattr(encoder, "_ascii", None)
    check, answer = Limits.check, Engine.answer

    def checked(self: Limits, plan: TaskPlan[Any, Any]) -> None:
        spied.declared.append(plan.characters)
        check(self, plan)

    async def answered(*arguments: Any, **options: Any) -> Reply[Any]:
        reply: Reply[Any] = await answer(*arguments, **options)
        spied.answers.append(reply.answer_bytes)
        return reply

    monkeypatch.setattr(Limits, "check", checked)
    monkeypatch.setattr(Engine, "answer", answered)
    return spied


def url(path: str) -> str:
    return path.replace("{model}", "tasks")


async def test_every_route_is_here(service):
    """A route with a body is in the table of this module, or computes nothing."""
    paths = service[0].openapi()["paths"].items()
    assert {path for path, methods in paths if "post" in methods} == BODIES.keys() | WITHOUT_TASK


async def test_every_door_is_in_the_threat_model(service):
    """Each route and each call is in a row of the table of limits, and no cell of the table is empty."""
    page = THREATS.read_text(encoding="utf-8").partition("## Limits of each door")[2]
    rows = [
        line.strip("|").split("|") for line in page.partition("\n## ")[0].split("\n") if "|" in line
    ]
    assert {7} == {len(row) for row in rows}
    assert all(cell.strip() for row in rows for cell in row)
    doors = re.findall(r"`([^`]+)`", " ".join(row[0] for row in rows))
    starts = tuple(door.removesuffix("...") for door in doors if door.endswith("..."))
    paths = service[0].openapi()["paths"].keys() | {"/", "/docs"}
    assert [path for path in paths if path not in doors and not path.startswith(starts)] == []
    pytest.importorskip("grpc")
    from service.api.dialects.inference_grpc import RPCS

    assert RPCS.keys() <= {*doors}


@pytest.mark.parametrize("path", BODIES)
async def test_costs_are_declared(path, service, spied):
    await check_costs(path, service, spied)


async def check_costs(path: str, service: Service, spied: Spied) -> None:
    """Check that each text of a request counts, and that a long one is not tokenized in the event loop.

    An answer is at most as large as the engine expects, with the texts of the request that it repeats, and its frame.
    This holds when any two fields are large together, so the declared cost grows with their product.
    """
    for body in BODIES[path]:
        for asked in products(body):
            spied.clear()
            reply = await service[1].post(url(path), json=asked)
            spied.check(asked)
            if reply.status_code == 200 and spied.answers:
                frame = len(json.dumps(asked)) + 1024
                assert len(reply.content) <= sum(spied.answers) + frame, asked


@pytest.mark.parametrize(
    ("task", "path", "forgotten"),
    [
        (ZeroShot, "/zero-shot", {"shared": None}),
        (Classification, "/classify", {"sizes": [0]}),
        (MaskFilling, "/fill-mask", {"answer_bytes": lambda *_: 0}),
        (MaskFilling, "/fill-mask", {"answer_bytes": lambda *_: 10 * len(LONG)}),  # top_k of LONG
    ],
)
async def test_a_task_without_its_costs_fails(task, path, forgotten, service, spied, monkeypatch):
    """The check above fails for a task that does not count its texts, its answer, or the product of two fields."""
    plan = task.plan

    def plan_less(self, engine, heads):
        whole = plan(self, engine, heads)
        if whole.shared and "shared" in forgotten:
            whole.shared.add(slice(None))
        return replace(whole, **forgotten)

    monkeypatch.setattr(task, "plan", plan_less)
    with pytest.raises(AssertionError):
        await check_costs(path, service, spied)


@pytest.mark.slow
async def test_labels_are_declared(tmp_path, monkeypatch):
    """A head that takes labels from the request counts them, and bounds its answer."""
    pytest.importorskip("torch")
    shapes = json.loads(gliner_checkpoints.RECORDED.read_text())[LABELLED]["shapes"]
    checkpoint = gliner_checkpoints.save(tmp_path / "checkpoint", LABELLED, shapes)
    run_export(checkpoint, tmp_path / "bundle", "--precision", "fp32")
    body = {"inputs": [TEXT, TEXT], "labels": [TEXT, "sea"], "threshold": 0, "nested": True}
    async with serving(tmp_path / "bundle") as opened:
        spied = spy(opened, monkeypatch)
        for asked in products(body):
            spied.clear()
            reply = await opened[1].post("/ner", json=asked)
            assert reply.status_code == (200 if LONG not in asked["labels"] else 422), reply.text
            spied.check(asked)
            if reply.status_code == 200:
                assert 0 < len(reply.content) <= sum(spied.answers) + 1024, asked
    async with serving(tmp_path / "bundle", max_response_bytes=1) as opened:
        assert "max_response_bytes" in (await opened[1].post("/ner", json=body)).text


@pytest.mark.parametrize("path", BODIES)
async def test_answers_are_bounded(path, no_answers):
    """Each request is refused where its answer is larger than a response may be."""
    for body in BODIES[path]:
        if "targets" not in str(body):
            assert "max_response_bytes" in (await no_answers[1].post(url(path), json=body)).text


@pytest.mark.parametrize("path", BODIES)
async def test_large_answers_leave_the_event_loop(path, service, monkeypatch):
    """The body of a response is made in a text thread if the engine expects a large one."""
    monkeypatch.setattr(engine_call, "LARGE_BYTES", 0)
    finish, threads = JsonResponse.finish, []

    def finished(*arguments, **options):
        threads.append(threading.current_thread().name)
        finish(*arguments, **options)

    monkeypatch.setattr(JsonResponse, "finish", finished)
    reply = await service[1].post(url(path), json=BODIES[path][0])
    assert reply.status_code == 200, reply.text
    assert [True] == [name.startswith("text-") for name in threads]


LINES = {"Accept": "application/x-ndjson"}


@pytest.mark.parametrize(
    "path", ["/classify", "/ner", "/qa", "/embed-tokens", "/embed-sparse", "/fill-mask"]
)
async def test_lines_have_the_same_results(path, service, monkeypatch):
    """A stream has the results of a whole response, also where its lines are written in pieces."""
    monkeypatch.setattr(ndjson, "LARGE_BYTES", 0)
    body = BODIES[path][0]
    whole = (await service[1].post(path, json=body)).json()
    reply = await service[1].post(path, json=body, headers=LINES)
    *lines, _ = [json.loads(line) for line in reply.text.splitlines()]
    expected = whole.get("results") or whole["embeddings"]
    assert expected == [line.get("result") or line["embedding"] for line in lines]


@pytest.mark.parametrize("path", ["/classify", "/ner", "/qa", "/embed", "/embed-tokens"])
async def test_large_lines_leave_the_event_loop(path, service, monkeypatch):
    """A line is written in a text thread if the engine expects a large one, however small its input."""
    monkeypatch.setattr(engine_module, "BYTES_PER_TOKEN", 1 / INLINE_TOKENS)
    write, threads = ndjson.InLines.line, []

    def written(*arguments):
        threads.append(threading.current_thread().name)
        return write(*arguments)

    monkeypatch.setattr(ndjson.InLines, "line", written)
    reply = await service[1].post(path, json=BODIES[path][0], headers=LINES)
    assert reply.status_code == 200, reply.text
    assert [True] == [name.startswith("text-") for name in threads]


@pytest.mark.parametrize("headers", [{}, LINES], ids=["whole", "lines"])
async def test_weights_are_bounded_when_decoded(headers, no_answers, monkeypatch):
    """How many weights are above 0 is known of the results only."""
    monkeypatch.setattr(sparse_embedding, "SCORED_BYTES", 0)
    reply = await no_answers[1].post("/embed-sparse", json={"inputs": TEXT}, headers=headers)
    assert reply.status_code == 413
    assert "max_response_bytes" in reply.text


W = LONG * 45  # 236,250 characters
PRODUCTS = {
    "a template with many places": (
        "/zero-shot",
        {"inputs": "a", "labels": ["b" * 10_000], "hypothesis_template": "{}" * 100_000},
        "labels[0] in hypothesis_template has 1000000000 characters",
    ),
    "a long template for many labels": (
        "/zero-shot",
        {"inputs": "a", "labels": [*"abcdefgh"] * 8, "hypothesis_template": f"{{}}{W}"},
        "characters to tokenize; max_body_bytes is",
    ),
    "texts and labels": (
        "/zero-shot",
        {"inputs": ["a"] * 64, "labels": ["b", "c"] * 9},
        "the model would read 1152 texts",
    ),
    "texts and long labels": ("/zero-shot", {"inputs": ["a"] * 64, "labels": ["b" * 200_000]}, "max_response_bytes"),
    "labels in a text": (
        "/hf/pipeline/zero-shot-classification",
        {"inputs": "a", "parameters": {"candidate_labels": "," * 2000}},
        "parameters.candidate_labels has 2001 items",
    ),
    "mask tokens and results": ("/fill-mask", {"inputs": "[MASK] " * 4 + W, "top_k": 100}, "max_response_bytes"),
    "answers that are long words": (
        "/qa",
        {"inputs": [{"question": "a", "context": "b" * 100_000}] * 8, "top_k": 100},
        "max_response_bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
async def test_products_are_bounded(name, service):
    """Fields whose product is large are refused together, though each of them is small enough."""
    path, body, message = PRODUCTS[name]
    reply = await service[1].post(path, json=body)
    assert reply.status_code == 413, reply.text
    assert message in reply.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": LONG, "documents": [W[:40_000]] * 4}),
        ("/vllm/score", {"text_1": LONG, "text_2": ["a"] * 64, "truncate_prompt_tokens": -1}),
        ("/zero-shot", {"inputs": [LONG, "a"], "labels": [*"abcdefgh"]}),
        ("/fill-mask", {"inputs": ["[MASK]"] * 8, "targets": ["a" + " " * 5000]}),
    ],
)
async def test_each_text_is_tokenized_once(path, body, service, spied):
    """However many texts it is compared with, and in however many parts."""
    await service[1].post(path, json=body)
    assert 5000 < spied.tokenizer.all <= len(json.dumps(body)) + 8 * len(TEMPLATE)


@asynccontextmanager
async def channel_to(app: FastAPI) -> AsyncIterator[Any]:
    """A channel to a gRPC server of the application."""
    grpc = pytest.importorskip("grpc")
    service = SimpleNamespace(settings=Settings(grpc_port=free_port()))
    server: Any = SimpleNamespace(_app=app, service=service)
    await Server.start_grpc(server)
    try:
        async with grpc.aio.insecure_channel(server._grpc.url) as channel:
            yield channel
    finally:
        await server._grpc.stop(0)


async def infer(channel: Any, body: dict[str, Any]) -> Any:
    """Return the response to a body of the Open Inference Protocol over gRPC, or its error."""
    import grpc

    from service.api.dialects import open_inference_pb2 as messages
    from service.api.dialects.inference_grpc import CONTENTS, SERVICE

    inputs = [
        {
            **{name: tensor[name] for name in ("name", "shape", "datatype")},
            "contents": {
                CONTENTS[tensor["datatype"]]: [
                    one.encode() if isinstance(one, str) else one for one in tensor["data"]
                ]
            },
        }
        for tensor in body["inputs"]
    ]
    asked = messages.ModelInferRequest(
        model_name="tasks", inputs=inputs, outputs=body.get("outputs")
    )
    call = channel.unary_unary(
        f"/{SERVICE}/ModelInfer",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=messages.ModelInferResponse.FromString,
    )
    try:
        return await call(asked, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error


async def test_every_call_is_here():
    """Of the calls of the protocol, one has a task."""
    pytest.importorskip("grpc")
    from service.api.dialects import open_inference_pb2 as messages
    from service.api.dialects.inference_grpc import RPCS

    asked = {name for name in messages.DESCRIPTOR.message_types_by_name if name.endswith("Request")}
    assert asked == {f"{name}Request" for name in RPCS}
    assert RPCS.keys() == {"ModelInfer"} | CALLS_WITHOUT_TASK


async def test_costs_of_calls_are_declared(service, spied):
    """Over gRPC, texts count and answers have a size as over HTTP."""
    async with channel_to(service[0]) as channel:
        for body in BODIES[INFER]:
            for asked in [body, *grown(body)]:
                spied.clear()
                reply = await infer(channel, asked)
                spied.check(asked)
                if hasattr(reply, "outputs"):
                    assert reply.ByteSize() <= sum(spied.answers) + 1024


async def test_answers_of_calls_are_bounded(no_answers):
    """A call is refused where its answer is larger than a response may be."""
    async with channel_to(no_answers[0]) as channel:
        for body in BODIES[INFER]:
            assert "max_response_bytes" in (await infer(channel, body)).details()
