"""LangChain's client of Hugging Face's endpoints: text-embeddings-inference and the Inference API.

Source: https://docs.langchain.com/oss/python/integrations/text_embedding/huggingfacehub
Its `model` cannot be a URL, so that of the server is in its `client` and its `async_client`.
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

PACKAGE = "langchain-huggingface"
ERROR = "huggingface_hub.errors.HfHubHTTPError"
TEI, HF = "/tei", "/hf/pipeline/feature-extraction"


def connect(server: "Server", path: str = TEI, key: str | None = None, **options: Any) -> Any:
    from huggingface_hub import AsyncInferenceClient, InferenceClient
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    found = HuggingFaceEndpointEmbeddings(**options)
    found.client = InferenceClient(f"{server.url}{path}", token=key)
    found.async_client = AsyncInferenceClient(f"{server.url}{path}", token=key)
    return found


def embed(method: str, texts: object, **options: Any) -> Run:
    return calling(lambda server: connect(server, **options), method, texts)


VECTORS = native("/embed", {"inputs": TEXTS}, "embeddings")
OF_QUERY = native("/embed", {"inputs": QUERY}, "embeddings", 0)
CALLS = [
    Call("embed_documents", embed("embed_documents", TEXTS), VECTORS),
    Call("embed_query", embed("embed_query", QUERY), OF_QUERY),
    Call("aembed_documents", embed("aembed_documents", TEXTS), VECTORS),
    Call("aembed_query", embed("aembed_query", QUERY), OF_QUERY),
    Call("embed_documents, /hf", embed("embed_documents", TEXTS, path=HF), VECTORS),
    Call("aembed_query, /hf", embed("aembed_query", QUERY, path=HF), OF_QUERY),
    Call(
        "HuggingFaceEndpointEmbeddings(model_kwargs={'normalize': False}).embed_documents",
        embed("embed_documents", TEXTS, model_kwargs={"normalize": False}),
        native("/embed", {"inputs": TEXTS, "normalize": False}, "embeddings"),
    ),
]
FAILURES = [
    Failure("too many texts", embed("embed_documents", TOO_MANY), ERROR),
    Failure("too long", embed("embed_query", TOO_LONG, model_kwargs={"truncate": False}), ERROR),
]


def embed_with_key(server: "Server", key: str, retry: bool) -> Any:
    return embed("embed_query", QUERY, key=key)(server)


# The client itself does not repeat a request that was refused.
KEY_USE = KeyUse(embed_with_key, ERROR, ERROR, retries=False)
