"""infinity's Python client: https://pypi.org/project/infinity-client

It returns an invalid request's response as a value, and raises one class for every other error.
"""

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

from tests.e2e.client_calls.records import (
    QUERY,
    TEXTS,
    TOO_MANY,
    Call,
    Failure,
    KeyUse,
    Run,
    native,
)

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

PACKAGE = "infinity_client"
UNEXPECTED = "infinity_client.errors.UnexpectedStatus"
BODIES = {
    "embeddings": "OpenAIEmbeddingInputText",
    "rerank": "RerankInput",
    "classify": "ClassifyInput",
}


def call(method: str, *, key: str | None = None, function: str = "sync", **fields: Any) -> Run:
    """Return a function that calls a method of the client with a body of these fields, and returns its response."""

    def run(server: "Server") -> Any:
        import infinity_client
        from infinity_client import models

        options = {"base_url": f"{server.url}/infinity", "raise_on_unexpected_status": True}
        client = (
            infinity_client.AuthenticatedClient(token=key, **options)
            if key
            else infinity_client.Client(**options)
        )
        own = importlib.import_module(f"infinity_client.api.default.{method}")
        body = {"body": getattr(models, BODIES[method])(**fields)} if method in BODIES else {}
        found = getattr(own, function)(client=client, **body)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    return run


def embed(**options: Any) -> Run:
    """Return a function that embeds texts, and returns the vectors."""
    run = call("embeddings", **{"input_": TEXTS, "model": "tasks", **options})
    return lambda server: [one.embedding for one in run(server).data]


def rerank(**fields: Any) -> Run:
    run = call("rerank", **{"query": QUERY, "documents": TEXTS, **fields})
    return lambda server: [as_native(one) for one in run(server).results]


def as_native(result: Any) -> dict[str, Any]:
    text = {"text": result.document} if isinstance(result.document, str) else {}
    return {"index": result.index, "score": result.relevance_score, **text}


def classify(**fields: Any) -> Run:
    run = call("classify", **{"input_": TEXTS, "model": "tasks", **fields})
    return lambda server: [
        [{"label": one.label, "score": one.score} for one in labels] for labels in run(server).data
    ]


def class_name(run: Run) -> Run:
    """Return a function that returns the name of the class of a response."""
    return lambda server: type(run(server)).__name__


INVALID = "HTTPValidationError"
VECTORS = native("/embed", {"inputs": TEXTS}, "embeddings")
CALLS = [
    Call("embeddings.sync", embed(), VECTORS),
    Call("embeddings.asyncio", embed(function="asyncio"), VECTORS),
    Call("embeddings.sync(model='default/not-specified')", embed(model="default/not-specified"), VECTORS),
    Call(
        "embeddings.sync(dimensions=8)",
        embed(dimensions=8),
        native("/embed", {"inputs": TEXTS, "dimensions": 8}, "embeddings"),
    ),
    Call("rerank.sync", rerank(), native("/rerank", {"query": QUERY, "documents": TEXTS}, "results")),
    Call(
        "rerank.asyncio(top_n=1)",
        rerank(top_n=1, function="asyncio"),
        native("/rerank", {"query": QUERY, "documents": TEXTS, "top_n": 1}, "results"),
    ),
    Call(
        "rerank.sync(return_documents=True, raw_scores=True)",
        rerank(return_documents=True, raw_scores=True),
        native(
            "/rerank",
            {"query": QUERY, "documents": TEXTS, "return_text": True, "raw_scores": True},
            "results",
        ),
    ),
    Call("classify.sync", classify(), native("/classify", {"inputs": TEXTS}, "results")),
    Call(
        "classify.sync(raw_scores=True)",
        classify(raw_scores=True),
        native("/classify", {"inputs": TEXTS, "function_to_apply": "none"}, "results"),
    ),
    Call(
        "models.sync",
        lambda server: [one.id for one in call("models")(server).data],
        lambda server: [one["id"] for one in server.get("/models").json()["models"]],
    ),
    Call("health.sync", class_name(call("health")), lambda _: "ResponseHealth"),
    Call(
        "embeddings.sync(too many texts)",
        class_name(call("embeddings", input_=TOO_MANY, model="tasks")),
        lambda _: INVALID,
    ),
    Call("rerank.sync(no documents)", class_name(call("rerank", query=QUERY, documents=[])), lambda _: INVALID),
]  # fmt: skip
FAILURES = [
    Failure("unknown model", embed(model="huge"), UNEXPECTED),
    Failure("unknown model to rerank", rerank(model="huge"), UNEXPECTED),
]


def embed_with_key(server: "Server", key: str, retry: bool) -> Any:
    return embed(key=key)(server)


KEY_USE = KeyUse(embed_with_key, UNEXPECTED, UNEXPECTED, retries=False)
