"""What each module of this folder declares about an unmodified client: `CALLS`, `FAILURES` and `KEY_USE`.

`tests/e2e/test_clients.py` runs them against a service. `python -m tests.e2e.client_calls` prints a table of them.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.e2e.conftest import Server

TEXTS = ["Ada drew a comet.", "It rained in Turin."]
CLIENTS = (
    "openai",
    "huggingface_hub",
    "tritonclient",
    "cohere",
)  # importable packages; their modules here end with _client
TOO_MANY = ["a"] * 9  # inputs; the service under test takes 8
Run = Callable[[Server], Any]


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
    """

    run: Callable[[Server, str, bool], Any]
    unauthorized: str
    limited: str
    retries: bool = True


def modules() -> Iterator[tuple[str, Any]]:
    """Yield the module of each client, by the client's package, whether or not the package is installed."""
    for client in CLIENTS:
        yield client, importlib.import_module(f"tests.e2e.client_calls.{client}_client")


def error_class(name: str) -> type[Exception]:
    """Return an exception class by its module and name."""
    module, _, attribute = name.rpartition(".")
    found: type[Exception] = getattr(importlib.import_module(module), attribute)
    return found


def native(path: str, body: object, *keys: str | int) -> Run:
    """Return a function that gets a part of the native answer."""

    def answer(server: Server) -> Any:
        found = server.answer(f"/native{path}", body)
        for key in keys:
            found = found[key]
        return found

    return answer
