"""A server of the standard library in a thread of the tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer


@contextmanager
def serving_in_thread(server: HTTPServer) -> Iterator[None]:
    """Serve in a thread for as long as the block runs, and close the server after it."""
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(30)
