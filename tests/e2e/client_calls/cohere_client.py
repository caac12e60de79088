"""Cohere's Python client: https://github.com/cohere-ai/cohere-python"""

import asyncio
import base64
from typing import Any

import numpy as np

from tests.e2e.client_calls.records import TEXTS, TOO_MANY, Call, Failure, KeyUse, Run, native
from tests.e2e.conftest import Server

MODEL = "tasks"
QUERY = "a drawing of a comet"
TYPES = ["float", "binary", "ubinary", "base64"]


def connect(server: Server, version: str = "V2", **options: Any) -> Any:
    import cohere

    url = f"{server.url}/cohere"
    client = getattr(cohere, f"Client{version}")
    return client(**{"base_url": url, "api_key": "none", "max_retries": 0, **options})


def call(method: str, *keys: str, version: str = "V2", **options: Any) -> Run:
    """Return a function that calls a method of the client, and returns these attributes, one inside the other."""

    def run(server: Server) -> Any:
        with connect(server, version) as client:
            found = getattr(client, method)(**{"model": MODEL, **options})
        for key in keys:
            found = getattr(found, key)
        return found

    return run


def embed(**options: Any) -> Run:
    """Return a function that embeds texts, as documents unless the options have another type."""
    asked = {"texts": TEXTS, "input_type": "search_document", **options}
    return call("embed", "embeddings", "float", **asked)


def embed_all_types(server: Server) -> Any:
    asked = {"texts": TEXTS, "input_type": "search_document", "embedding_types": TYPES}
    found = call("embed", "embeddings", **asked)(server)
    decoded = [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in found.base64]
    return [found.float, found.binary, found.ubinary, decoded]


def all_types(server: Server) -> Any:
    return [
        native(
            "/embed",
            {"inputs": TEXTS, "output_dtype": "float" if kind == "base64" else kind},
            "embeddings",
        )(server)
        for kind in TYPES
    ]


def embed_async(server: Server) -> Any:
    import cohere

    async def run() -> Any:
        async with cohere.AsyncClientV2(base_url=f"{server.url}/cohere", api_key="none") as client:
            return await client.embed(
                texts=TEXTS, model=MODEL, input_type="search_document", embedding_types=["float"]
            )

    return asyncio.run(run()).embeddings.float


def rerank(version: str = "V2", **options: Any) -> Run:
    def run(server: Server) -> Any:
        asked = {"query": QUERY, "documents": TEXTS, **options}
        found = call("rerank", "results", version=version, **asked)(server)
        return [as_native(one) for one in found]

    return run


def as_native(result: Any) -> dict[str, Any]:
    document = getattr(result, "document", None)
    text = {"text": document.text} if document else {}
    return {"index": result.index, "score": result.relevance_score, **text}


def tokens(server: Server) -> Any:
    found = server.answer("/tokenize", {"inputs": TEXTS[0]})["results"][0]["tokens"]
    return [token["id"] for token in found if token["sequence"] is not None]


def detokenize(server: Server) -> Any:
    return call("detokenize", "text", tokens=tokens(server))(server)


def list_models(server: Server) -> Any:
    with connect(server, "") as client:
        return [one.name for one in client.models.list().models]


def get_model(server: Server) -> Any:
    with connect(server, "") as client:
        return client.models.get(MODEL).endpoints


def native_text(server: Server) -> Any:
    return server.answer("/detokenize", {"ids": tokens(server)})["results"][0]


