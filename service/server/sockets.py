"""Listening sockets: their addresses, their waiting connections, and how to stop listening without losing a client."""

import ctypes
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import structlog

log = structlog.get_logger()

UNSENT_BYTES = 131_072  # of a response that the system keeps for a client that does not read
SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h; the socket module does not define it
# Of TCP's header: offset of the byte, and its bits; RFC 9293, 3.1.
FLAGS, SYN, SYN_OR_ACK = 13, 0x02, 0x12

# Classic BPF, one (code, jump if true, jump if false, operand) each. The sender repeats a dropped packet.
DROP_WHO_ASKS_TO_CONNECT = (
    (0x30, 0, 0, FLAGS),  # load the byte
    (0x54, 0, 0, SYN_OR_ACK),  # keep these bits
    (0x15, 0, 1, SYN),  # only SYN is set?
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFF),  # keep it
)


def url_of(listener: socket.socket) -> str:
    """Return the address of a listener: a URL, or `unix:` and the path of a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reuse_address(listener: socket.socket, allowed: bool) -> None:
    """Set whether the address may be bound again while only closed connections of this listener occupy it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, allowed)


def limit_unsent(listener: socket.socket) -> None:
    """Limit the unsent data that the system keeps for each connection of a TCP listener.

    The system would keep up to 4 MB for a client that does not read, in memory that no limit of the process counts.
    """
    if listener.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    """Yield all connections in the listener's queue, as far as the process may open more files.

    The other connections stay in the queue. One that its client has closed already is skipped.
    """
    listener.setblocking(False)
    while True:
        try:
            yield listener.accept()[0]
        except ConnectionAbortedError:
            continue
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("connections cannot be accepted", problem=str(error))
            return


def stop_accepting(listener: socket.socket) -> None:
    """Make the kernel drop new SYN packets on this listener, for all processes that share it.

    Closing the listener alone would reset connections made after the last `accept`. A client whose SYN is dropped
    repeats it, after one second on Linux. It is then refused, or accepted by another process that listens at the
    address by then. A handshake in progress still completes. Without support for such filters, this function does
    nothing. A Unix socket needs no filter: after a shutdown for reading it refuses new connections, and its backlog can
    still be accepted.
    """
    if listener.family == socket.AF_UNIX:
        listener.shutdown(socket.SHUT_RD)
        return
    program = b"".join(struct.pack("=HBBI", *step) for step in DROP_WHO_ASKS_TO_CONNECT)
    steps = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("@HP", len(DROP_WHO_ASKS_TO_CONNECT), ctypes.addressof(steps))
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, pointer)
