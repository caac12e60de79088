"""One API call between HTTP and the engine: converts a request to a `Call` and a `Reply` to a response.

The native routes use this module. Routes for the API dialects of other servers can use it, too.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive

from service.api.json_responses import JsonResponse
from service.api.ndjson import InLines, NdjsonResponse, NdjsonStream, line, wants_lines
from service.api.receipts import HEADER, Draft
from service.api.request_body import answer_in_time, check_media_type, parse_limited, read_body
from service.api.schemas import Request, most_parts, names_of_texts, parse, refuse_long
from service.engines.engine import (
    BYTES_PER_TOKEN,
    CHARACTERS_PER_TOKEN,
    LARGE_BYTES,
    Engine,
    EngineTask,
    Reply,
    Ticket,
)
from service.engines.registry import Engines
from service.engines.result_collector import OnResult
from service.errors import InvalidInput, QuartetError
from service.middleware.body_memory import MemoryReservation
from service.middleware.request_context import RequestContext, context_of
from service.middleware.service_state import Service, timeout_s
from service.observability.logs import log_bug
from service.scheduling.entries import Heads
from service.scheduling.load import Flow
from service.settings import UnknownModelRule

R = TypeVar("R", bound=Request)
T = TypeVar("T")
W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """A valid request and its engine.

    in_lines: whether the response is an NDJSON stream that sends each result as soon as it is computed
    receipt: the receipt that the client requested, or None
    """

    body: R
    engine: Engine
    ticket: Ticket
    context: RequestContext
    receive: Receive
    in_lines: bool
    receipt: Draft | None = None

    async def answer(self, task: EngineTask[T], name: str, show: Callable[[T], object]) -> Response:
        """Compute a task. Return all results under `name` plus "s", or a stream of one NDJSON line per result."""
        if self.in_lines:
            return await self._stream(task, name, show)
        reply = await self.compute(task)

        def content() -> object:
            results = [None if result is None else show(result) for result in reply.results]
            return self._content(reply, {f"{name}s": results})

        return json_response(content, self.headers(reply))

    async def compute(
        self, task: EngineTask[T], heads: Heads | None = None, on_result: OnResult[T] | None = None
    ) -> Reply[T]:
        """Compute a task until the client disconnects or the deadline passes.

        heads: the names of the heads; None for those that the request wants
        on_result: called with the index and the result of each input as soon as it is computed
        """
        heads = self.body.wanted_heads if heads is None else heads
        if self.receipt is not None:
            # Two turns of the event loop later, when the request has been sent to the model.
            call_soon = asyncio.get_running_loop().call_soon
            call_soon(call_soon, self.receipt.begin)
        reply = await self.within_deadline(self.engine.answer(task, self.ticket, heads, on_result))
        timing = reply.timing
        self.context.tokens = reply.usage.tokens
        self.context.answer_bytes += reply.answer_bytes
        self.context.batch_size = timing.batch_size
        self.context.batch_tokens = timing.batch_tokens
        self.context.stages += (
            timing.encode_s,
            timing.queue_s,
            timing.inference_s,
            timing.return_s,
            timing.decode_s,
        )
        return reply

    def make_id(self, prefix: str, request_id: str | None = None) -> str:
        """Return an id of the response from the prefix and the id of the request, or the service's own id for it."""
        return f"{prefix}-{request_id or self.context.request_id}"

    def within_deadline(self, work: Coroutine[Any, Any, W]) -> Coroutine[Any, Any, W]:
        """Await work until the client disconnects or the deadline passes."""
        return answer_in_time(work, self.receive, self.ticket.deadline, self.context.leaving)

    async def show(self, reply: Reply[Any], work: Callable[[], W]) -> W:
        """Run work on the results of a reply, in a text thread if they may be large."""
        size = reply.answer_bytes // BYTES_PER_TOKEN
        return await self.within_deadline(self.engine.run(work, size, self.ticket))

    def respond(self, reply: Reply[Any], results: Mapping[str, object]) -> Response:
        """Return a response with these fields and the fields that every task has."""
        return json_response(self._content(reply, results), self.headers(reply))

    def _content(self, reply: Reply[Any], results: Mapping[str, object]) -> dict[str, object]:
        """Return the body of a response. An NDJSON response has it as its last line, without results."""
        content = {
            "model": self.engine.id,
            **self.body.name_heads(reply.heads),
            **results,
            "usage": reply.usage,
        }
        if self.ticket.isolate_errors:
            content["errors"] = [
                {"index": index, "code": error.code, "message": error.message}
                for index, error in sorted(reply.errors.items())
            ]
        return content

    async def _stream(
        self, task: EngineTask[T], name: str, show: Callable[[T], object]
    ) -> Response:
        """Send one line per input as soon as its result is ready, and a last line with a summary or an error.

        An error before the first line produces a normal error response. After the first line, all tokens count as
        computed for the client, even if the client disconnects.
        """
        lines = NdjsonStream()

        in_lines = InLines(task, name, show)

        def on_result(index: int, made: bytes | None) -> None:
            lines.add(made or in_lines.line(index, None))

        def ended(asking: asyncio.Task[Reply[bytes]]) -> None:
            if not asking.cancelled():
                # Marks the exception as retrieved, since the client may have disconnected.
                asking.exception()
            lines.end()

        asking = asyncio.create_task(self.compute(in_lines, on_result=on_result))
        asking.add_done_callback(ended)
        try:
            first = await lines.take()
        except asyncio.CancelledError:
            asking.cancel()
            raise
        if not first:
            asking.result()
        self.context.tokens = self.ticket.tokens
        return NdjsonResponse(
            self._chunks(first, lines, asking), {"X-Quartet-Model": self.engine.fingerprint}
        )

    async def _chunks(
        self, first: bytes, lines: NdjsonStream, asking: asyncio.Task[Reply[bytes]]
    ) -> AsyncIterator[bytes]:
        try:
            chunk = first
            while chunk:
                yield chunk
                chunk = await lines.take()
            reply = await asking
            yield line(self._content(reply, {}))
        except QuartetError as error:
            log_bug(error)
            self.context.code = error.code
            yield line(error.body)
        finally:
            asking.cancel()

    def headers(self, reply: Reply[Any]) -> dict[str, str]:
        """Return the headers that tell how an answer was made."""
        timing = reply.timing
        remembered = reply.usage.windows and not timing.batch_size
        return {
            **({} if self.receipt is None else {HEADER: self.receipt.finish(reply)}),
            **({"X-Quartet-Cache": "hit"} if remembered else {}),
            "Server-Timing": server_timing(
                parse=self.context.stages[0],
                encode=timing.encode_s,
                queue=timing.queue_s,
                inference=timing.inference_s,
                **{"return": timing.return_s},
                decode=timing.decode_s,
                total=self.context.seconds,
            ),
            "X-Quartet-Batch": f"size={timing.batch_size};tokens={timing.batch_tokens}",
            "X-Quartet-Head": ", ".join(reply.heads),
            "X-Quartet-Model": self.engine.fingerprint,
        }


