"""Sockets that listen: where they do, who waits there, and how to stop without losing anybody."""

import ctypes
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h; the socket module does not name it
FLAGS, SYN, SYN_OR_ACK = 13, 0x02, 0x12  # of TCP's header: which byte, and its bits; RFC 9293, 3.1

# Classic BPF, as (code, jump if true, jump if false, operand) each; what is dropped is sent again by its sender.
DROP_WHO_ASKS_TO_CONNECT = (
    (0x30, 0, 0, FLAGS),  # load the byte
    (0x54, 0, 0, SYN_OR_ACK),  # keep these bits
    (0x15, 0, 1, SYN),  # only SYN is set?
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFF),  # keep it
)


def url_of(listener: socket.socket) -> str:
    """The address of a listener: a URL, or the path of a Unix socket behind `unix:`."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    """Whoever has connected and waits to be accepted."""
    listener.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            yield listener.accept()[0]


def stop_accepting(listener: socket.socket) -> None:
    """Let the system be deaf to who asks to connect, for all processes that have this listener.

    Closing alone would reset who had connected after the last was accepted. Whoever finds us deaf asks again, a second
    later on Linux, and is then refused (or answered, if another listens there by then); who is half way still gets in.
    Where there is no such filter nothing happens. A Unix socket refuses new connections by itself once it is shut down
    for reading, and still gives those in its backlog to be accepted.
    """
    if listener.family == socket.AF_UNIX:
        listener.shutdown(socket.SHUT_RD)
        return
    program = b"".join(struct.pack("=HBBI", *step) for step in DROP_WHO_ASKS_TO_CONNECT)
    steps = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("@HP", len(DROP_WHO_ASKS_TO_CONNECT), ctypes.addressof(steps))
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, pointer)
