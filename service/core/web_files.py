"""Files of web servers, apart from files of stores, because its imports take time."""

import netrc
import os
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

from service.core.addresses import Listing, RemoteError, readable

TIMEOUT_S = 60.0  # of one read from a server
TAGS = ("ETag", "Last-Modified", "Content-Length")  # headers by which versions of a file differ


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A refusal of redirects: the operator trusts an address, not the addresses to which it leads."""

    def redirect_request(self, request: Any, file: Any, code: int, *rest: Any) -> None:
        file.close()
        raise RemoteError(
            f"{request.full_url}: is redirected to another address, which is not followed"
        )


class WebFiles:
    """Files of a web server, which has no list of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = urllib.request.build_opener(NoRedirect)

    def list(self, known: Iterable[str] = ()) -> Listing:
        found = {}
        for name in known:
            with suppress(FileNotFoundError), self._response(name) as response:
                tags = (response.headers[tag] for tag in TAGS)
                found[name] = (" ".join(filter(None, tags)), 0)
        return found

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with self._response(name) as response:
            yield response
            if response.length:
                raise RemoteError(f"{response.url}: {response.length} bytes are missing at its end")

    @contextmanager
    def _response(self, name: str) -> Iterator[Any]:
        request = urllib.request.Request(f"{self._url}/{quote(name)}")
        with readable(request.full_url):
            if login := find_login(urlsplit(self._url).hostname or ""):
                request.add_header("Authorization", f"Basic {b64encode(login).decode()}")
            try:
                response = self._opener.open(request, timeout=TIMEOUT_S)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in (404, 410):
                    raise FileNotFoundError(request.full_url) from None
                raise
            with response:
                yield response

    def put(self, name: str, file: Path) -> None:
        raise RemoteError(f"{self._url}: cannot be written: name hf://, s3:// or gs://")


def find_login(host: str) -> bytes | None:
    """Return USER:PASSWORD of a host in `$NETRC` or `~/.netrc`; None where there is none."""
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (FileNotFoundError, RuntimeError):
        return None
    return f"{found[0]}:{found[2]}".encode() if found else None
