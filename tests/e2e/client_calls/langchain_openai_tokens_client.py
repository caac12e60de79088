"""LangChain's client of OpenAI's embeddings with its defaults, and a service that has OpenAI's tokens."""

from typing import Any

from tests.e2e.client_calls.langchain_openai_client import BAD_REQUEST, TABLE, embed_tokens
from tests.e2e.client_calls.records import QUERY, TEXTS, Call, Failure, native

PACKAGE = "langchain-openai"
OPTIONS = ("--tiktoken-file", str(TABLE), "--unknown-model", "default")
DEFAULTS = {"model": "text-embedding-ada-002"}

VECTORS = native("/embed", {"inputs": TEXTS}, "embeddings")
OF_QUERY = native("/embed", {"inputs": QUERY}, "embeddings", 0)
CALLS = [
    Call("embed_documents", embed_tokens("embed_documents", TEXTS, **DEFAULTS), VECTORS),
    Call("embed_query", embed_tokens("embed_query", QUERY, **DEFAULTS), OF_QUERY),
    Call("aembed_documents", embed_tokens("aembed_documents", TEXTS, **DEFAULTS), VECTORS),
    Call("aembed_query", embed_tokens("aembed_query", QUERY, **DEFAULTS), OF_QUERY),
]
FAILURES = [
    Failure("too many dimensions", embed_tokens("embed_query", QUERY, dimensions=65), BAD_REQUEST)
]
KEY_USE: list[Any] = []
