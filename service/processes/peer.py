"""Calls between two processes, in both directions of one channel.

| role | number | message |
|---|---|---|
| request | its own, counted by its sender | what the other process is to do |
| part | that of the request | a part of the reply, before the reply |
| reply | that of the request | the rest of the reply, or `Failed` |
| notice | 0 | needs no reply; `Cancel` ends the work on a request |

If a channel closes, each end cancels its work on the other end's requests, and its own requests fail with `PeerLost`.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog
from numpy.typing import NDArray

from service import errors
from service.processes.channel import Channel, Role
from service.processes.messages import Cancel, Failed, Message

log = structlog.get_logger()

Reply = tuple[Message, bytes]  # with the arrays
Receive = Callable[[Message, bytes], None]
Serve = Callable[[Message, bytes, Receive], Awaitable[Reply]]


class PeerLost(errors.ReplicaLost):
    """A request whose process was lost before it replied."""


class Peer(Channel):
    """The process at the other end of a channel.

    role: its role, for messages
    serve: called in a task with each of its requests, and with a function that sends parts of the reply; returns the
        reply. An error of `service.errors` is sent to the other process, which raises it.
    notice: called with each of its notices
    lost: called once, when it has closed the channel or `close` is called
    sent, received: the number of the last request to it, and from it; 0 if there is none
    """

    def __init__(
        self, role: str, serve: Serve, notice: Receive, lost: Callable[["Peer"], None]
    ) -> None:
        super().__init__(self._handle, self._end)
        self.sent = self.received = 0
        self._role = role
        self._serve = serve
        self._notice = notice
        self._when_lost = lost
        self._has_ended = False
        self._calls: dict[int, tuple[asyncio.Future[Reply], Receive | None]] = {}
        self._work: dict[int, asyncio.Task[None]] = {}

    async def connect(self, end: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def call(
        self, request: Message, *arrays: NDArray[Any] | bytes, receive: Receive | None = None
    ) -> asyncio.Future[Reply]:
        """Send a request, and return its reply's future, whose cancellation cancels the request. receive: gets parts

        The future fails with PeerLost if the channel closes before the reply, and with the errors of the request.
        """
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.sent += 1
        self._calls[self.sent] = reply, receive
        reply.add_done_callback(partial(self._end_call, self.sent))
        self.send("request", self.sent, request, *arrays)
        if not self.open:
            reply.set_exception(self._lost_error())
        return reply

    def notify(self, notice: Message) -> None:
        self.send("notice", 0, notice)

    def close(self) -> None:
        super().close()
        self._end()

    def _end_call(self, number: int, reply: asyncio.Future[Reply]) -> None:
        del self._calls[number]
        if reply.cancelled():
            self.notify(Cancel(number))

    def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        for work in self._work.values():
            work.cancel()
        for reply, _ in self._calls.values():
            if not reply.done():
                reply.set_exception(self._lost_error())
        self._when_lost(self)

    def _lost_error(self) -> PeerLost:
        return PeerLost(f"the {self._role} process was lost")

    def _handle(self, role: Role, number: int, message: Message, arrays: bytes) -> None:
        match role, message:
            case "request", _:
                self.received = number
                work = asyncio.create_task(self._reply_to(number, message, arrays))
                self._work[number] = work
                work.add_done_callback(lambda _: self._work.pop(number))
            case "notice", Cancel(cancelled):
                if cancelled in self._work:
                    self._work[cancelled].cancel()
            case "notice", _:
                self._notice(message, arrays)
            case _ if (call := self._calls.get(number)) and not call[0].done():
                reply, receive = call
                if isinstance(message, Failed):
                    reply.set_exception(message.error)
                    return
                if receive is not None:
                    receive(message, arrays)
                if role == "reply":
                    reply.set_result((message, arrays))

    async def _reply_to(self, number: int, request: Message, arrays: bytes) -> None:
        try:
            reply = await self._serve(request, arrays, partial(self.send, "part", number))
        except errors.QuartetError as error:
            if error.__cause__ is not None:  # the other process logs the rest
                log.error(error.message, exc_info=error.__cause__)
            reply = Failed.of(error), b""
        # A bug must fail its own request only, and the other process waits for a reply.
        except Exception as error:
            log.error("unexpected error", exc_info=error)
            reply = Failed.of(errors.InternalError(f"our bug: {error!r}")), b""
        self.send("reply", number, *reply)
