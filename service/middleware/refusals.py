"""The error responses, made in one place for the middleware, the routes and the connection."""

from typing import NamedTuple

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Scope

from service.errors import InternalError, QuartetError
from service.middleware.request_context import RequestContext, context_of

log = structlog.get_logger()


class Refusal(NamedTuple):
    """The response to a request that fails, without the headers that every response carries."""

    status: int
    headers: dict[str, str]
    body: bytes


def refuse(context: RequestContext, error: QuartetError) -> Refusal:
    """Return the response to a request that fails, and record the error for the log and the metrics."""
    context.code = error.code
    context.closes |= error.closes_connection
    headers = {**error.headers, "Content-Type": "application/json"}
    status, body = context.error_form(error)
    return Refusal(status, headers, orjson.dumps(body))


def refusal_response(scope: Scope, error: QuartetError) -> Response:
    """Return the refusal of a request as a response of the framework."""
    status, headers, body = refuse(context_of(scope), error)
    return Response(body, status, headers)


def log_internal_error() -> InternalError:
    """Log the current exception, and return the error that the client gets in its place."""
    log.exception("unexpected error")
    return InternalError("our bug: the server's log tells more under this request's id")
