"""KServe's client of its first protocol, with a name of a model that the client invents: https://kserve.github.io"""

import asyncio
from typing import TYPE_CHECKING, Any

from tests.e2e.client_calls.records import TEXTS, TOO_MANY, Call, Failure, KeyUse, Run, native

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

PACKAGE = "kserve"
OPTIONS = ("--unknown-model", "default")


def call(method: str, *arguments: Any, **options: Any) -> Run:
    """Return a function that calls a method of the client with the URL of the service and these arguments."""

    async def answer(server: "Server") -> Any:
        from kserve import InferenceRESTClient
        from kserve.inference_client import RESTConfig

        client = InferenceRESTClient(RESTConfig(protocol="v1"))
        return await getattr(client, method)(server.url, *arguments, **options)

    return lambda server: asyncio.run(answer(server))


def predict(texts: list[str]) -> Run:
    run = call("infer", {"instances": texts}, model_name="bert")
    return lambda server: run(server)["predictions"]


CALLS = [
    Call("infer", predict(TEXTS), native("/embed", {"inputs": TEXTS}, "embeddings")),
    Call("is_model_ready", call("is_model_ready", "bert"), lambda _: True),
]
FAILURES = [Failure("too many texts", predict(TOO_MANY), "httpx.HTTPStatusError")]
KEY_USE: list[KeyUse] = []
