"""A gRPC server, which needs the extra `grpc`.

Each call becomes a request to the path that it has over HTTP, without a connection: it passes the same checks, has the
same limits, and is counted and logged in the same way. The library gives the metadata of a call before its message. The
server reads the message only after the checks, as the body of the request, and neither inflates nor parses it before.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import grpc
import grpc.aio
from fastapi import FastAPI
from google.protobuf.message import DecodeError
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Scope

from service.api.dialects.protobuf_fields import check_fields
from service.api.engine_call import deadline_of, max_parts, receive_body
from service.api.request_body import body_timeout
from service.errors import (
    BadRequest,
    Draining,
    MethodNotAllowed,
    Overloaded,
    QuartetError,
    RequestTimeout,
)
from service.middleware.access_control import needs_no_key
from service.middleware.body_memory import Budget, MemoryReservation
from service.middleware.refusals import log_internal_error
from service.middleware.request_context import CONTEXT, RequestContext, context_of
from service.middleware.request_lifecycle import RequestLifecycle
from service.middleware.service_state import TIMEOUT_HEADER
from service.observability.logs import NAMES, log_bug
from service.settings import Settings

STREAMS = 100  # concurrent calls on a connection; the client queues further ones
UNREAD_BYTES = 16_384  # that the library accepts of a message before the call passes the checks
UNKNOWN = "/unknown"  # path of calls that no service has
QUICK_S = 0.1  # within which most messages have arrived
MESSAGES = 1000  # of a stream, which then ends
STOPPING_S = 0.4  # for calls that are on their way
PING_MS = 500  # least time between pings of a client; usual clients send more than the library's default allows
# The status of a failed call, by the status that the error has over HTTP.
STATUSES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# The first byte of a compressed message; no field of ours begins with it. The library does not return `grpc-encoding`.
ENCODINGS = {b"\x1f": "gzip", b"\x78": "deflate"}
# Metadata that describe the message; what a client sends in them is ignored.
ENCODING, LENGTH = "content-encoding", "content-length"


class Labeled(NamedTuple):
    """A route as the log and the metrics name it."""

    path: str


class Rpc(NamedTuple):
    """A call of a service.

    method, path: of the request that it becomes, as far as checks need the path
    asked: the class of its message; None if the message has no fields, and is not read
    answer: returns the response, or raises a QuartetError; returns an iterator if the call has several responses
    is_stream: whether it has any number of messages and responses
    """

    method: str
    path: str
    asked: Any
    answer: Callable[[HttpRequest, Any], Any]
    is_stream: bool = False

    @property
    def is_open(self) -> bool:
        """Whether strangers may call it."""
        return needs_no_key(self.path, frozenset())


Services = Mapping[str, Mapping[str, Rpc]]  # calls by the names of the service and of the call


class UnknownCalls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Calls that no service has. They pass the checks, because the library would answer any number of them at once."""

    def __init__(self, handler: Callable[[str, Rpc], Any], services: Sequence[str]) -> None:
        self._handler = handler
        self._services = ", ".join(services)

    def service(self, call: Any) -> Any:
        async def refuse(request: HttpRequest, asked: None) -> None:
            message = f"there is no call {call.method[:256]}; the services are {self._services}"
            raise MethodNotAllowed(message, allow=self._services)

        return self._handler(call.method, Rpc("POST", UNKNOWN, None, refuse))