VECTORS = native("/embed", {"inputs": TEXTS}, "embeddings")
RANKED = native("/rerank", {"query": QUERY, "documents": TEXTS}, "results")
CALLS = [
    Call("ClientV2().embed", embed(), VECTORS),
    Call("ClientV2().embed(input_type='clustering')", embed(input_type="clustering"), VECTORS),
    Call(
        "ClientV2().embed(input_type='search_query', output_dimension=8)",
        embed(input_type="search_query", output_dimension=8),
        native("/embed", {"inputs": TEXTS, "input_type": "query", "dimensions": 8}, "embeddings"),
    ),
    Call(
        "ClientV2().embed(inputs=contents)",
        embed(texts=None, inputs=[{"content": [{"type": "text", "text": text}]} for text in TEXTS]),
        VECTORS,
    ),
    Call("ClientV2().embed(embedding_types=all)", embed_all_types, all_types),
    Call(
        "ClientV2().embed(...).meta",
        call(
            "embed",
            "meta",
            "billed_units",
            "input_tokens",
            texts=TEXTS,
            input_type="classification",
            truncate="END",
        ),
        native("/embed", {"inputs": TEXTS}, "usage", "tokens"),
    ),
    Call("Client().embed", call("embed", "embeddings", version="", texts=TEXTS), VECTORS),
    Call(
        "Client().embed(embedding_types=['float'])",
        call(
            "embed",
            "embeddings",
            "float",
            version="",
            texts=TEXTS,
            input_type="search_query",
            embedding_types=["float"],
        ),
        VECTORS,
    ),
    Call("AsyncClientV2().embed", embed_async, VECTORS),
    Call("ClientV2().rerank", rerank(), RANKED),
    Call("ClientV2().rerank(model='rerank-v3.5')", rerank(model="rerank-v3.5"), RANKED),
    Call(
        "ClientV2().rerank(top_n=1)",
        rerank(top_n=1),
        native("/rerank", {"query": QUERY, "documents": TEXTS, "top_n": 1}, "results"),
    ),
    Call(
        "Client().rerank(documents=objects, return_documents=True)",
        rerank(
            "",
            documents=[{"text": text, "title": "news"} for text in TEXTS],
            rank_fields=["text"],
            return_documents=True,
        ),
        native("/rerank", {"query": QUERY, "documents": TEXTS, "return_text": True}, "results"),
    ),
    Call("ClientV2().tokenize", call("tokenize", "tokens", text=TEXTS[0]), tokens),
    Call("ClientV2().detokenize", detokenize, native_text),
    Call(
        "Client().models.list",
        list_models,
        lambda server: [one["id"] for one in server.get("/models").json()["models"]],
    ),
    Call("Client().models.get", get_model, lambda _: ["embed", "rerank"]),
]
BAD_REQUEST = "cohere.errors.BadRequestError"
FAILURES = [
    Failure("unknown model", embed(model="huge"), "cohere.errors.NotFoundError"),
    Failure("no texts", embed(texts=[]), BAD_REQUEST),
    Failure("too many texts", embed(texts=TOO_MANY), BAD_REQUEST),
    Failure("too many dimensions", embed(output_dimension=65), BAD_REQUEST),
    Failure("images", embed(texts=None, images=["data:image/png;base64,AA=="]), BAD_REQUEST),
    Failure("too long", embed(texts=["word " * 600], truncate="NONE"), BAD_REQUEST),
    Failure("cut at the start", embed(truncate="START"), BAD_REQUEST),
    Failure("no ranges for int8", embed(embedding_types=["int8"]), BAD_REQUEST),
    Failure("Client(): too many texts", call("embed", version="", texts=TOO_MANY), BAD_REQUEST),
    Failure("no documents", rerank(documents=[]), BAD_REQUEST),
    Failure("limit of a document", rerank(max_tokens_per_doc=64), BAD_REQUEST),
]


def embed_with_key(server: Server, key: str, retry: bool) -> Any:
    with connect(server, api_key=key, max_retries=2 if retry else 0) as client:
        found = client.embed(texts=TEXTS, model=MODEL, input_type="search_document")
    return found.embeddings.float


KEY_USE = KeyUse(
    embed_with_key,
    "cohere.errors.UnauthorizedError",
    "cohere.errors.TooManyRequestsError",
    unavailable="cohere.errors.ServiceUnavailableError",
)
