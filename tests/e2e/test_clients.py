"""Unmodified clients of other servers, against a real server: answers, errors, keys and retries."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from service.keys import make_key, record
from tests.e2e.client_calls.isolated import ClientError
from tests.e2e.client_calls.records import Call, Failure, KeyUse
from tests.e2e.client_calls.table import Client, clients, is_class
from tests.e2e.conftest import Server, children, serving, until
from tests.e2e.proxy import first_unready

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    # cohere calls what pydantic will remove.
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),
]

ALIASES = (
    "text-embedding-3-small=tasks,rerank-v3.5=tasks"  # names that clients send to other servers
)
OPTIONS = ("--max-inputs-per-request", 8, "--aliases", ALIASES)
ANY_KEY = "none"  # for services without keys
RETRY_AFTER_S = 1.0
CLIENTS = [*clients()]


def cases(field: str) -> list[Any]:
    """Return a client and a record as parameters, for each record of each client."""
    found = []
    for client in CLIENTS:
        marks = [pytest.mark.skipif(bool(client.missing), reason=client.missing)]
        marks += [pytest.mark.slow] if client.is_isolated else []
        for one in getattr(client, field):
            name = f"{client.name}: {one.name}" if one.name else client.name
            found.append(pytest.param(client, one, id=name, marks=marks))
    return found


def differs(server: Server, call: Call) -> str:
    """Return how the client's answer differs from the native API's; empty if it does not."""
    found, expected = call.run(server), call.expected(server)
    return "" if equal(found, expected) else f"{found!r} is not {expected!r}"[:500]


def equal(found: Any, expected: Any) -> bool:
    """Return whether two answers are equal, numbers to 1e-6."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(equal(found[key], expected[key]) for key in expected)
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, float):
        return bool(np.isclose(found, expected, rtol=1e-6, atol=1e-6))
    return bool(found == expected)


def raised(server: Server, failure: Failure) -> str:
    """Return what the client did instead of raising the expected class; empty if it raised that."""
    try:
        found = failure.run(server)
    except Exception as error:
        if is_class(error, failure.error):
            return ""
        kind = type(error)
        name = (
            error.name
            if isinstance(error, ClientError)
            else f"{kind.__module__}.{kind.__qualname__}"
        )
        return f"raised {name}: {error}"[:500]
    return f"returned {found!r}"[:500]


@pytest.fixture(scope="module")
def server_of(tasks_bundle: Path) -> Iterator[Callable[[Client], Server]]:
    """A function of a client: returns a service with the options of its records."""
    with ExitStack() as stack:

        @cache
        def start(options: tuple[str, ...]) -> Server:
            return stack.enter_context(serving(tasks_bundle, *OPTIONS, *options))

        yield lambda client: start(client.options)


@contextmanager
def not_ready(bundle: Path, *options: str | int) -> Iterator[Server]:
    """A service that answers with 503 and `Retry-After: 1`: it has no inference process, and cannot start one."""
    with serving(bundle, *map(str, options)) as server:
        (inference,) = children(server)["inference"]
        server.process.send_signal(signal.SIGSTOP)
        try:
            os.kill(inference, signal.SIGKILL)
            until(lambda: server.get("/health/ready").status == 503)
            yield server
        finally:
            server.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def unready_of(tasks_bundle: Path) -> Iterator[Callable[[Client], Server]]:
    """A function of a client: returns a service with the options of its records that is not ready."""
    with ExitStack() as stack:

        @cache
        def start(options: tuple[str, ...]) -> Server:
            return stack.enter_context(not_ready(tasks_bundle, *OPTIONS, *options))

        yield lambda client: start(client.options)


class Keyed(NamedTuple):
    """A service that requires keys: `free` without a limit, and one of each client's use with 60 requests a minute."""

    server: Server
    free: str
    slow: Mapping[tuple[str, str], str]


@pytest.mark.parametrize(("client", "call"), cases("calls"))
def test_answers(server_of, client, call):
    """A client gets the native API's answers."""
    assert not differs(server_of(client), call)


@pytest.mark.parametrize(("client", "failure"), cases("failures"))
def test_errors(server_of, client, failure):
    """A client raises the class that it raises against the original server."""
    assert not raised(server_of(client), failure)


def error_of(use: KeyUse, server: Server, key: str, calls: int = 200) -> Exception:
    """Call until the client raises, at most `calls` times, and return that error."""
    for _ in range(calls):
        try:
            use.run(server, key, False)
        except Exception as error:
            return error
    raise AssertionError("no request was refused")


@pytest.fixture(scope="module")
def keyed_of(
    tasks_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Client], Keyed]]:
    """A function of a client: returns a service with the options of its records that requires keys."""
    file, free = tmp_path_factory.mktemp("keys") / "keys.toml", make_key()
    slow = {(client.name, use.name): make_key() for client in CLIENTS for use in client.key_uses}
    limited = (
        record(f"slow-{number}", key) + "requests_per_minute = 60\n"
        for number, key in enumerate(slow.values())
    )
    file.write_text(record("free", free) + "".join(limited))
    with ExitStack() as stack:

        @cache
        def start(options: tuple[str, ...]) -> Keyed:
            server = stack.enter_context(serving(tasks_bundle, "--api-keys", file, *options))
            return Keyed(server, free, slow)

        yield lambda client: start(client.options)


@pytest.mark.parametrize(("client", "use"), cases("key_uses"))
def test_keys(keyed_of, client, use):
    """A client sends its key where the service reads it, and repeats a refused request after `Retry-After`."""
    server, free, slow = keyed_of(client)
    key = slow[client.name, use.name]
    expected = use.run(server, free, False)
    assert is_class(error_of(use, server, "wrong"), use.unauthorized)
    authorized = {"Authorization": f"Bearer {key}"}
    body = {"inputs": "Ada drew a comet."}
    statuses = (server.post("/native/embed", body, authorized).status for _ in range(200))
    assert 429 in statuses  # sooner than by the client's own requests
    assert is_class(error_of(use, server, key), use.limited)
    if use.retries:
        for _ in range(3):
            assert equal(use.run(server, key, True), expected)


def unavailable_fault(ready: Server, unready: Server, use: KeyUse) -> str:
    """Return how a client differs from its record where a service is not ready; empty if it does not.

    It raises its class. It repeats a request that is refused with 503 after `Retry-After`, if it retries.
    """
    if not is_class(error_of(use, unready, ANY_KEY, calls=1), use.on_503):
        return f"does not raise {use.on_503}"
    expected = use.run(ready, ANY_KEY, False)
    with first_unready(unready, ready) as proxy:
        try:
            found = use.run(replace(ready, url=proxy.url), ANY_KEY, True)
        except Exception as error:
            right = not use.retries and is_class(error, use.on_503)
            raised = "" if right else f"raised {error!r}"
        else:
            raised = "" if use.retries and equal(found, expected) else f"returned {found!r}"
        statuses = [post.status for post in proxy.posts]
        if raised or statuses != ([503, 200] if use.retries else [503]):
            return f"{raised} after answers with {statuses}"[:500]
        waited_s = proxy.posts[-1].at - proxy.posts[0].at
    return f"waited {waited_s:.2f} s" if use.retries and waited_s < RETRY_AFTER_S else ""


@pytest.mark.parametrize(("client", "use"), cases("key_uses"))
def test_unavailable(server_of, unready_of, client, use):
    """A client raises its class for a service that is not ready, or repeats its request after `Retry-After`."""
    assert not unavailable_fault(server_of(client), unready_of(client), use)
