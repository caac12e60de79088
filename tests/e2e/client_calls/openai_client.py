"""OpenAI's Python client: https://github.com/openai/openai-python"""

import asyncio
import base64
from typing import Any

import numpy as np

from tests.e2e.client_calls.records import (
    TEXTS,
    TOO_MANY,
    Call,
    Failure,
    Run,
    native,
    openai_key_use,
)
from tests.e2e.conftest import Server

MODEL = "tasks"


def connect(server: Server, **options: Any) -> Any:
    import openai

    url = f"{server.url}/v1"
    return openai.OpenAI(**{"base_url": url, "api_key": "none", "max_retries": 0, **options})


def embed(**options: Any) -> Run:
    def run(server: Server) -> Any:
        found = connect(server).embeddings.create(**{"input": TEXTS, "model": MODEL, **options})
        return [as_vector(one.embedding) for one in found.data]

    return run


def as_vector(embedding: Any) -> Any:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4").tolist()
    return embedding


def embed_async(server: Server) -> Any:
    import openai

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await client.embeddings.create(input=TEXTS, model=MODEL)

    return [one.embedding for one in asyncio.run(run()).data]


def embed_ids(server: Server) -> Any:
    tokens = server.answer("/tokenize", {"inputs": TEXTS[0]})["results"][0]["tokens"]
    ids = [token["id"] for token in tokens if token["sequence"] is not None]
    return embed(input=[ids])(server)


def count_tokens(server: Server) -> Any:
    return connect(server).embeddings.create(input=TEXTS, model=MODEL).usage.total_tokens


VECTORS = native("/embed", {"inputs": TEXTS}, "embeddings")
CALLS = [
    Call("embeddings.create", embed(), VECTORS),
    Call("embeddings.create(model='text-embedding-3-small')", embed(model="text-embedding-3-small"), VECTORS),
    Call("embeddings.create(encoding_format='float')", embed(encoding_format="float"), VECTORS),
    Call("embeddings.create(encoding_format='base64')", embed(encoding_format="base64"), VECTORS),
    Call(
        "embeddings.create(dimensions=8)",
        embed(dimensions=8),
        native("/embed", {"inputs": TEXTS, "dimensions": 8}, "embeddings"),
    ),
    Call("embeddings.create(input=ids)", embed_ids, native("/embed", {"inputs": TEXTS[:1]}, "embeddings")),
    Call("embeddings.create(...).usage", count_tokens, native("/embed", {"inputs": TEXTS}, "usage", "tokens")),
    Call("AsyncOpenAI().embeddings.create", embed_async, VECTORS),
    Call(
        "models.list",
        lambda server: [one.id for one in connect(server).models.list()],
        lambda server: [
            name
            for one in server.get("/models").json()["models"]
            for name in (one["id"], *one["aliases"])
        ],
    ),
    Call("models.retrieve", lambda server: connect(server).models.retrieve(MODEL).id, lambda _: "tasks@1"),
]  # fmt: skip
FAILURES = [
    Failure("unknown model", embed(model="huge"), "openai.NotFoundError"),
    Failure("no input", embed(input=[]), "openai.BadRequestError"),
    Failure("too many inputs", embed(input=TOO_MANY), "openai.BadRequestError"),
    Failure("too many dimensions", embed(dimensions=65), "openai.BadRequestError"),
    Failure("unknown format", embed(encoding_format="hex"), "openai.BadRequestError"),
    Failure("unknown field", embed(extra_body={"temperature": 1}), "openai.BadRequestError"),
    Failure("ids of another tokenizer", embed(input=[[100257]]), "openai.BadRequestError"),
]


def embed_with_key(server: Server, key: str, retry: bool) -> Any:
    client = connect(server, api_key=key, max_retries=2 if retry else 0)
    return [one.embedding for one in client.embeddings.create(input=TEXTS, model=MODEL).data]


KEY_USE = openai_key_use(embed_with_key)
