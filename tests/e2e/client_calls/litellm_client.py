"""LiteLLM, which calls the APIs of several servers, with names of models that the client invents: https://docs.litellm.ai"""

import os
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

PACKAGE = "litellm"
OPTIONS = ("--unknown-model", "default")
VECTORS = native("/embed", {"inputs": TEXTS}, "embeddings")
RANKED = native("/rerank", {"query": QUERY, "documents": TEXTS, "return_text": True}, "results")


def embed(model: str, path: str, **options: Any) -> Run:
    """Return a function that embeds texts by the provider in the model's name."""

    def run(server: "Server") -> Any:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        import litellm

        own = {"input": TEXTS, "api_key": "none", "max_retries": 0}
        found = litellm.embedding(model=model, api_base=server.url + path, **{**own, **options})
        return [one["embedding"] for one in found.data]

    return run


def rerank(model: str, path: str) -> Run:
    def run(server: "Server") -> Any:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        import litellm

        found = litellm.rerank(
            model=model, query=QUERY, documents=TEXTS, api_base=server.url + path, api_key="none"
        )
        return [
            {
                "index": one["index"],
                "score": one["relevance_score"],
                "text": one["document"]["text"],
            }
            for one in found.results
        ]

    return run


CALLS = [
    Call("embedding('openai/...')", embed("openai/text-embedding-3-small", "/v1"), VECTORS),
    Call("embedding('hosted_vllm/...')", embed("hosted_vllm/BAAI/bge-m3", "/vllm/v1"), VECTORS),
    Call("embedding('infinity/...')", embed("infinity/BAAI/bge-m3", "/infinity"), VECTORS),
    Call(
        "embedding('cohere/...')",
        embed("cohere/embed-v4.0", "/cohere/v1/embed", input_type="search_document"),
        VECTORS,
    ),
    Call("rerank('cohere/...')", rerank("cohere/rerank-v3.5", "/cohere"), RANKED),
    Call("rerank('jina_ai/...')", rerank("jina_ai/jina-reranker-v2", "/v1"), RANKED),
    Call("rerank('hosted_vllm/...')", rerank("hosted_vllm/BAAI/reranker", "/vllm"), RANKED),
    Call("rerank('infinity/...')", rerank("infinity/BAAI/reranker", "/infinity"), RANKED),
    Call("rerank('huggingface/...')", rerank("huggingface/BAAI/reranker", "/tei"), RANKED),
]
FAILURES = [
    Failure(
        "too many texts",
        embed("openai/text-embedding-3-small", "/v1", input=TOO_MANY),
        "litellm.exceptions.BadRequestError",
    )
]
KEY_USE: list[KeyUse] = []
