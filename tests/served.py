"""The service within the process of a test, on one thread of a CPU: its engines, its application and a client of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from service.api.app import create_app
from service.engines.engine import Engine
from service.engines.registry import Engines
from service.observability.metrics import Metrics
from service.processes.single_process import open_local_engines
from service.settings import Settings


def settings_of(*bundles: Path, **fields: Any) -> Settings:
    return Settings(bundles=bundles, **{"provider": "cpu", "threads": 1, **fields})


def app_of(*bundles: Path, **fields: Any) -> FastAPI:
    """The application with engines of these bundles; fields: of its settings."""
    metrics = Metrics()
    return create_app(
        settings_of(*bundles, **fields), partial(open_local_engines, metrics), metrics
    )


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quartet")


@asynccontextmanager
async def living(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app between its startup and its shutdown."""
    async with app.router.lifespan_context(app), client_of(app) as client:
        yield client


@asynccontextmanager
async def opened(*bundles: Path, **fields: Any) -> AsyncIterator[Engines]:
    async with open_local_engines(Metrics(), settings_of(*bundles, **fields)) as engines:
        yield engines


@asynccontextmanager
async def engine_of(bundle: Path, **fields: Any) -> AsyncIterator[Engine]:
    async with opened(bundle, **fields) as engines:
        yield engines.get(None)
