"""What each module of this folder declares about an unmodified client: `CALLS`, `FAILURES` and `KEY_USE`.

`tests/e2e/test_clients.py` runs them against a service. `python -m tests.e2e.client_calls` prints a table of them.

A module of `ISOLATED` declares its `PACKAGE`, too. It is imported in the environment of its client, where neither
pytest nor the service is installed. `OPTIONS` in a module are further flags of its service.
"""

import asyncio
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

TEXTS = ["Ada drew a comet.", "It rained in Turin."]
QUERY = "Who drew a comet?"
# Importable packages; their modules here end with _client.
CLIENTS = ("openai", "huggingface_hub", "cohere")
# Clients in environments of their own, `environments/NAME.txt`; their modules here end with _client, too.
ISOLATED: Mapping[str, str] = {
    "langchain_openai": "frameworks",
    "langchain_openai_tokens": "frameworks",
    "langchain_huggingface": "frameworks",
    "llama_index_openai": "frameworks",
    "llama_index_tei": "frameworks",
    "haystack": "frameworks",
    "infinity": "frameworks",
    "kserve": "kserve",
    "litellm": "litellm",
    "tritonclient": "triton",
}
TOO_MANY = ["a"] * 9  # inputs; the service under test takes 8
TOO_LONG = "word " * 600
Run = Callable[["Server"], Any]


@dataclass(frozen=True)
class Call:
    """A call of a client, and the answer that the native API gives to the same inputs.

    name: the call as the client's documentation writes it
    run, expected: return numbers, texts, or lists and dictionaries of these, which must be equal to 1e-6
    """

    name: str
    run: Run
    expected: Run


@dataclass(frozen=True)
class Failure:
    """A call that fails, and the exception class that the client raises against the original server.

    name: the reason
    error: the class, by its module and name
    """

    name: str
    run: Run
    error: str


@dataclass(frozen=True)
class KeyUse:
    """A call with a key.

    run: makes a call with a key, and lets the client retry or not
    unauthorized, limited: the exception classes for a wrong key, and for too many requests
    retries: whether the client can repeat a request that was refused with 429 or 503
    name: tells it from others of the same client
    unavailable: the exception class for a service that is not ready; `limited` if empty
    """

    run: "Callable[[Server, str, bool], Any]"
    unauthorized: str
    limited: str
    retries: bool = True
    name: str = ""
    unavailable: str = ""

    @property
    def on_503(self) -> str:
        return self.unavailable or self.limited


def openai_key_use(run: "Callable[[Server, str, bool], Any]") -> KeyUse:
    """Return a call of a client that raises the errors of OpenAI's client."""
    return KeyUse(
        run,
        "openai.AuthenticationError",
        "openai.RateLimitError",
        unavailable="openai.InternalServerError",
    )


def load(client: str) -> Any:
    """Import the module of a client, whether or not the client is installed."""
    return importlib.import_module(f"tests.e2e.client_calls.{client}_client")


def key_uses(module: Any) -> list[KeyUse]:
    found: KeyUse | list[KeyUse] = module.KEY_USE
    return found if isinstance(found, list) else [found]


def error_class(name: str) -> type[Exception]:
    """Return an exception class by its module and name."""
    module, _, attribute = name.rpartition(".")
    found: type[Exception] = getattr(importlib.import_module(module), attribute)
    return found


def calling(connect: "Callable[[Server], Any]", method: str, argument: object) -> Run:
    """Return a function that calls a method of a client, and runs its coroutine if it is one."""

    def run(server: "Server") -> Any:
        found = getattr(connect(server), method)(argument)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    return run


def native(path: str, body: object, *keys: str | int) -> Run:
    """Return a function that gets a part of the native answer."""

    def answer(server: "Server") -> Any:
        found = server.answer(f"/native{path}", body)
        for key in keys:
            found = found[key]
        return found

    return answer
