"""Haystack's components for text-embeddings-inference: https://pypi.org/project/huggingface-api-haystack

The ranker sends requests to `/rerank` of the server's host whatever path its URL has.
"""

import asyncio
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
    native,
)

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

PACKAGE = "huggingface-api-haystack"
OPTIONS = ("--root-dialect", "tei")
HUB_ERROR = "huggingface_hub.errors.HfHubHTTPError"
RANKER_ERROR = "builtins.RuntimeError"


def secret(key: str | None) -> Any:
    from haystack.utils import Secret

    return Secret.from_token(key) if key else None


def documents(texts: list[str]) -> Any:
    from haystack import Document

    return [Document(content=text, meta={"index": index}) for index, text in enumerate(texts)]


def embed_text(text: str, key: str | None = None, *, is_async: bool = False, **options: Any) -> Run:
    def run(server: "Server") -> Any:
        from haystack_integrations.components.embedders.huggingface_api import (
            HuggingFaceAPITextEmbedder,
        )

        api = {"api_type": "text_embeddings_inference", "api_params": {"url": server.url}}
        embedder = HuggingFaceAPITextEmbedder(**api, token=secret(key), **options)
        found = asyncio.run(embedder.run_async(text)) if is_async else embedder.run(text)
        return found["embedding"]

    return run


def embed_documents(texts: list[str], *, is_async: bool = False, **options: Any) -> Run:
    def run(server: "Server") -> Any:
        from haystack_integrations.components.embedders.huggingface_api import (
            HuggingFaceAPIDocumentEmbedder,
        )

        api = {"api_type": "text_embeddings_inference", "api_params": {"url": server.url}}
        embedder = HuggingFaceAPIDocumentEmbedder(**api, token=None, progress_bar=False, **options)
        asked = documents(texts)
        found = asyncio.run(embedder.run_async(asked)) if is_async else embedder.run(asked)
        return [one.embedding for one in found["documents"]]

    return run


def embed_sparse(component: str, argument: Any) -> Run:
    """Return a function that runs a component, and returns the indices and values of the first vector."""

    def run(server: "Server") -> Any:
        from haystack_integrations.components.embedders import huggingface_api

        embedder = getattr(huggingface_api, component)(api_base_url=server.url, token=None)
        if isinstance(argument, str):
            found = embedder.run(argument)["sparse_embedding"]
        else:
            found = embedder.run(documents(argument))["documents"][0].sparse_embedding
        return [found.indices, found.values]

    return run


def native_sparse(text: str) -> Run:
    def run(server: "Server") -> Any:
        found = native("/embed-sparse", {"inputs": text}, "embeddings", 0)(server)
        return [found["indices"], found["values"]]

    return run


def rerank(
    texts: list[str], key: str | None = None, *, is_async: bool = False, **options: Any
) -> Run:
    """Return a function that reranks texts, and returns the index and the score of each."""

    def run(server: "Server") -> Any:
        from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

        ranker = HuggingFaceTEIRanker(
            **{"url": server.url, "token": secret(key), "max_retries": 1, **options}
        )
        asked = {"query": QUERY, "documents": documents(texts)}
        found = asyncio.run(ranker.run_async(**asked)) if is_async else ranker.run(**asked)
        return [{"index": one.meta["index"], "score": one.score} for one in found["documents"]]

    return run


VECTORS = native("/embed", {"inputs": TEXTS, "normalize": False}, "embeddings")
OF_QUERY = native("/embed", {"inputs": QUERY, "normalize": False}, "embeddings", 0)
RANKED = native("/rerank", {"query": QUERY, "documents": TEXTS}, "results")
CALLS = [
    Call("HuggingFaceAPITextEmbedder.run", embed_text(QUERY), OF_QUERY),
    Call("HuggingFaceAPITextEmbedder.run_async", embed_text(QUERY, is_async=True), OF_QUERY),
    Call(
        "HuggingFaceAPITextEmbedder(normalize=True).run",
        embed_text(QUERY, normalize=True),
        native("/embed", {"inputs": QUERY}, "embeddings", 0),
    ),
    Call("HuggingFaceAPIDocumentEmbedder.run", embed_documents(TEXTS), VECTORS),
    Call("HuggingFaceAPIDocumentEmbedder.run_async", embed_documents(TEXTS, is_async=True), VECTORS),
    Call(
        "HuggingFaceTEISparseTextEmbedder.run",
        embed_sparse("HuggingFaceTEISparseTextEmbedder", QUERY),
        native_sparse(QUERY),
    ),
    Call(
        "HuggingFaceTEISparseDocumentEmbedder.run",
        embed_sparse("HuggingFaceTEISparseDocumentEmbedder", TEXTS),
        native_sparse(TEXTS[0]),
    ),
    Call("HuggingFaceTEIRanker.run", rerank(TEXTS), RANKED),
    Call("HuggingFaceTEIRanker.run_async", rerank(TEXTS, is_async=True), RANKED),
    Call("HuggingFaceTEIRanker(top_k=1).run", rerank(TEXTS, top_k=1), lambda server: RANKED(server)[:1]),
    Call(
        "HuggingFaceTEIRanker(raw_scores=True).run",
        rerank(TEXTS, raw_scores=True),
        native("/rerank", {"query": QUERY, "documents": TEXTS, "raw_scores": True}, "results"),
    ),
]  # fmt: skip
FAILURES = [
    Failure("too long", embed_text(TOO_LONG, truncate=False), HUB_ERROR),
    Failure("too many documents", embed_documents(TOO_MANY), HUB_ERROR),
    Failure("too many documents to rank", rerank(TOO_MANY), RANKER_ERROR),
]


def embed_with_key(server: "Server", key: str, retry: bool) -> Any:
    return embed_text(QUERY, key)(server)


def rerank_with_key(server: "Server", key: str, retry: bool) -> Any:
    return rerank(TEXTS, key, max_retries=4 if retry else 1)(server)


KEY_USE = [
    KeyUse(embed_with_key, HUB_ERROR, HUB_ERROR, False, "embeddings"),
    KeyUse(rerank_with_key, RANKER_ERROR, RANKER_ERROR, True, "rerank"),
]
