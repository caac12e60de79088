"""Unmodified clients of other servers, against a real server: answers, errors, keys and retries."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.keys import make_key, record
from tests.e2e.client_calls.records import Call, Failure, KeyUse, error_class, modules
from tests.e2e.conftest import Server, serving

pytestmark = [
    pytest.mark.e2e,
    # cohere calls what pydantic will remove.
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),
]

OPTIONS = ("--max-inputs-per-request", 8, "--grpc-port", 0)
MODULES = dict(modules())


def cases(field: str) -> list[Any]:
    """Return a parameter for each record of each client."""
    found = []
    for client, module in MODULES.items():
        missing = importlib.util.find_spec(client) is None
        skip = pytest.mark.skipif(missing, reason=f"the client {client} is not installed")
        records = getattr(module, field)
        for one in records if isinstance(records, list) else [records]:
            name = f"{client}: {one.name}" if hasattr(one, "name") else client
            found.append(pytest.param(one, id=name, marks=skip))
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
        if type(error) is error_class(failure.error):
            return ""
        return f"raised {type(error).__module__}.{type(error).__qualname__}: {error}"[:500]
    return f"returned {found!r}"[:500]


@pytest.fixture(scope="module")
def server(tasks_bundle: Path) -> Iterator[Server]:
    with serving(tasks_bundle, *OPTIONS) as running:
        yield running


@pytest.mark.parametrize("call", cases("CALLS"))
def test_answers(server: Server, call: Call) -> None:
    """A client gets the native API's answers."""
    assert not differs(server, call)


@pytest.mark.parametrize("failure", cases("FAILURES"))
def test_errors(server: Server, failure: Failure) -> None:
    """A client raises the class that it raises against the original server."""
    assert not raised(server, failure)


def exhaust(use: KeyUse, server: Server, key: str) -> None:
    """Call until the client raises the error of a refused request."""
    for _ in range(200):
        use.run(server, key, False)


@pytest.mark.parametrize("use", cases("KEY_USE"))
def test_keys(tasks_bundle: Path, tmp_path: Path, use: KeyUse) -> None:
    """A client sends its key where the service reads it, and repeats a refused request after `Retry-After`."""
    free, slow, keys = make_key(), make_key(), tmp_path / "keys.toml"
    keys.write_text(record("free", free) + record("slow", slow) + "requests_per_minute = 60\n")
    with serving(tasks_bundle, "--api-keys", keys, "--grpc-port", 0) as server:
        expected = use.run(server, free, False)
        with pytest.raises(error_class(use.unauthorized)):
            use.run(server, "wrong", False)
        with pytest.raises(error_class(use.limited)):
            exhaust(use, server, slow)
        if use.retries:
            for _ in range(3):
                assert equal(use.run(server, slow, True), expected)
