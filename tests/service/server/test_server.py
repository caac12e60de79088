import asyncio
import errno
import os
import socket

from service.server.server import Server
from service.server.sockets import UNSENT_BYTES
from service.settings import Settings
from service.shutdown import Stage


async def started(server: Server) -> None:
    """Wait until a server accepts connections."""
    while not server.started:
        await asyncio.sleep(0.001)


async def test_a_lost_listener_ends_the_process(app, monkeypatch, lines):
    """A process that can accept no connection any more ends with a status, and does not go on unheard."""
    ended = asyncio.Event()
    statuses = []
    monkeypatch.setattr("os._exit", lambda status: (statuses.append(status), ended.set()))
    server = Server(app, Settings())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        async with asyncio.timeout(30):
            await started(server)
            assert [] == statuses
            server.servers[0].close()  # as the event loop does
            await ended.wait()
        server.service.shutdown.advance(Stage.HURRYING)
        await serving
    assert 4 == statuses[0]
    assert "a listening socket was closed" in [line.get("problem") for line in lines]


class FullListener(socket.socket):
    """A listener whose process may open no more files."""

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_drain_without_free_descriptors_answers(app, engine, lines):
    """Waiting connections that cannot be accepted do not keep accepted requests from their answers."""
    engine.hold = asyncio.Event()
    server = Server(app, Settings())
    with FullListener(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        async with asyncio.timeout(30):
            await started(server)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(
                b"POST /classify HTTP/1.1\r\nHost: q\r\nContent-Type: application/json\r\n"
                b'Content-Length: 15\r\n\r\n{"inputs": "a"}'
            )
            while engine.ticket is None:
                await asyncio.sleep(0.001)
            server.service.shutdown.advance(Stage.DRAINING)
            await asyncio.sleep(0.1)
            engine.hold.set()
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await serving
    assert "connections cannot be accepted" in [line["event"] for line in lines]


async def test_the_system_keeps_little_of_a_response(app):
    """So a response that its client does not read is in memory of the process, which has a limit."""
    server = Server(app, Settings())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        async with asyncio.timeout(30):
            await started(server)
            _, writer = await asyncio.open_connection(*listener.getsockname())
            while not server.server_state.connections:
                await asyncio.sleep(0.001)
            (connection,) = server.server_state.connections
            accepted = connection.transport.get_extra_info("socket")
            unsent = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
            writer.close()
            server.service.shutdown.advance(Stage.DRAINING)
            await serving
    assert UNSENT_BYTES == unsent


def test_idle_connections_are_kept_as_long_as_is_set(app):
    """The server passes the setting on; by default it is longer than nginx keeps idle connections (60 s)."""
    kept = [
        Server(app, settings).config.timeout_keep_alive
        for settings in (Settings(), Settings(keep_alive_s=0.5))
    ]
    assert [75, 0.5] == kept