class GrpcServer:
    """The gRPC server of one process, on `grpc_port`. HTTP processes share the port; each gets its connections.

    most: connections, and calls of one client at once. Further connections are closed at once. Without this limit, a
        flood would take every descriptor of the process, including those for health checks over HTTP.
    """

    def __init__(self, app: FastAPI, settings: Settings, most: int, services: Services) -> None:
        # It logs a traceback for each client that leaves; unexpected errors are logged with their requests.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        self._app = app
        self._lifecycle: RequestLifecycle = app.state.lifecycle
        self._address = (settings.host, settings.grpc_port or 0)
        self._running = 0  # calls
        self._calls = Budget(2 * most)
        # Apart, so that calls of strangers do not use the budget of tenants.
        self._open_calls = Budget(2 * STREAMS)
        self._stopping = asyncio.Event()
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 1),
                ("grpc.max_allowed_incoming_connections", most),
                ("grpc.max_concurrent_streams", STREAMS),
                ("grpc.max_connection_idle_ms", round(1000 * settings.keep_alive_s)),
                ("grpc.server_handshake_timeout_ms", round(1000 * settings.header_timeout_s)),
                ("grpc.max_receive_message_length", settings.max_body_bytes),
                ("grpc.per_message_decompression", 0),
                ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
                ("grpc.http2.bdp_probe", 0),  # it would raise lookahead_bytes
                ("grpc.http2.min_ping_interval_without_data_ms", PING_MS),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        for service, rpcs in services.items():
            handlers = {
                name: self._handler(f"/{service}/{name}", rpc) for name, rpc in rpcs.items()
            }
            generic = grpc.method_handlers_generic_handler(service, handlers)
            self._server.add_generic_rpc_handlers((generic,))
        self._server.add_generic_rpc_handlers((UnknownCalls(self._handler, [*services]),))

    @property
    def url(self) -> str:
        host, port = self._address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self) -> None:
        self._server.add_insecure_port(self.url)
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Refuse new calls and slow messages, and wait for the accepted calls for at most this time.

        The library would wait up to 20 s for a client that does not confirm the end of its connection.
        """
        self._stopping.set()
        stopping = asyncio.create_task(self._server.stop(seconds))
        while not stopping.done():
            await asyncio.wait([stopping], timeout=STOPPING_S)
            if not self._running:
                await self._server.stop(0)

    def _end(self, _: object) -> None:
        self._running -= 1

    def _handler(self, name: str, rpc: Rpc) -> Any:
        async def handle(_: Any, call: Any) -> Any:
            self._running += 1
            call.add_done_callback(self._end)
            scope = self._scope(rpc, call)
            own = self._lifecycle.receive(scope)
            scope["state"][CONTEXT] = own
            if rpc.path == UNKNOWN:
                scope["path"] = name
            elif not rpc.is_open:
                # In the log and the metrics. Health checks have the routes of HTTP, which are not logged.
                scope["path"] = name
                scope["route"] = Labeled(name)
            own.leaving = asyncio.get_running_loop().create_future()
            named = NAMES.set(own.names)
            try:
                answer, error = await run(self._answer(rpc, scope, call), own)
            finally:
                self._lifecycle.record(rpc.method, scope, own)
                NAMES.reset(named)
            metadata = [("x-request-id", own.request_id)]
            if error is None:
                call.set_trailing_metadata((*metadata,))
                return answer
            await self._lifecycle.delay_refusal(own)
            metadata += [(key.lower(), value) for key, value in error.headers.items()]
            if after_s := error.headers.get("Retry-After"):
                metadata.append(("grpc-retry-pushback-ms", str(1000 * int(after_s))))
            status = STATUSES.get(error.status, grpc.StatusCode.INTERNAL)
            return await call.abort(status, error.message, (*metadata,))

        make = grpc.stream_unary_rpc_method_handler
        if rpc.is_stream:
            make = grpc.stream_stream_rpc_method_handler
        return make(handle, response_serializer=serialize)

    async def _answer(self, rpc: Rpc, scope: Scope, call: Any) -> Any:
        """Return the response of a call, or send its responses. Raises QuartetError."""
        own = context_of(scope)
        if own.refusal is not None:
            raise own.refusal
        if rpc.is_stream or not rpc.is_open:
            self._count(own, self._open_calls if rpc.is_open else self._calls)
        for _ in range(MESSAGES):
            raw = b"" if rpc.asked is None else await self._read(rpc, scope, call)
            if raw is grpc.aio.EOF:
                if rpc.is_stream:
                    return None
                raise BadRequest("the call has no message")
            request = HttpRequest(scope, partial(body_of, raw))
            answers = rpc.answer(request, await parse(rpc, request))
            if not rpc.is_stream:
                return await answers
            async for answer in answers:
                await call.write(answer)
        return None

    def _count(self, own: RequestContext, calls: Budget) -> None:
        """Count a call until it is over. Raises Overloaded if its client has more than are left for other clients."""
        client = own.tenant or own.client
        calls.change(client, 1)
        own.on_finish.append(lambda _: calls.change(client, -1))
        if calls.exceeded(client):
            raise Overloaded("too many calls of this client are in progress: send fewer at once")

    async def _read(self, rpc: Rpc, scope: Scope, call: Any) -> Any:
        """Return a message as it was sent, or EOF.

        The library does not report the bytes of a message before its end. So a message that takes longer counts as one
        of the largest size. Strangers would reserve memory of tenants in this way; their messages have to be quick.
        """
        own, service = context_of(scope), self._app.state.service
        settings = service.settings
        reading = asyncio.ensure_future(call.read())
        slow = MemoryReservation(service.body_memory, own.tenant or own.client)
        stopping = None
        try:
            await asyncio.wait([reading], timeout=QUICK_S)
            for _ in range(2):  # turns of the event loop, which may have stalled
                if not reading.done():
                    await asyncio.sleep(0)
            if not reading.done():
                if rpc.is_open:
                    raise RequestTimeout(f"the message did not arrive within {QUICK_S:g} s")
                slow.take(settings.max_body_bytes)
                stopping = asyncio.ensure_future(self._stopping.wait())
                with body_timeout(settings.body_timeout_s, deadline_of(HttpRequest(scope))):
                    await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    raise Draining("the server is shutting down")
            return reading.result()
        finally:
            slow.release()
            reading.cancel()
            if stopping is not None:
                stopping.cancel()

    def _scope(self, rpc: Rpc, call: Any) -> Scope:
        metadata = [*(call.invocation_metadata() or ())]
        headers = {key: value for key, value in reversed(metadata) if isinstance(value, str)}
        for name in (ENCODING, LENGTH):
            headers.pop(name, None)
        remaining_s = call.time_remaining()
        if remaining_s is not None:
            headers.setdefault(TIMEOUT_HEADER.lower(), str(max(1, int(1000 * remaining_s))))
        return {
            "type": "http",
            "app": self._app,
            "method": rpc.method,
            "scheme": "http",
            "path": rpc.path,
            "query_string": b"",
            "headers": [(key.encode("latin-1"), encode(value)) for key, value in headers.items()],
            "server": self._address,
            "client": client_of(call.peer()),
            "state": {},
        }


async def parse(rpc: Rpc, request: HttpRequest) -> Any:
    """Return the message of a request. Raises BadRequest and the errors of `receive_body`, which limits it."""
    if rpc.asked is None:
        return None
    own = context_of(request.scope)
    sent = (await request.receive())["body"]
    own.headers = {**own.headers, LENGTH: str(len(sent)), ENCODING: ENCODINGS.get(sent[:1], "")}
    body = await receive_body(request, deadline_of(request))
    check_fields(body, rpc.asked.DESCRIPTOR, max_parts(request))
    try:
        return rpc.asked.FromString(body)
    except DecodeError:
        raise BadRequest(f"the message is not a valid {rpc.asked.DESCRIPTOR.name}") from None


def serialize(answer: Any) -> bytes:
    """Return the bytes of a response, which a text thread has made of a large one."""
    made: bytes = answer if isinstance(answer, bytes) else answer.SerializeToString()
    return made


def encode(value: str) -> bytes:
    return value.encode("latin-1", "replace")


def client_of(peer: str) -> tuple[str, int] | None:
    """Return host and port of `ipv4:HOST:PORT` or `ipv6:%5BHOST%5D:PORT`; None for another form."""
    kind, _, address = peer.partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return host.removeprefix("%5B").removesuffix("%5D").strip("[]"), int(port)


async def body_of(message: bytes) -> Message:
    """Return the body of a request, which is the whole message of a call."""
    return {"type": "http.request", "body": message}


async def run(answering: Awaitable[Any], own: RequestContext) -> tuple[Any, QuartetError | None]:
    """Return the response of a call, or its error."""
    error: QuartetError
    try:
        answer = await answering
        own.status = 200
        return answer, None
    except QuartetError as failure:
        log_bug(failure)
        error = failure
    except Exception:
        # Any other error is a bug. gRPC would send its text to the client.
        error = log_internal_error()
    own.code, own.status = error.code, error.status
    return None, error.with_traceback(None)
