"""The errors of requests, one class for each kind, with its HTTP status and its code.

    QuartetError
      BadRequest 400 bad_request              the body is not JSON in UTF-8
      Unauthorized 401 unauthorized           no API key, or an unknown one
      Forbidden 403 forbidden                 the key lacks the permission, or the host is not allowed
      NotFound 404 not_found                  no such route
        UnknownModel 404 unknown_model
        UnknownHead 404 unknown_head
      MethodNotAllowed 405 method_not_allowed
      RequestTimeout 408 slow_body            the body did not arrive in time
        SlowHeaders 408 slow_headers          the headers did not arrive in time
      Conflict 409 conflict                   the served models do not allow the command
        NewEmbeddingSpace 409 new_embedding_space
        ChangedAnswers 409 changed_answers
      TooLarge 413 too_large                  larger than an empty queue can hold
      UnsupportedMediaType 415 unsupported_media_type
        UnsupportedEncoding 415 unsupported_encoding
      InvalidInput 422 invalid                well-formed JSON with an invalid value
      BadBundle 422 bad_bundle                a bundle that must not be served
      HeadersTooLarge 431 headers_too_large   too many headers, or too many bytes
      InternalError 500 internal              our bug
        InferenceFailed 500 inference_failed  the session failed, or its result was not finite
      RetryableError                          may succeed later; has `Retry-After`
        Overloaded 429 overloaded             the queue is full
        RateLimited 429 rate_limited          the key has exceeded one of its rates
        TooManyConnections 503 too_many_connections
        NotReady 503 not_ready
          Draining 503 draining
          ReplicaLost 503 replica_lost
      DeadlineExceeded 504 deadline_exceeded

BadBundle fails an administrator's request to load a bundle. A bundle that cannot be opened at the start ends the
process instead.
"""

import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple


class QuartetError(Exception):
    """A failure with an HTTP status, a stable code, a readable message and the field at fault."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    closes_connection: ClassVar[bool] = False  # no further request can be read from it

    def __init_subclass__(cls, status: int | None = None, code: str | None = None) -> None:
        cls.status = status or cls.status
        if code is not None:
            cls.code = code

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        return {}

    @property
    def body(self) -> dict[str, object]:
        """The response body, which has the same fields for every error."""
        return {"error": {"code": self.code, "message": self.message, "param": self.param}}


class ErrorForm(NamedTuple):
    """An error as an API shows it."""

    status: int
    body: dict[str, object]


def native_form(error: QuartetError) -> ErrorForm:
    return ErrorForm(error.status, error.body)


class RetryableError(QuartetError):
    """An error after which a retry may succeed; `Retry-After` contains whole seconds, at least 1."""

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def revive(
    code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> QuartetError:
    """Return the error with this code, as another process has raised it; InternalError for an unknown code."""
    kind = next((kind for kind in kinds() if kind.code == code), InternalError)
    if issubclass(kind, RetryableError) and retry_after_s is not None:
        return kind(message, param=param, retry_after_s=retry_after_s)
    return kind(message, param=param)


def kinds(root: type[QuartetError] = QuartetError) -> Iterator[type[QuartetError]]:
    """Yield every subclass of `root` that has a code of its own, leaves of the tree first."""
    for kind in root.__subclasses__():
        yield from kinds(kind)
        if "code" in vars(kind):
            yield kind


class BadRequest(QuartetError, status=400, code="bad_request"): ...


class Unauthorized(QuartetError, status=401, code="unauthorized"):
    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(QuartetError, status=403, code="forbidden"): ...


class NotFound(QuartetError, status=404, code="not_found"): ...


class UnknownModel(NotFound, code="unknown_model"): ...


class UnknownHead(NotFound, code="unknown_head"): ...


class MethodNotAllowed(QuartetError, status=405, code="method_not_allowed"):
    """A method that the route does not have; `allow` names its methods."""

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow

    @property
    def headers(self) -> dict[str, str]:
        return {"Allow": self.allow}


class RequestTimeout(QuartetError, status=408, code="slow_body"):
    """A body that did not arrive in time; the connection contains a partial request, so it is closed."""

    closes_connection = True


class SlowHeaders(RequestTimeout, code="slow_headers"): ...


class Conflict(QuartetError, status=409, code="conflict"): ...


class NewEmbeddingSpace(Conflict, code="new_embedding_space"): ...


class ChangedAnswers(Conflict, code="changed_answers"): ...


class TooLarge(QuartetError, status=413, code="too_large"): ...


class UnsupportedMediaType(QuartetError, status=415, code="unsupported_media_type"): ...


class UnsupportedEncoding(UnsupportedMediaType, code="unsupported_encoding"):
    """A body with an unsupported content encoding; `accepted` names the supported ones."""

    def __init__(self, message: str, *, accepted: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.accepted = accepted

    @property
    def headers(self) -> dict[str, str]:
        return {"Accept-Encoding": self.accepted}


class InvalidInput(QuartetError, status=422, code="invalid"): ...


class BadBundle(QuartetError, status=422, code="bad_bundle"): ...


class Overloaded(RetryableError, status=429, code="overloaded"):
    """A request refused because of load; `Retry-After` is 1 to 60 seconds, so that retries are spread over time."""

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, param: str | None = None
    ) -> None:
        super().__init__(message, retry_after_s=min(max(retry_after_s, 1.0), 60.0), param=param)


class RateLimited(RetryableError, status=429, code="rate_limited"): ...


class HeadersTooLarge(QuartetError, status=431, code="headers_too_large"): ...


class InternalError(QuartetError, status=500, code="internal"): ...


class InferenceFailed(InternalError, code="inference_failed"): ...


class TooManyConnections(RetryableError, status=503, code="too_many_connections"): ...


class NotReady(RetryableError, status=503, code="not_ready"): ...


class Draining(NotReady, code="draining"): ...


class ReplicaLost(NotReady, code="replica_lost"): ...


class DeadlineExceeded(QuartetError, status=504, code="deadline_exceeded"): ...


class ClientDisconnected(Exception):
    """A client that closed its connection before the response; no response can be sent."""
