"""The connections that a process serves, and the files that it may open for them."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from service.server.connection_limits import (
    OTHER_FILES,
    OWN_FILES,
    allowed_files,
    divide_connections,
    raise_file_limit,
    share_of_connections,
)
from service.settings import Settings


@contextmanager
def files(soft: int) -> Iterator[None]:
    """Set the number of files that the test's process may have open, and the number to which it may raise that."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("workers", "share"), [(0, 1000), (1, 1000), (3, 334)])
def test_processes_share_the_connections(workers, share):
    """Each keeps its part, rounded up."""
    assert share == share_of_connections(Settings(http_workers=workers, max_connections=1000))


def test_a_process_makes_room_for_its_connections(lines):
    """It may open twice as many files as it keeps connections, and some more."""
    with files(soft=100):
        raise_file_limit(Settings(max_connections=50))
        assert 100 + OTHER_FILES == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert [] == lines


def test_a_process_that_has_room_leaves_it(lines):
    """A limit that is high enough is not lowered."""
    with files(soft=1000):
        raise_file_limit(Settings(max_connections=50))
        assert 1000 == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_too_low_limits_are_logged(lines, monkeypatch):
    """If the system's limit is lower, the log has the difference."""
    allowed = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: allowed.append(limits))
    raise_file_limit(Settings(max_connections=50))
    assert [(200, 200)] == allowed
    assert (200, 100 + OTHER_FILES) == (lines[0]["has"], lines[0]["need"])


@pytest.mark.parametrize(
    ("hard", "connections", "expected"),
    [
        (resource.RLIM_INFINITY, 1000, (1000, 1000)),
        (100_000, 2, (2, 256)),
        (OWN_FILES + 500, 1000, (250, 250)),
        (200, 1000, (50, 50)),
    ],
)
def test_files_are_kept_for_what_is_no_connection(monkeypatch, hard, connections, expected):
    """Connections that are served, and those beyond, never need all files that the process may open."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, hard))
    assert expected == divide_connections(Settings(max_connections=connections))


def test_connections_over_grpc_have_files_of_their_own(monkeypatch):
    """As many as over HTTP; the system may allow fewer."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100_000))
    settings = Settings(max_connections=100, grpc_port=8001)
    assert 300 + OTHER_FILES == allowed_files(settings)
    assert (100, 256) == divide_connections(settings)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, OWN_FILES + 90))
    assert (57, 59) == divide_connections(settings)
