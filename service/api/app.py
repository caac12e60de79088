"""The application: its lifespan, its routes, its pages, and its error responses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache, partial
from pathlib import Path
from sys import exception
from typing import Any

import orjson
import structlog
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as PlainRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import __version__
from service.api import admin, openapi, token_routes
from service.api.dialects.registry import DIALECTS, Paths
from service.api.native_routes import Route, router
from service.api.route_table import RouteTable
from service.engines.registry import Engines
from service.errors import MethodNotAllowed, NotFound
from service.middleware.access_control import LIVE, KeyCheck, access_checks
from service.middleware.early_rejection import EarlyRejection
from service.middleware.request_lifecycle import (
    LifecycleMiddleware,
    RequestLifecycle,
    check_refusal,
)
from service.middleware.service_state import Service
from service.middleware.tracing import tracing
from service.observability.metrics import Recorder
from service.settings import Settings
from service.shutdown import Stage

OpenEngines = Callable[[Settings], AbstractAsyncContextManager[Engines]]

log = structlog.get_logger()

DESCRIPTION = (
    "Classification, entities, answers, embeddings, reranking and fill-mask from one encoder."
)
DOCS = "/docs"
PAGES = Path(__file__).parent / "static"
SWAGGER_UI = ("fastapi_offline", "static")  # a package, which is not imported, and its folder
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self';"
    " style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",  # for browsers without support for frame-ancestors
}
# Swagger UI sets style attributes, has its icons in data URLs, and writes HTML that it has sanitized itself.
DOCS_HEADERS = {
    **PAGE_HEADERS,
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src 'self';"
    " style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
# The CORS middleware answers preflights before any access check, because browsers send no key with them.
CORS: dict[str, Any] = {
    "allow_methods": ["GET", "POST"],
    "allow_headers": ["*"],  # clients send headers of their own, which the service ignores
    "allow_private_network": True,
    "expose_headers": [
        "Accept-Encoding",
        "Allow",
        "Retry-After",
        "WWW-Authenticate",
        *openapi.RESPONSE_HEADERS,
    ],
    "max_age": 3600,
}


def create_app(settings: Settings, open_engines: OpenEngines, metrics: Recorder) -> FastAPI:
    """Return the service as an ASGI application. Its lifespan keeps the context of `open_engines` open."""
    service = Service(settings, metrics)
    of_dialects = [route for dialect in DIALECTS for route in dialect.router.routes]
    served = [*router.routes, *token_routes.router.routes, *of_dialects, *admin.router.routes]
    routes = {route.path for route in served if isinstance(route, Route)}
    guards = access_checks(settings)
    lifecycle = RequestLifecycle(
        metrics=metrics,
        service=service,
        checks=[check_refusal, *guards, EarlyRejection(service)],
        routes=routes,
        resolve=Paths(settings.root_dialect).resolve,
        trusted=settings.forwarded_allow_ips,
    )
    app = Application(
        title="Quartet",
        version=__version__,
        description=DESCRIPTION,
        lifespan=partial(lifespan, service, lifecycle, open_engines),
        # The framework's spans contain the query string.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.state.lifecycle = lifecycle
    app.state.keys = next((guard for guard in guards if isinstance(guard, KeyCheck)), None)
    app.add_middleware(LifecycleMiddleware, lifecycle=lifecycle)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors_origins, **CORS)
    app.router.routes.extend(served)  # `include_router` would match and wrap the routes twice
    add_pages(app)
    app.add_route("/openapi.json", DocumentPage(app).answer, include_in_schema=False)
    error_models = {dialect.tag: dialect.error_model for dialect in DIALECTS}
    describe = partial(openapi.document, app, error_models, bool(settings.keys))
    app.openapi = cache(describe)  # type: ignore[method-assign]
    return app


class Application(FastAPI):
    """FastAPI with a faster router, and without its own layers around it, which take time of each request.

    They answer unexpected exceptions, trace, limit bodies and close uploaded files. `LifecycleMiddleware` and the
    server do this for all routes, and no route has uploads.
    """

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = RouteTable(self.router, Unrouted(self.router))
        for layer in reversed(self.user_middleware):
            app = layer.cls(app, *layer.args, **layer.kwargs)
        return app


@asynccontextmanager
async def lifespan(
    service: Service, lifecycle: RequestLifecycle, open_engines: OpenEngines, _: FastAPI
) -> AsyncIterator[None]:
    """Open the bundles, check their golden outputs and warm up; serve; on exit stop accepting, drain and close."""
    async with tracing() as lifecycle.trace, open_engines(service.settings) as engines:
        service.engines = engines
        for engine in engines.all():
            if engine.model.cold:
                continue
            log.info("opened", model=engine.id, runs=engine.fingerprint, **engine.faster)
        yield
        service.shutdown.advance(Stage.DRAINING)
        if service.closing is not None:
            await service.closing
    service.engines = None


class Unrouted:
    """The framework's router for what no route of the table serves: the lifespan, static pages, and paths without one.

    It reports in one line why the service cannot start, and nothing where a signal ends it early. The traceback of a
    failed start goes to the debug log. Raises NotFound and MethodNotAllowed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_brief(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                log.debug("cannot start", exc_info=True)
                message = {**message, "message": f"cannot start: {exception()}"}
            elif isinstance(exception(), asyncio.CancelledError):
                message = {**message, "message": ""}
            await send(message)

        try:
            await self.app(scope, receive, send_brief if scope["type"] == "lifespan" else send)
        except HTTPException as error:
            raise as_quartet_error(Request(scope), error) from None


def as_quartet_error(request: Request, error: HTTPException) -> Exception:
    """Return the framework's own errors, 404 and 405, as the service's; every other error unchanged."""
    if error.status_code == NotFound.status:
        return NotFound(f"there is nothing at {request.url.path}{native_hint(request)}")
    if error.status_code == MethodNotAllowed.status:
        allowed = allowed_methods(request, error)
        message = f"{request.method} is not allowed here, but {allowed}"
        return MethodNotAllowed(message, allow=allowed)
    return error


def native_hint(request: Request) -> str:
    """Return where the native API is, if another one has the bare paths."""
    root = request.app.state.service.settings.root_dialect
    return "" if root == "native" else f"; {root} has the bare paths, the native API is at /native"


def allowed_methods(request: Request, error: HTTPException) -> str:
    """Return the methods that all routes of this path declare, plus HEAD if GET is declared.

    The framework's error contains the methods of only one of these routes.
    """
    declared = (error.headers or {}).get("Allow", "GET")
    methods = {method.strip() for method in declared.split(",")}
    path = request.scope["path"]
    routes = [one for one in request.app.routes if isinstance(one, PlainRoute)]
    found = [route for route in routes if route.path_regex.match(path)]
    for route in found:
        if (
            route.path == found[0].path
        ):  # a name of a model with "/" may look like the rest of a path
            methods |= route.methods or set()
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))


