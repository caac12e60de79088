"""Log lines: readable text on a terminal, one JSON object per line elsewhere. Uvicorn's lines get the same format.

The line of a request contains its client, its route, its outcome and its duration. It never contains the texts.
"""

import atexit
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TextIO, cast

import orjson
import structlog
from structlog.types import EventDict, FilteringBoundLogger, Processor

from service.errors import InternalError
from service.observability.log_writer import LogWriter

# Requested every few seconds.
QUIET_ROUTES = frozenset(
    {"/health/live", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready"}
)
# The fields that each log line of the current request contains.
NAMES: ContextVar[Mapping[str, str]] = ContextVar("names", default=MappingProxyType({}))


_writers: list[LogWriter] = []  # the writers of this process; the last one is in use


def configure(level: str, form: Literal["auto", "console", "json"], stream: TextIO) -> None:
    """Send all log lines of this process to `stream`. Lines that it refuses or takes too slowly are counted."""
    close()
    sink = cast(TextIO, open_writer(stream) or stream)
    shared: list[Processor] = [
        add_names,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "console" or (form == "auto" and stream.isatty()):
        # Formatted tracebacks would print local variables, which contain clients' texts.
        renderer: Processor = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    else:
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer(to_json)
    severity = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        # This logger writes a line and its newline in one call, because several processes share the stream.
        logger_factory=structlog.WriteLoggerFactory(sink),
    )
    adopt_foreign_lines(severity, sink, shared, renderer)


def use_logging() -> None:
    """Send log lines to `logging`, as a library does, unless the program has configured structlog."""
    if not structlog.is_configured():
        structlog.configure(
            processors=[
                structlog.stdlib.filter_by_level,
                add_names,
                structlog.stdlib.render_to_log_kwargs,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
            logger_factory=structlog.stdlib.LoggerFactory(),
        )


def open_writer(stream: TextIO) -> LogWriter | None:
    """Return a writer to the descriptor of `stream`, or None if the stream has no descriptor, such as one in memory."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return None
    _writers.append(LogWriter(descriptor, report_lost))
    return _writers[-1]


def report_lost(lines: int) -> None:
    structlog.get_logger().warning("log lines were lost", lines=lines)


def lost_lines() -> int:
    """Return the number of lost log lines of this process."""
    return sum(writer.lost for writer in _writers)


@atexit.register
def close() -> None:
    """Wait until all lines are written, at most a second: before `os._exit` and at the interpreter's end."""
    for writer in _writers:
        writer.close()


def exit_at_once(status: int) -> NoReturn:
    """End the process after the last lines are written, without waiting for its threads."""
    close()
    os._exit(status)


def add_names(_: object, __: str, line: EventDict) -> EventDict:
    return {**NAMES.get(), **line}


def to_json(fields: Mapping[str, object], **options: Any) -> str:
    try:
        return orjson.dumps(fields, **options).decode()
    except TypeError:  # a lone surrogate, an integer of more than 64 bits
        return json.dumps({key: ascii(value) for key, value in fields.items()})


def adopt_foreign_lines(
    severity: int, stream: TextIO, shared: list[Processor], renderer: Processor
) -> None:
    handler = Handler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=severity, handlers=[handler], force=True)
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.setLevel(logging.NOTSET if severity <= logging.DEBUG else logging.WARNING)
    uvicorn.addFilter(is_news)


class Handler(logging.StreamHandler[TextIO]):
    """Handler of the log lines of libraries."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Log the location of a record that cannot be formatted. `logging` would write to standard error itself."""
        place = f"{record.pathname}:{record.lineno}"
        structlog.get_logger().error("a log record could not be formatted", place=place)


def is_news(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's line about a failed start, which repeats the service's own line."""
    return record.msg != "Application startup failed. Exiting."


def log_bug(error: Exception) -> None:
    """Log an internal error with its traceback. For any other error, the log line of the request suffices."""
    if isinstance(error, InternalError):
        structlog.get_logger().error(error.message, exc_info=error)


class LogLimiter:
    """Limits repeated log lines: `most` pass in each period from the first line on, and the others are counted."""

    def __init__(
        self, most: int = 10, period_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._period_s = period_s
        self._clock = clock
        self._since = -math.inf
        self._told = 0
        self._untold = 0

    def may_tell(self) -> bool:
        now = self._clock()
        if now - self._since >= self._period_s:
            self._since, self._told = now, 0
        self._told += 1
        if self._told > self._most:
            self._untold += 1
            return False
        return True

    def untold(self) -> int:
        """Return the number of suppressed lines since the previous call, and reset it."""
        count, self._untold = self._untold, 0
        return count


def log_request(log: FilteringBoundLogger, route: str, **facts: object) -> None:
    """Log the line of a request with a bound logger, which is slow to make; probes have the level debug."""
    (log.debug if route in QUIET_ROUTES else log.info)("request", **facts)