async def receive_call(
    request: HttpRequest,
    schema: type[R],
    choose: Callable[[object], type[R]] | None = None,
    fields: Mapping[str, object] | None = None,
) -> Call[R]:
    """Read and validate one request and select its engine. Raises the errors of `service.errors` that apply.

    choose: returns the schema for a parsed body, in place of `schema`
    fields: fields of the body that the path has
    """
    service_of(request).open_engines()
    deadline = deadline_of(request)
    body = await receive_json(request, deadline)
    if fields:
        body = add_fields(body, fields)
    return open_call(request, choose(body) if choose else schema, body, deadline)


def engines_of(request: HttpRequest) -> Engines:
    """Return the engines that the key of a request may use. Raises NotReady or Draining."""
    return service_of(request).open_engines().visible_to(context_of(request.scope).models)


def engine_of(
    request: HttpRequest, model: str | None, unknown: UnknownModelRule = "refuse"
) -> Engine:
    """Return the engine of a model's name, by the service's rule for unknown names, or else by `unknown`.

    Raises UnknownModel.
    """
    rule = service_of(request).settings.rule_of_unknown_models(unknown)
    return engines_of(request).get(model, rule)


def deadline_of(request: HttpRequest) -> float:
    """Return when the client stops waiting, in seconds of `time.monotonic`. Raises InvalidInput."""
    context = context_of(request.scope)
    return context.arrival + timeout_s(context.headers, service_of(request).settings)


