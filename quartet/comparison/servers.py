"""A side that is a server: the requests of each dialect, and answers from responses of any of them."""

import asyncio
import base64
import http.client
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from quartet.comparison.sides import Item, SideError, Task
from service.core.decode import AnswerSpan, EntitySpan, LabelScore, SparseVector

TIMEOUT_S = 60.0
SHOWN = 200  # characters of a response in an error
NAME_DIALECT = "name the dialect by --dialect-a or --dialect-b"
# Fields of responses that contain the results, the outermost first.
CONTAINERS = (
    *("results", "embeddings", "data", "embedding", "float", "outputs", "answers", "predictions"),
)
NATIVE: Mapping[Task, str] = {
    "embeddings": "/embed",
    "labels": "/classify",
    "entities": "/ner",
    "answers": "/qa",
    "reranking": "/rerank",
    "sparse": "/embed-sparse",
}
VECTORS: Mapping[Task, str] = {
    "embeddings": "/embeddings",
    "labels": "/classify",
    "reranking": "/rerank",
}
# The paths of each task by dialect: "plain" are functions behind FastAPI with the paths of the native API, and "hf"
# pipelines of transformers. A path may contain {model}.
PATHS: Mapping[str, Mapping[Task, str]] = {
    "quartet": {task: f"/native{path}" for task, path in NATIVE.items()},
    "tei": {**VECTORS, "embeddings": "/embed", "labels": "/predict", "sparse": "/embed_sparse"},
    "infinity": VECTORS,
    "vllm": {**VECTORS, "embeddings": "/v1/embeddings"},
    "openai": {"embeddings": "/v1/embeddings", "reranking": "/v1/rerank"},
    "kserve": {"embeddings": "/v2/models/{model}/infer"},
    "cohere": {"embeddings": "/v2/embed", "reranking": "/v2/rerank"},
    "hf": dict.fromkeys(("embeddings", "labels", "entities", "answers"), ""),
    "plain": NATIVE,
}
# A path of GET, and a text that only this server's response contains; the other dialects are not found by asking.
PROBES: Mapping[str, tuple[str, str]] = {
    "quartet": ("/native/models", '"weights_license"'),
    "tei": ("/info", '"model_id"'),
    "infinity": ("/models", '"infinity"'),
    "vllm": ("/v1/models", '"vllm"'),
    "openai": ("/v1/models", '"data"'),
    "kserve": ("/v2", '"extensions"'),
}


def make_body(dialect: str, task: Task, item: Item, model: str) -> dict[str, Any]:
    """Return the body of a request."""
    text, *more = item
    named: dict[str, Any] = {} if dialect in ("quartet", "plain", "tei", "hf") else {"model": model}
    if dialect == "tei":
        named = {"truncate": True}
    match dialect, task:
        case "hf", "answers":
            return {"inputs": {"question": text, "context": more[0]}}
        case _, "answers":
            return {"question": text, "context": more[0]}
        case _, "reranking":
            return {"query": text, "texts" if dialect == "tei" else "documents": more, **named}
        case "hf", "labels":
            return {"inputs": text, "parameters": {"top_k": None}}
        case "hf", "entities":
            return {"inputs": text, "parameters": {"aggregation_strategy": "first"}}
        case "kserve", _:
            tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
            return {"inputs": [tensor]}
        case "cohere", _:
            kind = {"input_type": "search_document", "embedding_types": ["float"]}
            return {"texts": [text], **kind, **named}
        case (("infinity" | "vllm" | "openai"), _):
            return {"input": [text], **named}
    return {"inputs": text, **named}


