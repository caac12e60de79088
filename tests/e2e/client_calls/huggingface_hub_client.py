"""Hugging Face's client, which calls a server of text-embeddings-inference by its URL.

Source: https://github.com/huggingface/huggingface_hub
"""

from typing import Any

from tests.e2e.client_calls.records import TEXTS, Call, Failure, KeyUse, Run, native
from tests.e2e.conftest import Server

ERROR = "huggingface_hub.errors.HfHubHTTPError"


def call(method: str, *arguments: Any, **options: Any) -> Run:
    def run(server: Server) -> Any:
        return plain(getattr(connect(server), method)(*arguments, **options))

    return run


def connect(server: Server, **options: Any) -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(f"{server.url}/tei", **options)


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


CALLS = [
    Call(
        "feature_extraction",
        call("feature_extraction", TEXTS[0]),
        native("/embed", {"inputs": TEXTS[0]}, "embeddings"),
    ),
    Call(
        "feature_extraction(normalize=False, truncate=True)",
        call("feature_extraction", TEXTS[0], normalize=False, truncate=True),
        native("/embed", {"inputs": TEXTS[0], "normalize": False}, "embeddings"),
    ),
    Call(
        "sentence_similarity",
        call("sentence_similarity", TEXTS[0], other_sentences=TEXTS),
        native("/similarity", {"source": TEXTS[0], "inputs": TEXTS}, "results"),
    ),
]
FAILURES = [
    Failure("too long", call("feature_extraction", "word " * 600, truncate=False), ERROR),
]


def embed_with_key(server: Server, key: str, retry: bool) -> Any:
    return plain(connect(server, token=key).feature_extraction(TEXTS[0]))


# The client itself does not repeat a request that was refused.
KEY_USE = KeyUse(embed_with_key, ERROR, ERROR, retries=False)
