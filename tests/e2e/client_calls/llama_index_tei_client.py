"""LlamaIndex's clients of text-embeddings-inference: embeddings, and a postprocessor that reranks.

Sources: https://pypi.org/project/llama-index-embeddings-text-embeddings-inference,
https://pypi.org/project/llama-index-postprocessor-tei-rerank
They do not check the status of a response, so an error of the service is one of reading the response.
"""

from typing import TYPE_CHECKING, Any

from tests.e2e.client_calls.records import (
    QUERY,
    TEXTS,
    TOO_LONG,
    TOO_MANY,
    Call,
    Failure,
    KeyUse,
    Run,
    calling,
    native,
)

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

PACKAGE = "llama-index-embeddings-text-embeddings-inference"


def embed(method: str, texts: object, **options: Any) -> Run:
    def connect(server: "Server") -> Any:
        from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

        return TextEmbeddingsInference("tasks", base_url=f"{server.url}/tei", **options)

    return calling(connect, method, texts)


def rerank(texts: list[str], **options: Any) -> Run:
    """Return a function that reranks texts, and returns each with its score."""

    def run(server: "Server") -> Any:
        from llama_index.core.schema import NodeWithScore, TextNode
        from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

        nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in texts]
        client = TextEmbeddingInference(base_url=f"{server.url}/tei", **options)
        found = client.postprocess_nodes(nodes, query_str=QUERY)
        return [{"text": one.node.text, "score": one.score} for one in found]

    return run


def native_rank(server: "Server") -> Any:
    ranked = native("/rerank", {"query": QUERY, "documents": TEXTS}, "results")(server)
    return [{"text": TEXTS[one["index"]], "score": one["score"]} for one in ranked]


VECTORS = native("/embed", {"inputs": TEXTS}, "embeddings")
OF_QUERY = native("/embed", {"inputs": QUERY}, "embeddings", 0)
CALLS = [
    Call("get_text_embedding_batch", embed("get_text_embedding_batch", TEXTS), VECTORS),
    Call("get_text_embedding", embed("get_text_embedding", QUERY), OF_QUERY),
    Call("get_query_embedding", embed("get_query_embedding", QUERY), OF_QUERY),
    Call("aget_text_embedding_batch", embed("aget_text_embedding_batch", TEXTS), VECTORS),
    Call("aget_query_embedding", embed("aget_query_embedding", QUERY), OF_QUERY),
    Call("postprocess_nodes", rerank(TEXTS), native_rank),
    Call(
        "TextEmbeddingInference(top_n=1).postprocess_nodes",
        rerank(TEXTS, top_n=1),
        lambda server: native_rank(server)[:1],
    ),
]
FAILURES = [
    Failure(
        "too long", embed("get_query_embedding", TOO_LONG, truncate_text=False), "builtins.KeyError"
    ),
    Failure("too many nodes", rerank(TOO_MANY), "builtins.AssertionError"),
]


def embed_with_key(server: "Server", key: str, retry: bool) -> Any:
    return embed("get_query_embedding", QUERY, auth_token=key)(server)


def rerank_with_key(server: "Server", key: str, retry: bool) -> Any:
    return rerank(TEXTS, auth_token=f"Bearer {key}")(server)


KEY_USE = [
    KeyUse(embed_with_key, "builtins.KeyError", "builtins.KeyError", False, "embeddings"),
    KeyUse(rerank_with_key, "builtins.TypeError", "builtins.TypeError", False, "rerank"),
]
