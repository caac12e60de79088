"""How many connections a process serves, and the files that the system allows it for them."""

import math
import resource

import structlog

from service.settings import Settings

log = structlog.get_logger()

FEW = 256  # excess connections are kept open in any case, or a flood would cut them off before they are answered
OTHER_FILES = 512  # that a process may have open in addition to twice its connections
OWN_FILES = 256  # of these, what no connection may take


def share_of_connections(settings: Settings) -> int:
    """One process's part of the connections that the service keeps."""
    return math.ceil(settings.max_connections / (settings.http_workers or 1))


def divide_connections(connections: int) -> tuple[int, int]:
    """Of the connections that files can be had for, how many are served, and how many more are kept open.

    Where the system allows fewer files than the connections need, fewer are served.
    """
    allowed = allowed_files(connections)
    available = max(allowed - OWN_FILES, allowed // 2, 2)
    served = min(connections, available // 2)
    return served, min(available - served, max(connections, FEW))


def allowed_files(connections: int) -> int:
    """Files that this process may have open once `raise_file_limit` has raised the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * connections + OTHER_FILES
    if soft >= need:
        return soft
    return need if hard == resource.RLIM_INFINITY else min(need, hard)


def raise_file_limit(connections: int) -> None:
    """Let this process have as many files open as its connections need, those to be refused included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need, allowed = 2 * connections + OTHER_FILES, allowed_files(connections)
    if allowed != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < need:
        log.warning(
            "the system allows fewer files than max_connections needs", has=allowed, need=need
        )
