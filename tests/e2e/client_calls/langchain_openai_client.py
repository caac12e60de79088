"""LangChain's client of OpenAI's embeddings: https://docs.langchain.com/oss/python/integrations/text_embedding/openai"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.client_calls.records import (
    ISOLATED,
    QUERY,
    TEXTS,
    TOO_MANY,
    Call,
    Failure,
    Run,
    calling,
    native,
    openai_key_use,
)

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

PACKAGE = "langchain-openai"
BAD_REQUEST = "openai.BadRequestError"
# The table of OpenAI's tokens. tiktoken would download it, and names the file by a hash of its URL; llama-index-core
# contains it.
LIBRARY = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
ENVIRONMENT = Path(__file__).parents[3] / "build" / "clients" / ISOLATED["langchain_openai"]
TABLE = (
    ENVIRONMENT / LIBRARY / "llama_index/core/_static/tiktoken_cache"
) / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"


def connect(server: "Server", **options: Any) -> Any:
    from langchain_openai import OpenAIEmbeddings

    own = {"check_embedding_ctx_length": False, "max_retries": 0, "api_key": "none"}
    return OpenAIEmbeddings(**{"model": "tasks", "base_url": f"{server.url}/v1", **own, **options})


def embed(method: str, texts: object, **options: Any) -> Run:
    return calling(lambda server: connect(server, **options), method, texts)


def embed_tokens(method: str, texts: object, **options: Any) -> Run:
    """Return a function that calls a method of the client, which sends tokens."""
    run = embed(method, texts, check_embedding_ctx_length=True, **options)

    def with_table(server: "Server") -> Any:
        os.environ["TIKTOKEN_CACHE_DIR"] = str(TABLE.parent)
        return run(server)

    return with_table


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
    Failure("tokens of OpenAI's models", embed_tokens("embed_documents", TEXTS), BAD_REQUEST),
    Failure("too many dimensions", embed("embed_query", QUERY, dimensions=65), BAD_REQUEST),
]


def embed_with_key(server: "Server", key: str, retry: bool) -> Any:
    return embed("embed_query", QUERY, api_key=key, max_retries=2 if retry else 0)(server)


KEY_USE = openai_key_use(embed_with_key)
