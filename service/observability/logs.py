"""Log lines: for people on a terminal, one JSON object each elsewhere; uvicorn's own likewise.

A line says who asked for what, how it ended and how long it took, never what the texts said.
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

QUIET_ROUTES = frozenset({"/health/live", "/health/ready", "/metrics"})  # asked every few seconds
# Of the request that is being answered, what each of its lines says.
NAMES: ContextVar[Mapping[str, str]] = ContextVar("names", default=MappingProxyType({}))


_writers: list[LogWriter] = []  # of this process, the one in use last


def configure(level: str, form: Literal["auto", "console", "json"], stream: TextIO) -> None:
    """Send every log line of this process to `stream`. Lines that it refuses, or takes too slowly, are counted."""
    close()
    sink = cast(TextIO, open_writer(stream) or stream)
    console = form == "console" or (form == "auto" and stream.isatty())
    shared = shared_processors(console)
    renderer = console_renderer(stream) if console else structlog.processors.JSONRenderer(to_json)
    severity = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        # It writes a line at once, with its end: processes share the stream.
        logger_factory=structlog.WriteLoggerFactory(sink),
    )
    adopt_foreign_lines(severity, sink, shared, renderer)


def open_writer(stream: TextIO) -> LogWriter | None:
    """The writer to the descriptor of `stream`; None if it is in memory and has none."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return None
    _writers.append(LogWriter(descriptor, report_lost))
    return _writers[-1]


def report_lost(lines: int) -> None:
    structlog.get_logger().warning("log lines were lost", lines=lines)


def lost_lines() -> int:
    """Lines of this process that were lost."""
    return sum(writer.lost for writer in _writers)


@atexit.register
def close() -> None:
    """Wait for the last lines to be written, a second at most: before `os._exit`, and when the interpreter ends."""
    for writer in _writers:
        writer.close()


def exit_at_once(status: int) -> NoReturn:
    """End the process without waiting for its threads, once the last lines are written."""
    close()
    os._exit(status)


def shared_processors(console: bool) -> list[Processor]:
    processors: list[Processor] = [
        add_names,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    return processors if console else [*processors, structlog.processors.format_exc_info]


def add_names(_: object, __: str, line: EventDict) -> EventDict:
    return {**NAMES.get(), **line}


def to_json(fields: Mapping[str, object], **options: Any) -> str:
    try:
        return orjson.dumps(fields, **options).decode()
    except TypeError:  # a lone surrogate, an integer of more than 64 bits
        return json.dumps({key: ascii(value) for key, value in fields.items()})


def console_renderer(stream: TextIO) -> Processor:
    # The pretty tracebacks would print local variables, and with them people's texts.
    return structlog.dev.ConsoleRenderer(
        colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
    )


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
    """Writes the lines of libraries."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Log where a record comes from that cannot be formatted. `logging` would write to standard error itself."""
        place = f"{record.pathname}:{record.lineno}"
        structlog.get_logger().error("a log record could not be formatted", place=place)


def is_news(record: logging.LogRecord) -> bool:
    """False for the line with which uvicorn follows our own about a start that failed."""
    return record.msg != "Application startup failed. Exiting."


def log_bug(error: Exception) -> None:
    """Tell of an error that is our fault, with its traceback; of others their request's line says enough."""
    if isinstance(error, InternalError):
        structlog.get_logger().error(error.message, exc_info=error)


class LogLimiter:
    """Lets so many lines a second, or in each period from a first one on, pass and counts the others.

    For lines that come when there is no time for them.
    """

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
        """The lines that were kept back since this was asked last."""
        count, self._untold = self._untold, 0
        return count


def log_request(log: FilteringBoundLogger, route: str, **facts: object) -> None:
    """The one line of a request; health checks and scrapes are for debugging only.

    log: one that is bound, as it may be for as long as the log is configured as it is: to bind it takes a while
    """
    (log.debug if route in QUIET_ROUTES else log.info)("request", **facts)
