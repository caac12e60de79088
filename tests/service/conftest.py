import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import cache
from typing import Any

import httpx
import pytest
import uvloop
from fastapi import FastAPI
from structlog.testing import capture_logs
from structlog.typing import EventDict

from service.api.app import create_app
from service.observability.logs import add_names
from service.observability.metrics import Metrics
from service.settings import Settings
from service.variables import PREFIX
from tests.served import living
from tests.service.fakes import FakeEngine, FakeEngines


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the event loop that serves, and those that name their loops also on asyncio's own."""
    factories = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    mark = item.get_closest_marker("asyncio")
    if mark is None or "loop_factories" not in mark.kwargs:
        del factories["asyncio"]
    return factories


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings come from the test alone."""
    for name in os.environ:
        if name.upper().startswith(PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def lines() -> Iterator[list[EventDict]]:
    """What is logged."""
    with capture_logs(processors=[add_names]) as lines:
        yield lines


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engines(engine: FakeEngine) -> FakeEngines:
    return FakeEngines(engine)


@pytest.fixture
def app(engines: FakeEngines) -> FastAPI:
    return create_app(Settings(), engines.open, Metrics())


@cache
def make_document() -> dict[str, Any]:
    return create_app(Settings(), FakeEngines(FakeEngine()).open, Metrics()).openapi()


@pytest.fixture
def document() -> dict[str, Any]:
    """The OpenAPI document of a service without keys. It takes half a second, and all tests read the same one."""
    return make_document()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with living(app) as client:
        yield client


@pytest.fixture
def client_with(
    engines: FakeEngines,
) -> Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]:
    """A client of an app with settings of its own."""
    return lambda **settings: living(create_app(Settings(**settings), engines.open, Metrics()))
