import io
import json
import logging

import pytest
import structlog

from service import logs

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def objects(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_are_json_off_a_terminal(stream: io.StringIO) -> None:
    """One object a line, with its time and level."""
    logs.configure("info", "auto", stream)
    structlog.get_logger().info("serving", url="http://x")
    (line,) = objects(stream)
    assert line.pop("timestamp")
    assert line == {"event": "serving", "level": "info", "url": "http://x"}


def test_lines_are_for_people_on_a_terminal() -> None:
    """A terminal is written to in words."""
    terminal = Terminal()
    logs.configure("info", "auto", terminal)
    structlog.get_logger().info("serving")
    assert "serving" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")


def test_a_line_is_written_at_once(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its end, or lines of several processes would be mixed up; our own as those of libraries."""
    written: list[str] = []
    monkeypatch.setattr(stream, "write", written.append)
    logs.configure("info", "json", stream)
    structlog.get_logger().info("one")
    logging.getLogger("another").warning("two")
    assert 2 == len(written)
    assert all(line.endswith("}\n") for line in written)


def test_a_format_may_be_chosen() -> None:
    """JSON on a terminal, if wanted."""
    terminal = Terminal()
    logs.configure("info", "json", terminal)
    structlog.get_logger().info("serving")
    assert objects(terminal)[0]["event"] == "serving"


def test_foreign_lines_look_alike(stream: io.StringIO) -> None:
    """What libraries log comes in the same form."""
    logs.configure("info", "json", stream)
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request %s", "received.")
    (line,) = objects(stream)
    assert (line["event"], line["level"]) == ("Invalid HTTP request received.", "warning")


def test_a_failed_start_is_not_told_twice(stream: io.StringIO) -> None:
    """Uvicorn's own last words add nothing."""
    logs.configure("info", "json", stream)
    logging.getLogger("uvicorn.error").error("Application startup failed. Exiting.")
    assert objects(stream) == []


@pytest.mark.parametrize(("level", "count"), [("debug", 2), ("info", 1), ("warning", 0)])
def test_health_checks_are_below_info(stream: io.StringIO, level: str, count: int) -> None:
    """A probe's line is for debugging, a request's for everybody."""
    logs.configure(level, "json", stream)
    log = structlog.get_logger().bind()
    logs.log_request(log, "/health/ready", status=200)
    logs.log_request(log, "/classify", status=200)
    assert len(objects(stream)) == count


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_holds_no_variables(stream: io.StringIO, form: str) -> None:
    """A failure is told with its place, not with the texts that were at hand."""

    def fail(text: str) -> None:
        raise RuntimeError("broken")

    logs.configure("info", form, stream)
    try:
        fail("some" + "body's text")
    except RuntimeError:
        structlog.get_logger().exception("unexpected error")
    assert "RuntimeError: broken" in stream.getvalue()
    assert "somebody's text" not in stream.getvalue()


def test_lines_of_one_kind_may_be_spared() -> None:
    """Two in a second are told; the first of the next says how many were not."""
    now = 7.9
    lines = logs.Sparing(2, clock=lambda: now)
    assert [lines.may_tell() for _ in range(5)] == [True, True, False, False, False]
    now = 8.8
    assert not lines.may_tell()
    now = 9.1
    assert lines.may_tell()
    assert (lines.untold(), lines.untold()) == (4, 0)
