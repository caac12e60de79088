"""The number of connections that a process serves, and the process's limit of open files for them."""

import math
import resource

import structlog

from service.settings import Settings

log = structlog.get_logger()

FEW = 256  # minimum of excess connections; with fewer, a flood closes them before their response
OTHER_FILES = 512  # files that a process may open in addition to those for its connections
OWN_FILES = 256  # part of OTHER_FILES that is reserved for other files than connections
LEAST_FILES = 64  # with fewer, a process cannot even load its modules and models while it serves
PROBES = 32  # connections to the port of the metrics; twice as many of OWN_FILES are for them


def share_of_connections(settings: Settings) -> int:
    """Return one process's part of the service's connections."""
    return math.ceil(settings.max_connections / (settings.http_workers or 1))


def divide_connections(settings: Settings) -> tuple[int, int]:
    """Return how many connections one process serves, and how many excess connections it keeps open.

    As many are served over gRPC in addition, if it has a port. If the system allows fewer files than the connections
    need, fewer are served.
    """
    connections, parts = share_of_connections(settings), parts_of_files(settings)
    allowed = allowed_files(settings)
    available = max(allowed - OWN_FILES, allowed // 2, parts)
    served = min(connections, available // parts)
    return served, min(available - (parts - 1) * served, max(connections, FEW))


def parts_of_files(settings: Settings) -> int:
    """Return how many files a process needs per connection: one to serve, one for excess, and one for gRPC."""
    return 2 if settings.grpc_port is None else 3


def needed_files(settings: Settings) -> int:
    return parts_of_files(settings) * share_of_connections(settings) + OTHER_FILES


def allowed_files(settings: Settings) -> int:
    """Return the number of files that this process may open after `raise_file_limit`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = needed_files(settings)
    if soft >= need:
        return soft
    return need if hard == resource.RLIM_INFINITY else min(need, hard)


def raise_file_limit(settings: Settings) -> None:
    """Raise this process's limit of open files to what its connections need, including excess connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need, allowed = needed_files(settings), allowed_files(settings)
    if allowed != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < need:
        log.warning(
            "the system allows fewer files than max_connections needs", has=allowed, need=need
        )
