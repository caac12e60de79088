import io
import json
import logging
import os
from collections.abc import Iterator
from typing import TextIO

import pytest
import structlog

from service.observability import logs
from service.observability.metrics import Metrics


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def objects(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_are_json_off_a_terminal(stream):
    """One object a line, with its time and level."""
    logs.configure("info", "auto", stream)
    structlog.get_logger().info("serving", url="http://x")
    (line,) = objects(stream)
    assert line.pop("timestamp")
    assert line == {"event": "serving", "level": "info", "url": "http://x"}


def test_lines_are_for_people_on_a_terminal():
    """A terminal is written to in words."""
    terminal = Terminal()
    logs.configure("info", "auto", terminal)
    structlog.get_logger().info("serving")
    assert "serving" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")


def test_a_line_is_written_at_once(stream, monkeypatch):
    """Each line is written with its end at once, or lines of several processes would mix; libraries' lines as well."""
    written = []
    monkeypatch.setattr(stream, "write", written.append)
    logs.configure("info", "json", stream)
    structlog.get_logger().info("one")
    logging.getLogger("another").warning("two")
    assert 2 == len(written)
    assert all(line.endswith("}\n") for line in written)


def test_a_format_may_be_chosen():
    """JSON on a terminal, if wanted."""
    terminal = Terminal()
    logs.configure("info", "json", terminal)
    structlog.get_logger().info("serving")
    assert objects(terminal)[0]["event"] == "serving"


def test_foreign_lines_look_alike(stream):
    """What libraries log comes in the same form."""
    logs.configure("info", "json", stream)
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request %s", "received.")
    (line,) = objects(stream)
    assert (line["event"], line["level"]) == ("Invalid HTTP request received.", "warning")


def test_a_failed_start_is_logged_once(stream):
    """Uvicorn's own last words add nothing."""
    logs.configure("info", "json", stream)
    logging.getLogger("uvicorn.error").error("Application startup failed. Exiting.")
    assert objects(stream) == []


@pytest.mark.parametrize(("level", "count"), [("debug", 2), ("info", 1), ("warning", 0)])
def test_health_checks_are_below_info(stream, level, count):
    """A probe's line is for debugging, a request's for everybody."""
    logs.configure(level, "json", stream)
    log = structlog.get_logger().bind()
    logs.log_request(log, "/health/ready", status=200)
    logs.log_request(log, "/classify", status=200)
    assert len(objects(stream)) == count


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_holds_no_variables(stream, form):
    """A traceback has its place, but not the texts in variables."""

    def fail(text):
        raise RuntimeError("broken")

    logs.configure("info", form, stream)
    try:
        fail("a confidential" + " text")
    except RuntimeError:
        structlog.get_logger().exception("unexpected error")
    assert "RuntimeError: broken" in stream.getvalue()
    assert "a confidential text" not in stream.getvalue()


def test_lines_of_one_kind_may_be_spared():
    """Two lines in a second are written; the first of the next second has the number of dropped ones."""
    now = 7.9
    lines = logs.LogLimiter(2, clock=lambda: now)
    assert [lines.may_tell() for _ in range(5)] == [True, True, False, False, False]
    now = 8.8
    assert not lines.may_tell()
    now = 9.1
    assert lines.may_tell()
    assert (lines.untold(), lines.untold()) == (4, 0)


def test_a_field_that_json_cannot_hold_is_escaped(stream):
    """A file name of another encoding, or a large number, raises nothing."""
    logs.configure("info", "json", stream)
    structlog.get_logger().info("refused", path="a\udcff", number=2**70)
    (line,) = objects(stream)
    assert ("'refused'", "'a\\udcff'", str(2**70)) == (line["event"], line["path"], line["number"])


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_request_id_cannot_forge_a_field(stream, form):
    """A request id with any printable characters is one value of one line."""
    forged = 'a status=200 "b", "status": 200, \\'
    logs.configure("info", form, stream)
    structlog.get_logger().info("request", request_id=forged, status=500)
    (line,) = stream.getvalue().splitlines()
    if form == "json":
        assert (forged, 500) == (json.loads(line)["request_id"], json.loads(line)["status"])
    else:
        assert line.endswith(f"request_id={forged!r} status=500")


def test_a_record_that_cannot_be_formatted_is_named(stream, capsys):
    """A library's malformed log call becomes a line with its place, not a traceback on standard error."""
    logs.configure("info", "json", stream)
    logging.getLogger("another").error("%d files", "some")
    (line,) = objects(stream)
    assert __file__ in line["place"]
    assert "" == capsys.readouterr().err


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """The end to read of a pipe, and a stream to write to it."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
        logs.close()
    os.close(reader)


def test_a_log_that_is_not_read_is_counted(pipe):
    """Lines are lost without an error; their number is a metric, and a line when the log is read again."""
    reader, stream = pipe
    before = logs.lost_lines()
    logs.configure("info", "json", stream)
    for _ in range(3000):
        structlog.get_logger().info("x" * 1000)
    metrics = Metrics()
    metrics.observe_lost_lines(5)  # of another process
    lost = logs.lost_lines() - before
    assert 0 < lost < 3000
    for _ in range(2):
        page = metrics.render().decode()
        assert f"quartet_log_lines_lost_total {before + lost + 5}.0" in page
    seen = b""
    while not seen.endswith(b"\n") or b"log lines were lost" not in seen:
        seen += os.read(reader, 1 << 20)
    lines = [json.loads(line) for line in seen.splitlines()]
    reported = [line["lines"] for line in lines if line["event"] == "log lines were lost"]
    assert lost == sum(reported)
