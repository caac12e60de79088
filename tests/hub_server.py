"""A local stand-in for the hub: the few endpoints that huggingface_hub calls to download a snapshot."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.http_thread import QuietHandler, serving_in_thread


@dataclass
class Hub:
    """Repositories by name: the commit of each revision, and the files of each commit."""

    url: str = ""
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)

    def publish(self, name: str, folder: Path, revision: str = "main") -> str:
        """Add a commit with the files of a folder; returns its hash."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        content = json.dumps({path: hashlib.sha1(data).hexdigest() for path, data in files.items()})
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.revisions.setdefault(name, {})[revision] = commit
        self.revisions[name][commit] = commit
        self.files[commit] = files
        return commit

    def environment(self, cache: Path) -> dict[str, str]:
        """The variables by which huggingface_hub uses this server."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A server on a free port of this machine."""
    hub = Hub()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            status, headers, body = answer(hub, path)
            if self.command == "GET" and "/resolve/" in path and status == 200:
                hub.downloads.append(path.split("/resolve/")[1].partition("/")[2])
            self.reply(body, status, **headers)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    with serving_in_thread(server):
        yield hub


Answer = tuple[int, Mapping[str, str], bytes]


def answer(hub: Hub, path: str) -> Answer:
    """The response to a path: of a repository's revision, of its files, or of one file."""
    if path.startswith("api/models/"):
        for kind in ("/revision/", "/tree/"):
            name, found, revision = path.removeprefix("api/models/").partition(kind)
            if found:
                return describe(hub, name, revision, kind)
    name, found, rest = path.partition("/resolve/")
    revision, _, file = rest.partition("/")
    commit = hub.revisions.get(name, {}).get(revision)
    if not found or commit is None:
        return 404, {"X-Error-Code": "RevisionNotFound" if found else "RepoNotFound"}, b""
    if file not in hub.files[commit]:
        return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
    content = hub.files[commit][file]
    headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
    return 200, headers, content


def describe(hub: Hub, name: str, revision: str, kind: str) -> Answer:
    if name not in hub.revisions:
        return 404, {"X-Error-Code": "RepoNotFound"}, b""
    commit = hub.revisions[name].get(revision)
    if commit is None:
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    files = hub.files[commit]
    document: Any = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
    if kind == "/tree/":
        document = [
            {
                **{"type": "file", "path": file, "size": len(content)},
                "oid": hashlib.sha1(content).hexdigest(),
            }
            for file, content in files.items()
        ]
    return 200, {"Content-Type": "application/json"}, json.dumps(document).encode()
