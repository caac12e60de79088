"""The number of connections that a process serves, and the process's limit of open files for them."""

import math
import resource

import structlog

from service.settings import Settings

log = structlog.get_logger()

FEW = 256  # minimum of excess connections; with fewer, a flood closes them before their response
OTHER_FILES = 512  # files that a process may open in addition to two per connection
OWN_FILES = 256  # part of OTHER_FILES that is reserved for other files than connections


def share_of_connections(settings: Settings) -> int:
    """Return one process's part of the service's connections."""
    return math.ceil(settings.max_connections / (settings.http_workers or 1))


def divide_connections(connections: int) -> tuple[int, int]:
    """Return how many connections are served, and how many excess connections are kept open.

    If the system allows fewer files than the connections need, fewer are served.
    """
    allowed = allowed_files(connections)
    available = max(allowed - OWN_FILES, allowed // 2, 2)
    served = min(connections, available // 2)
    return served, min(available - served, max(connections, FEW))


def allowed_files(connections: int) -> int:
    """Return the number of files that this process may open after `raise_file_limit`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * connections + OTHER_FILES
    if soft >= need:
        return soft
    return need if hard == resource.RLIM_INFINITY else min(need, hard)


def raise_file_limit(connections: int) -> None:
    """Raise this process's limit of open files to what its connections need, including excess connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need, allowed = 2 * connections + OTHER_FILES, allowed_files(connections)
    if allowed != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < need:
        log.warning(
            "the system allows fewer files than max_connections needs", has=allowed, need=need
        )