class Pages(StaticFiles):
    """Static pages with headers that forbid the browser to load external content. Range headers are ignored."""

    def file_response(
        self, full_path: Any, stat_result: Any, scope: Scope, status_code: int = 200
    ) -> Response:
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"range"]
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(DOCS_HEADERS if scope["path"] == DOCS else PAGE_HEADERS)
        return response


class DocumentPage:
    """The OpenAPI document. It is made once, in a thread: any client may request it, and making it takes 0.3 s."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._making: asyncio.Task[bytes] | None = None
        self._page: bytes | None = None

    async def answer(self, request: Request) -> Response:
        if self._page is None:
            if self._making is None:
                self._making = asyncio.create_task(asyncio.to_thread(self._make))
            self._page = await asyncio.shield(self._making)
        return Response(self._page, media_type="application/json")

    def _make(self) -> bytes:
        return orjson.dumps(self._app.openapi())


def add_pages(app: FastAPI) -> None:
    pages = Pages(directory=PAGES, packages=[SWAGGER_UI])

    async def show(file: str, request: Request) -> Response:
        return await pages.get_response(file, request.scope)

    app.add_route("/", partial(show, "index.html"), include_in_schema=False)
    app.add_route(DOCS, partial(show, "docs.html"), include_in_schema=False)
    app.add_route(LIVE, partial(show, "live.html"), include_in_schema=False)
    app.mount("/static", pages, name="static")
