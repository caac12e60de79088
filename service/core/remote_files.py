"""Files at addresses: `hf://`, `s3://`, `gs://`, `https://` and, without a proof of the sender, `http://`.

Each library uses its own credentials: the variables and files of AWS and Google, huggingface_hub's token, `.netrc`.
"""

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import quote

from service.core.addresses import Listing, RemoteError, readable

HUB = re.compile(r"((?:datasets|spaces)/)?([^/]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?")
PART = 2**20  # bytes that are read at once


class Files(Protocol):
    """The files below an address, by their paths relative to it."""

    def list(self, known: Iterable[str] = ()) -> Listing:
        """Return all files; of a web server, which has no list of them, the files in `known` that it has."""

    def open(self, name: str) -> Any:
        """Return a context manager that yields the file's bytes. Raises FileNotFoundError for an absent one."""

    def put(self, name: str, file: Path) -> None:
        """Write a local file, which appears at once or not at all."""


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
                    from service.core.web_files import WebFiles

                    return WebFiles(url)
    except ModuleNotFoundError as error:
        extra = "hub" if scheme == "hf" else "bulk"
        package = f'pip install "quartet-serving[{extra}]"'
        raise RemoteError(f"{url}: needs {error.name}: {package}") from None


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
