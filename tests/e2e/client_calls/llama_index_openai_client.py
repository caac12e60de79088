"""LlamaIndex's client of servers like OpenAI's: https://pypi.org/project/llama-index-embeddings-openai-like"""

from typing import TYPE_CHECKING, Any

from tests.e2e.client_calls.records import (
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

PACKAGE = "llama-index-embeddings-openai-like"
BAD_REQUEST = "openai.BadRequestError"


def connect(server: "Server", **options: Any) -> Any:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    own = {"model_name": "tasks", "api_base": f"{server.url}/v1", "max_retries": 0}
    return OpenAILikeEmbedding(**{**own, **options})


def embed(method: str, texts: object, **options: Any) -> Run:
    return calling(lambda server: connect(server, **options), method, texts)


VECTORS = native("/embed", {"inputs": TEXTS}, "embeddings")
OF_QUERY = native("/embed", {"inputs": QUERY}, "embeddings", 0)
CALLS = [
    Call("get_text_embedding_batch", embed("get_text_embedding_batch", TEXTS), VECTORS),
    Call("get_text_embedding", embed("get_text_embedding", QUERY), OF_QUERY),
    Call("get_query_embedding", embed("get_query_embedding", QUERY), OF_QUERY),
    Call("aget_text_embedding_batch", embed("aget_text_embedding_batch", TEXTS), VECTORS),
    Call("aget_query_embedding", embed("aget_query_embedding", QUERY), OF_QUERY),
    Call(
        "OpenAILikeEmbedding(dimensions=8).get_query_embedding",
        embed("get_query_embedding", QUERY, dimensions=8),
        native("/embed", {"inputs": QUERY, "dimensions": 8}, "embeddings", 0),
    ),
    Call(
        "OpenAILikeEmbedding(embed_batch_size=4).get_text_embedding_batch",
        embed("get_text_embedding_batch", TEXTS * 4, embed_batch_size=4),
        native("/embed", {"inputs": TEXTS * 4}, "embeddings"),
    ),
]
FAILURES = [
    Failure("unknown model", embed("get_query_embedding", QUERY, model_name="huge"), "openai.NotFoundError"),
    Failure("too many texts", embed("get_text_embedding_batch", TOO_MANY), BAD_REQUEST),
    Failure("too many dimensions", embed("get_query_embedding", QUERY, dimensions=65), BAD_REQUEST),
]  # fmt: skip


def embed_with_key(server: "Server", key: str, retry: bool) -> Any:
    return embed("get_query_embedding", QUERY, api_key=key, max_retries=3 if retry else 0)(server)


KEY_USE = openai_key_use(embed_with_key)
