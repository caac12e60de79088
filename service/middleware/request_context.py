"""The context of one request: its id, its headers, its times, its outcome."""

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.types import Scope

from service.engines.engine import Ticket
from service.errors import ErrorForm, QuartetError, native_form

CONTEXT = "request_context"  # key in the state of a scope
SANE_ID = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")  # printable ASCII
TRACEPARENT = re.compile(  # W3C Trace Context; later versions may append more fields
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace_id>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)


@dataclass(slots=True)
class RequestContext:
    """The data of one request, filled in while it is processed; `arrival` is by `time.monotonic`."""

    request_id: str
    arrival: float
    # The first value of each header, by its name in lower case.
    headers: Mapping[str, str] = field(default_factory=dict)
    trace_id: str = ""  # the trace that the client sent, or that began with this request; or empty
    client: str = ""  # the address of the client, as far as trusted proxies report it
    tenant: str = ""
    priority: int = 0
    models: tuple[str, ...] = ()  # names of the models that the key may use; empty for all
    # Called when the request's texts go to the device.
    on_submit: Callable[[], object] | None = None
    # Each function is called with this context when the request is over.
    on_finish: list[Callable[["RequestContext"], object]] = field(default_factory=list)
    ticket: Ticket | None = None  # of the call of an engine
    answer_bytes: int = 0  # the largest size of the results in JSON
    model: str = ""
    task: str = ""
    inputs: int = 0
    tokens: int = 0  # tokens that count as computed for the client; 0 if it got no answer
    batch_size: int = 0
    batch_tokens: int = 0
    # Seconds per stage of `metrics.STAGES`, for the stages that the request reached.
    stages: tuple[float, ...] = ()
    status: int = 0
    code: str = ""
    client_deadline: bool = False  # whether the client set a shorter deadline than the server's
    refusal: QuartetError | None = None  # the error of a check that rejected the request
    closes: bool = False  # whether the connection closes after the response
    # Returns whether the connection does not read the rest of the request's body, and therefore closes.
    drops_body: Callable[[], bool] | None = None
    # Shows an error as the API of the request's path does.
    error_form: Callable[[QuartetError], ErrorForm] = native_form
    # Done when the client has disconnected, if the server reports that.
    leaving: asyncio.Future[None] | None = None

    @property
    def names(self) -> dict[str, str]:
        """The fields that all log lines of this request have in common."""
        names = {"request_id": self.request_id}
        return {**names, "trace_id": self.trace_id} if self.trace_id else names

    @property
    def characters(self) -> int:
        """The characters of the request's texts; 0 if they are not known."""
        return self.ticket.characters if self.ticket else 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.arrival


def context_of(scope: Scope) -> RequestContext:
    context = scope["state"][CONTEXT]
    assert isinstance(context, RequestContext), "our bug: the lifecycle middleware is not installed"
    return context


def new_context(scope: Scope) -> RequestContext:
    headers = headers_of(scope)
    request_id = headers.get("x-request-id")
    if request_id is None or not SANE_ID.fullmatch(request_id):
        request_id = f"{random.getrandbits(128):032x}"
    trace = trace_id(headers["traceparent"]) if "traceparent" in headers else ""
    return RequestContext(request_id, time.monotonic(), headers, trace)


def headers_of(scope: Scope) -> dict[str, str]:
    """Return a request's headers, the first of each name. Converted once, because they are read about twelve times."""
    pairs = reversed(scope["headers"])
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}


def trace_id(traceparent: str) -> str:
    """Return the trace id of the header, or "" if the header is not valid."""
    found = TRACEPARENT.fullmatch(traceparent)
    return (
        found["trace_id"] if found and (found["more"] is None or found["version"] != "00") else ""
    )
