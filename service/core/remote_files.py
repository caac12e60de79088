"""Files at addresses: `hf://`, `s3://`, `gs://`, `https://` and, without a proof of the sender, `http://`.

Credentials are those of each library: the variables and files of AWS and Google, huggingface_hub's token, `.netrc`.
"""

import hashlib
import netrc
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import quote, urlsplit

SCHEME = re.compile(r"(hf|s3|gs|https?):/+(?=[^/])")
HUB = re.compile(r"((?:datasets|spaces)/)?([^/]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?")
TIMEOUT_S = 60.0  # of one read from a server
TAGS = ("ETag", "Last-Modified", "Content-Length")  # headers by which versions of a file differ
PART = 2**20  # bytes that are read at once

# The version of each file, and the time of its last change in nanoseconds, or 0 where the store has none.
Listing = Mapping[str, tuple[str, int]]


class RemoteError(OSError):
    """An address that cannot be read or written; the message contains it and the reason."""


class Files(Protocol):
    """The files below an address, by their paths relative to it."""

    def list(self, known: Iterable[str] = ()) -> Listing:
        """Return all files; of a web server, which has no list of them, those of `known` that it has."""

    def open(self, name: str) -> Any:
        """Return a context manager that yields the file's bytes. Raises FileNotFoundError for an absent one."""

    def put(self, name: str, file: Path) -> None:
        """Write a local file, which appears at once or not at all."""


def address(path: Path | str) -> str | None:
    """Return the address that a path is, also a `Path`, which loses a slash of it; None for a local path."""
    match = SCHEME.match(str(path))
    return match and f"{match[1]}://{str(path)[match.end() :].rstrip('/')}"


def full_name(path: Path | str) -> str:
    """Return an address as it is written, or an absolute local path."""
    return address(path) or str(Path(path).absolute())


def files_at(url: str) -> Files:
    """Return the files below an address. Raises RemoteError, also where the package that reads them is missing."""
    scheme, _, rest = url.partition("://")
    user = rest.partition("/")[0].rpartition("@")[0]
    if scheme != "hf" and user and (scheme, user) != ("gs", "anonymous"):
        reason = "credentials in an address appear in logs: set the variables or files of the store"
        raise RemoteError(f"{scheme}://{rest.rpartition('@')[2]}: {reason}")
    try:
        with readable(url):
            match scheme:
                case "hf":
                    return HubFiles(url)
                case "s3" | "gs":
                    return ArrowFiles(url)
                case _:
                    return HttpFiles(url)
    except ModuleNotFoundError as error:
        extra = "hub" if scheme == "hf" else "bulk"
        package = f'pip install "quartet-serving[{extra}]"'
        raise RemoteError(f"{url}: needs {error.name}: {package}") from None


@contextmanager
def readable(url: str) -> Iterator[None]:
    """Raise RemoteError for the errors of libraries, but FileNotFoundError for an absent file."""
    try:
        yield
    except (FileNotFoundError, ModuleNotFoundError, RemoteError):
        raise
    except Exception as error:  # the many errors of three libraries mean one thing here
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RemoteError(f"{url}: {reason}") from None


def copy(files: Files, name: str, target: Path) -> str:
    """Copy a file to a local path, whose directories are made. Returns its SHA-256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    total = hashlib.sha256()
    with files.open(name) as source, target.open("wb") as file:
        while part := source.read(PART):
            total.update(part)
            file.write(part)
    return total.hexdigest()


class ArrowFiles:
    """Files of an object store, by pyarrow."""

    def __init__(self, url: str) -> None:
        from pyarrow.fs import FileSelector, FileSystem

        scheme, _, rest = url.partition("://")
        self._url, self._selector = url, FileSelector
        self._system, self._root = FileSystem.from_uri(f"{scheme}://{quote(rest, safe='/@')}")

    def list(self, known: Iterable[str] = ()) -> Listing:
        with readable(self._url):
            found = self._system.get_file_info(
                self._selector(self._root, allow_not_found=True, recursive=True)
            )
        start = len(self._root.rstrip("/")) + 1
        return {
            info.path[start:]: (f"{info.size} {info.mtime_ns}", info.mtime_ns or 0)
            for info in found
            if info.is_file
        }

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with readable(self._url), self._system.open_input_stream(f"{self._root}/{name}") as file:
            yield file

    def put(self, name: str, file: Path) -> None:
        with (
            readable(self._url),
            file.open("rb") as source,
            self._system.open_output_stream(f"{self._root}/{name}") as target,
        ):
            shutil.copyfileobj(source, target, PART)


class HubFiles:
    """Files of a repository: `hf://OWNER/NAME[@REVISION][/PATH]`, or `hf://datasets/...`."""

    def __init__(self, url: str) -> None:
        from huggingface_hub import HfApi

        match = HUB.fullmatch(url.removeprefix("hf://"))
        if match is None:
            raise RemoteError(f"{url}: must be hf://OWNER/NAME[@REVISION][/PATH]")
        kind, name, revision, path = match.groups()
        self._url, self._api, self._path = url, HfApi(), f"{path}/" if path else ""
        self._repository: dict[str, Any] = {
            "repo_id": name,
            "repo_type": kind[:-2] if kind else "model",
            "revision": revision,
        }

    def list(self, known: Iterable[str] = ()) -> Listing:
        from huggingface_hub.errors import EntryNotFoundError

        found = {}
        with readable(self._url), suppress(EntryNotFoundError):
            tree = self._api.list_repo_tree(
                path_in_repo=self._path.rstrip("/") or None, recursive=True, **self._repository
            )
            found = {file.path: getattr(file, "blob_id", None) for file in tree}
        return {name.removeprefix(self._path): (blob, 0) for name, blob in found.items() if blob}

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        from huggingface_hub.errors import EntryNotFoundError

        with readable(self._url), tempfile.TemporaryDirectory() as folder:
            try:
                path = self._api.hf_hub_download(
                    filename=self._path + name, local_dir=folder, **self._repository
                )
            except EntryNotFoundError:
                raise FileNotFoundError(name) from None
            with open(path, "rb") as file:
                yield file

    def put(self, name: str, file: Path) -> None:
        with readable(self._url):
            self._api.upload_file(
                path_or_fileobj=file, path_in_repo=self._path + name, **self._repository
            )


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A refusal of redirects: the operator trusts an address, not the addresses to which it leads."""

    def redirect_request(self, request: Any, file: Any, code: int, *rest: Any) -> None:
        file.close()
        raise RemoteError(
            f"{request.full_url}: is redirected to another address, which is not followed"
        )


class HttpFiles:
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
