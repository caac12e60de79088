"""Stores on this machine: a web server of a folder's files, and an S3 server where its environment is built."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.environments import Unavailable
from service.core.remote_files import files_at
from tests.e2e.client_calls.environments import environment
from tests.http_thread import serving_in_thread

BUCKET = "s3://models"


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
def serve_s3() -> Iterator[dict[str, str]]:
    """Serve an S3 store with the bucket of `BUCKET`; yields the variables that name it. Skips where moto is absent."""
    try:
        python = environment("moto").python()
    except Unavailable as error:
        pytest.skip(f"moto: {error}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    server = python.with_name("moto_server")
    process = subprocess.Popen(
        [python, server, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        wait_for(port)
        make_bucket()
        yield variables
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
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
