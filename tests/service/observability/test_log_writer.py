"""Log lines to descriptors that are full, closed or not read: no call waits or raises, and losses are counted."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.observability import log_writer
from service.observability.log_writer import LogWriter
from tests.e2e.conftest import until

LINE = "a" * 99 + "\n"
FILE_BYTES = 4096


class Pipe:
    """A pipe with a writer of log lines."""

    def __init__(self) -> None:
        self.reader, self.end = os.pipe()
        self.reports: list[int] = []
        self.writer = LogWriter(self.end, self.report)

    def report(self, lines: int) -> None:
        self.reports.append(lines)
        self.writer.write(f"{lines} lost\n")

    def read(self) -> str:
        return os.read(self.reader, 1 << 20).decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.reader)
    pipe.writer.close(10)
    os.close(pipe.end)


def test_lines_are_written_in_order(pipe):
    """Each with its end, a character without an encoding escaped."""
    for number in range(100):
        pipe.writer.write(f"{number}\n")
    pipe.writer.write("\udc00\n")
    pipe.writer.close(10)
    assert [*map(str, range(100)), "\\udc00"] == pipe.read().splitlines()
    assert (0, []) == (pipe.writer.lost, pipe.reports)


def test_a_line_after_a_pause_is_written_at_once(pipe, monkeypatch):
    """The lines after it are collected, and the end of the process writes them without a wait."""
    monkeypatch.setattr(log_writer, "GATHER_S", 60.0)
    pipe.writer.write("first\n")
    assert "first\n" == pipe.read()
    pipe.writer.write("second\n")
    pipe.writer.write("third\n")
    pipe.writer.close(10)
    assert "second\nthird\n" == pipe.read()


def test_a_write_has_whole_lines_that_a_pipe_keeps_together(pipe, monkeypatch):
    """Lines of other processes do not interleave; a longer line is written in its own call."""
    writes = []
    write = os.write
    monkeypatch.setattr(
        log_writer.os, "write", lambda fd, data: writes.append(bytes(data)) or write(fd, data)
    )
    for line in [LINE] * 200 + ["b" * 9000 + "\n"] + [LINE] * 3:
        pipe.writer.write(line)
    pipe.writer.close(10)
    assert all(data.endswith(b"\n") for data in writes)
    assert {b"b" * 9000 + b"\n"} == {w for w in writes if len(w) > log_writer.ATOMIC_BYTES}
    assert len(writes) < 50


def test_a_pipe_that_is_not_read_holds_up_no_caller(pipe):
    """What waits is bounded, what is lost is counted, and reported once when the pipe is read again."""
    number = 3 * log_writer.KEPT_BYTES // len(LINE)
    began = time.monotonic()
    for _ in range(number):
        pipe.writer.write(LINE)
    assert time.monotonic() - began < 5
    assert number / 2 < pipe.writer.lost < number
    lost, seen = pipe.writer.lost, ""
    while not seen.endswith("lost\n"):
        seen += pipe.read()
    assert [lost] == pipe.reports
    assert number - lost == seen.count(LINE)


def test_a_pipe_that_is_not_read_holds_up_no_end(pipe):
    """The process ends after a short time, whether all is written or not."""
    for _ in range(10_000):
        pipe.writer.write(LINE)
    began = time.monotonic()
    pipe.writer.close(0.1)
    assert 0.1 <= time.monotonic() - began < 5


def test_a_pipe_without_a_reader_loses_lines():
    """No call raises."""
    reader, end = os.pipe()
    os.close(reader)
    writer = LogWriter(end, lambda _: None)
    for _ in range(10):
        writer.write(LINE)
    writer.close(10)
    os.close(end)
    assert 10 == writer.lost


def test_a_descriptor_that_does_not_block_loses_nothing(pipe):
    """Another process may have made it so."""
    os.set_blocking(pipe.end, False)
    for _ in range(2000):
        pipe.writer.write(LINE)
    seen = 0
    while seen < 2000:
        seen += pipe.read().count(LINE)
    assert 0 == pipe.writer.lost


def test_a_full_file_goes_on_when_there_is_room(tmp_path):
    """A line of which a part was written is ended before the next; the lost ones are reported once."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    reports = []
    writer = LogWriter(file, reports.append)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, limits[1]))
        for number in range(50):
            writer.write(LINE)
            until(lambda seen=number + 1: writer.lost + lines_of(tmp_path / "log") >= seen)
        lost = writer.lost
        assert (50 - FILE_BYTES // len(LINE), []) == (lost, reports)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write("after\n")
    writer.write("more\n")
    writer.close(10)
    os.close(file)
    assert [lost] == reports
    *whole, torn, after, more = (tmp_path / "log").read_text().splitlines(keepends=True)
    assert {LINE} == set(whole)
    assert LINE.startswith(torn.rstrip("\n"))
    assert ["after\n", "more\n"] == [after, more]


def lines_of(path: Path) -> int:
    return path.read_text().count("\n")


def test_threads_may_write_together(pipe):
    """No line is lost or torn."""
    threads = [
        threading.Thread(target=lambda: [pipe.writer.write(LINE) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    seen = ""
    while len(seen) < 2000 * len(LINE):
        seen += pipe.read()
    assert [LINE] * 2000 == seen.splitlines(keepends=True)
    for thread in threads:
        thread.join()