@dataclass
class Server:
    """A server at a URL.

    dialect: "" to find it by asking; headers: of each request; model, head: in requests, "" for none
    """

    name: str
    dialect: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    head: str = ""
    is_local: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.name)
        self._secure, self._host = parts.scheme == "https", parts.netloc
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._idle: list[http.client.HTTPConnection] = []
        if not self.dialect:
            self.dialect = self._find_dialect()
        self._paths = PATHS[self.dialect]
        self.tasks: list[Task] = [*self._paths]

    async def answer(self, task: Task, item: Item) -> Any:
        if task not in self._paths:
            raise SideError(f"{self.name}: the dialect {self.dialect} has no {task}")
        path = self._paths[task].format(model=self.model)
        head = {"head": self.head} if self.head and self.dialect == "quartet" else {}
        content = json.dumps({**make_body(self.dialect, task, item, self.model), **head})
        return await self.send(task, path, content.encode(), {"Content-Type": "application/json"})

    async def send(self, task: Task, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
        """Send a request, and return the first answer of its response. Raises SideError."""
        status, text = await asyncio.to_thread(self._send, "POST", path, body, headers)
        if status != 200:
            raise SideError(f"{self.name}: {path} returned {status}: {text[:SHOWN]}")
        try:
            return READERS[task](json.loads(text))
        except (ValueError, KeyError, IndexError, TypeError, StopIteration):
            reason = f"{path} returned no {task}: {text[:SHOWN]}; {NAME_DIALECT}"
            raise SideError(f"{self.name}: {reason}") from None

    def _find_dialect(self) -> str:
        """Return the dialect whose probe the server answers, and note its model. Raises SideError."""
        for name, (path, mark) in PROBES.items():
            status, text = self._send("GET", path)
            if status == 200 and mark in text:
                models = json.loads(text).get("data") or [{}]
                self.model = self.model or models[0].get("id", "")
                return name
        self.close()
        raise SideError(f"{self.name}: no known dialect; {NAME_DIALECT}: {', '.join(PATHS)}")

    def _send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Send a request on an idle connection, and once more on a new one if that fails. Raises SideError."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        reused = bool(self._idle)
        connection = self._idle.pop() if reused else kind(self._host, timeout=TIMEOUT_S)
        try:
            sent = {**(headers or {}), **self.headers}
            connection.request(method, self._base + path or "/", body or None, sent)
            reply = connection.getresponse()
            content = reply.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if reused:
                return self._send(method, path, body, headers)
            raise SideError(f"{self.name}: {str(error) or type(error).__name__}") from None
        self._idle.append(connection)
        return reply.status, content

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


# -- answers --------------------------------------------------------------------------------------


def inner(found: Any) -> Any:
    """Return what the outermost container of results has in it."""
    key = 0 if isinstance(found, list) else next(name for name in CONTAINERS if name in found)
    return found[key]


def records(found: Any, *fields: str) -> list[dict[str, Any]]:
    """Return the objects of a response that have one of these fields."""

    def is_record(one: Any) -> bool:
        return isinstance(one, dict) and any(name in one for name in fields)

    while not is_record(found):
        if isinstance(found, list) and all(map(is_record, found)):
            return found
        found = inner(found)
    return [found]


def vector(found: Any) -> Any:
    while not (isinstance(found, str) or (isinstance(found, list) and np.isscalar(found[0]))):
        found = inner(found)
    if isinstance(found, str):
        return np.frombuffer(base64.b64decode(found), "<f4")
    return np.asarray(found, np.float32)


def labels(found: Any) -> list[LabelScore]:
    rows = records(found, "label")
    return by_score((own["label"], own.get("score") or max(own.get("probs", [0]))) for own in rows)


def ranking(found: Any) -> list[LabelScore]:
    rows = records(found, "index")
    score = "score" if rows and "score" in rows[0] else "relevance_score"
    return by_score((str(own["index"]), own[score]) for own in rows)


def by_score(pairs: Iterable[tuple[str, float]]) -> list[LabelScore]:
    """Return labels by falling score, equal scores in their order."""
    return sorted(starmap(LabelScore, pairs), key=lambda one: -one.score)


def entities(found: Any) -> list[EntitySpan]:
    rows = records(found, "start")
    types = [own.get("entity_group") or own["entity"] for own in rows]
    return [
        EntitySpan(entity, own["score"], own.get("word", ""), own["start"], own["end"])
        for entity, own in zip(types, rows, strict=True)
    ]


def answers(found: Any) -> list[AnswerSpan]:
    return [
        AnswerSpan(*map(own.__getitem__, AnswerSpan._fields)) for own in records(found, "answer")
    ]


def sparse(found: Any) -> SparseVector:
    rows = records(found, "indices", "value")
    ids = [token for own in rows for token in own.get("indices", [own.get("index")])]
    weights = [value for own in rows for value in own.get("values", [own.get("value")])]
    order = np.argsort(ids)
    return SparseVector(np.asarray(ids, np.int64)[order], np.asarray(weights, np.float32)[order])


READERS: Mapping[Task, Callable[[Any], Any]] = {
    "embeddings": vector,
    "labels": labels,
    "entities": entities,
    "answers": answers,
    "reranking": ranking,
    "sparse": sparse,
}