def add_fields(body: object, fields: Mapping[str, object]) -> object:
    """Return a body with the fields that the path has. Raises InvalidInput for a field with two values."""
    if not isinstance(body, dict):
        return body
    for name, value in fields.items():
        if body.get(name, value) not in (None, value):
            raise InvalidInput(f"{name}: the path has {value!r}; leave {name} out", param=name)
    return {**body, **fields}


def open_call(request: HttpRequest, schema: type[R], body: object, deadline: float) -> Call[R]:
    """Validate a parsed body and select its engine. Raises the errors of `service.errors` that apply."""
    context, settings = context_of(request.scope), service_of(request).settings
    valid = parse(schema, body, settings.max_inputs_per_request)
    refuse_long(valid, settings.max_characters_per_input)
    own = valid.task_model
    model = own if own and engines_of(request).serves(own) else valid.model
    engine = engine_of(request, model, schema.unknown_model)
    engine.acquire()
    context.on_finish.append(lambda _: engine.release())
    context.model, context.task, context.inputs = engine.id, schema.task, valid.size
    context.stages = (context.seconds,)
    ticket = Ticket(
        request_id=context.request_id,
        deadline=deadline,
        priority=context.priority,
        tenant=context.tenant,
        isolate_errors=valid.isolates_errors,
        on_submit=context.on_submit,
        place=valid.place,
    )
    context.ticket = ticket
    in_lines = wants_lines(context.headers.get("accept", ""))
    receipt = None
    if HEADER.lower() in context.headers:
        key = settings.receipt_key.get_secret_value() if settings.receipt_key else ""
        receipt = Draft(request.scope["path"], body, names_of_texts(schema), key, engine)
    return Call(valid, engine, ticket, context, request.receive, in_lines, receipt)


async def receive_json(request: HttpRequest, deadline: float = math.inf) -> object:
    """Read a request's JSON body within the limits of the service.

    Raises UnsupportedMediaType, BadRequest, TooLarge and the errors of `read_body`.
    """
    check_media_type(context_of(request.scope).headers)
    body = await receive_body(request, deadline)
    return await parse_limited(body, max_parts(request))


def max_parts(request: HttpRequest) -> int:
    """Return the largest number of strings, lists and objects of a body."""
    return most_parts(service_of(request).settings.max_inputs_per_request)


async def receive_body(request: HttpRequest, deadline: float = math.inf) -> bytes:
    """Read a request's body of any type within the limits of the service. Raises the errors of `read_body`."""
    service, context = service_of(request), context_of(request.scope)
    settings = service.settings
    return await read_body(
        context.headers,
        request.receive,
        max_bytes=settings.max_body_bytes,
        timeout_s=settings.body_timeout_s,
        deadline=deadline,
        take=reserve_memory(service, context),
    )


def reserve_memory(service: Service, context: RequestContext) -> Callable[[int], None]:
    """Return a function that reserves bytes for the body until the request is finished.

    They count for the API key of the request or, without keys, for the client's address.
    """
    reservation = MemoryReservation(service.body_memory, context.tenant or context.client)
    context.on_finish.append(lambda _: reservation.release())
    return reservation.take


def json_response(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response. content: a value, or a function that returns it, where making it takes time"""
    return JsonResponse(content, headers)


async def finish_response(request: HttpRequest, response: JsonResponse) -> None:
    """Make the body of a response, in a text thread if it may be large."""
    context, began = context_of(request.scope), time.perf_counter()
    if context.answer_bytes <= LARGE_BYTES:
        response.finish()
    else:
        threads = service_of(request).open_engines().text_threads
        flow = Flow(context.model, context.priority, context.tenant)
        size = CHARACTERS_PER_TOKEN * context.answer_bytes // BYTES_PER_TOKEN
        work = threads.run(flow, size, partial(response.finish, in_pieces=True))
        await answer_in_time(work, request.receive, deadline_of(request), context.leaving)
    if context.stages:
        context.stages += (time.perf_counter() - began,)


def service_of(request: HttpRequest) -> Service:
    service: Service = request.scope["app"].state.service
    return service


def server_timing(**seconds: float) -> str:
    return ", ".join([f"{name};dur={1000 * value:.3f}" for name, value in seconds.items()])
