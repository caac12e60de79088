"""LangChain's client of OpenAI's embeddings: https://docs.langchain.com/oss/python/integrations/text_embedding/openai"""

import asyncio
import importlib.util
import os
from pathlib import Path
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

PACKAGE = "langchain-openai"
BAD_REQUEST = "openai.BadRequestError"


def connect(server: "Server", **options: Any) -> Any:
    from langchain_openai import OpenAIEmbeddings

    own = {"check_embedding_ctx_length": False, "max_retries": 0, "api_key": "none"}
    return OpenAIEmbeddings(**{"model": "tasks", "base_url": f"{server.url}/v1", **own, **options})


def embed(method: str, texts: object, **options: Any) -> Run:
    """Return a function that calls a method of the client, whose coroutine is run if it is one."""

    def run(server: "Server") -> Any:
        found = getattr(connect(server, **options), method)(texts)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    return run


def embed_tokens(texts: list[str]) -> Run:
    """Return a function that embeds texts with the client's defaults: it sends tokens of OpenAI's models.

    tiktoken would download their table; llama-index-core contains it.
    """

    def run(server: "Server") -> Any:
        core = importlib.util.find_spec("llama_index.core")
        assert core is not None
        assert core.origin is not None
        os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(core.origin).parent / "_static/tiktoken_cache")
        return embed("embed_documents", texts, check_embedding_ctx_length=True)(server)

    return run


VECTORS = native("/embed", {"inputs": TEXTS}, "embeddings")
OF_QUERY = native("/embed", {"inputs": QUERY}, "embeddings", 0)
CALLS = [
    Call("embed_documents", embed("embed_documents", TEXTS), VECTORS),
    Call("embed_query", embed("embed_query", QUERY), OF_QUERY),
    Call("aembed_documents", embed("aembed_documents", TEXTS), VECTORS),
    Call("aembed_query", embed("aembed_query", QUERY), OF_QUERY),
    Call(
        "OpenAIEmbeddings(dimensions=8).embed_documents",
        embed("embed_documents", TEXTS, dimensions=8),
        native("/embed", {"inputs": TEXTS, "dimensions": 8}, "embeddings"),
    ),
    Call(
        "OpenAIEmbeddings(chunk_size=4).embed_documents",
        embed("embed_documents", TEXTS * 4, chunk_size=4),
        native("/embed", {"inputs": TEXTS * 4}, "embeddings"),
    ),
]
FAILURES = [
    Failure("unknown model", embed("embed_query", QUERY, model="huge"), "openai.NotFoundError"),
    Failure("too many texts", embed("embed_documents", TOO_MANY), BAD_REQUEST),
    Failure("too many dimensions", embed("embed_query", QUERY, dimensions=65), BAD_REQUEST),
    Failure("tokens of OpenAI's models", embed_tokens(["Schadenfreude"]), BAD_REQUEST),
]


def embed_with_key(server: "Server", key: str, retry: bool) -> Any:
    return embed("embed_query", QUERY, api_key=key, max_retries=2 if retry else 0)(server)


KEY_USE = KeyUse(embed_with_key, "openai.AuthenticationError", "openai.RateLimitError")
