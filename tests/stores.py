"""Stores on this machine: a web server of a folder's files, and an S3 server where its environment is built."""

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.environments import Unavailable
from benchmarks.lib.servers import free_port
from service.core.remote_files import files_at
from tests.e2e.client_calls.environments import environment
from tests.http_thread import serving_in_thread

BUCKET = "s3://models"
PUBLIC = "gs://anonymous@models"


class WebServer(ThreadingHTTPServer):
    """The files of a folder. requests: the paths of requests; moved: the targets of redirects, by path"""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        self.moved: dict[str, str] = {}
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(SimpleHTTPRequestHandler):
    server: WebServer

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        if target := self.server.moved.get(self.path):
            self.send_response(302)
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            super().do_GET()


@contextmanager
def serve_folder(folder: Path) -> Iterator[WebServer]:
    server = WebServer(folder)
    with serving_in_thread(server):
        yield server


@contextmanager
def serve_s3() -> Iterator[None]:
    """Serve an S3 store with the bucket of `BUCKET`. Skips where moto is absent."""
    variables = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with serving("moto", "moto_server -H 127.0.0.1 -p {port}", variables):
        make_bucket()
        yield


@contextmanager
def serve_gcs() -> Iterator[None]:
    """Serve a store of Google's with the bucket of `PUBLIC`. Skips where its emulator is absent."""
    command = "gcp-storage-emulator start --host 127.0.0.1 --port {port} --in-memory"
    variables = {"CLOUD_STORAGE_EMULATOR_ENDPOINT": "http://127.0.0.1:{port}"}
    with serving("gcs", f"{command} --default-bucket models", variables):
        yield


@contextmanager
def serving(name: str, command: str, variables: Mapping[str, str]) -> Iterator[None]:
    """Run a server of an environment on a free port, with the variables by which clients find it."""
    try:
        python = environment(name).python()
    except Unavailable as error:
        pytest.skip(f"{name}: {error}")
    port = free_port()
    program, *arguments = command.format(port=port).split()
    process = subprocess.Popen(
        [python, python.with_name(program), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value.format(port=port))
            wait_for(port)
            yield
    finally:
        process.terminate()
        process.wait(30)


def wait_for(port: int) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < end, "the S3 server did not start"
            time.sleep(0.05)


def make_bucket() -> None:
    from pyarrow.fs import FileSystem

    system, name = FileSystem.from_uri(f"{BUCKET}?allow_bucket_creation=true")
    system.create_dir(name)


def upload(folder: Path, url: str) -> str:
    """Write the files of a folder below an address; returns the address."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            files_at(url).put(file.relative_to(folder).as_posix(), file)
    return url


def lengthen(file: Path) -> None:
    """Add a line break at the end of a file."""
    file.write_bytes(file.read_bytes() + b"\n")
