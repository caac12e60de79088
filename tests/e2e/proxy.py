"""An HTTP proxy whose first request goes to a service that is not ready, and every later one to a ready service."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from email.message import Message
from http.client import HTTPConnection, HTTPResponse
from http.server import ThreadingHTTPServer
from typing import NamedTuple

from tests.e2e.conftest import Server
from tests.http_thread import QuietHandler, serving_in_thread

NOT_PASSED_ON = {"connection", "content-length", "date", "host", "server", "transfer-encoding"}


class Post(NamedTuple):
    """A POST request. at: seconds, when it arrived; status: of the answer"""

    at: float
    status: int


class Proxy(ThreadingHTTPServer):
    """posts: the POST requests, in their order. Other requests go to the ready service."""

    daemon_threads = True

    def __init__(self, unready: Server, ready: Server) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.unready, self.ready = unready, ready
        self.posts: list[Post] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def passed_on(headers: Message) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in NOT_PASSED_ON}


class Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        self.answer(*self.ask(self.server.ready))

    def do_POST(self) -> None:
        at = time.monotonic()
        posts = self.server.posts
        reply, content = self.ask(self.server.ready if posts else self.server.unready)
        posts.append(Post(at, reply.status))  # before the client can act on the answer
        self.answer(reply, content)

    def ask(self, service: Server) -> tuple[HTTPResponse, bytes]:
        """Send the request to a service; return its answer and the body of it."""
        body, own = self.read_body() or None, passed_on(self.headers)
        with closing(HTTPConnection("127.0.0.1", service.port, timeout=60)) as connection:
            connection.request(self.command, self.path, body, own)
            reply = connection.getresponse()
            return reply, reply.read()

    def answer(self, reply: HTTPResponse, content: bytes) -> None:
        """Send a service's answer to the client."""
        self.reply(content, reply.status, **passed_on(reply.headers))


@contextmanager
def first_unready(unready: Server, ready: Server) -> Iterator[Proxy]:
    """Run a proxy in front of two services."""
    proxy = Proxy(unready, ready)
    with serving_in_thread(proxy):
        yield proxy
