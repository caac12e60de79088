"""A server that reads and drops everything, as the control of attacks: `python -m tests.e2e.sink` prints its port."""

import asyncio

import uvloop


class Sink(asyncio.Protocol):
    def data_received(self, data: bytes) -> None:
        pass


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
