"""The cache of models that were downloaded or exported, each once: `~/.cache/quartet/KEY/` has a bundle's folder.

It has `source.json`, too, which names the origin. The directory follows XDG_CACHE_HOME. A bundle at an address is
downloaded manifest first. Each file must have the SHA-256 of the manifest; else nothing is kept.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from service.core.addresses import RemoteError, address
from service.core.bundle import BundleError, parse_manifest
from service.core.bundle_versions import MANIFEST
from service.core.remote_files import copy, files_at

SOURCE = "source.json"
README = "README.md"  # which no manifest lists
MOST_MANIFEST_BYTES = 2**26


@dataclass(frozen=True)
class Source:
    """The origin of a bundle.

    name: a path, or a name on the hub without its revision
    commit, revision: on the hub, as it was found and as it was requested; "" for a path and for the default revision
    """

    name: str
    key: str
    commit: str = ""
    revision: str = ""


@dataclass(frozen=True)
class Entry:
    """A bundle in the cache."""

    folder: Path
    source: Source

    @property
    def bundle(self) -> Path:
        return next(path.parent for path in self.folder.glob(f"*/{MANIFEST}"))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    @property
    def used_s(self) -> float:
        """The time of the last use, in seconds since 1970."""
        return (self.folder / SOURCE).stat().st_mtime


def root() -> Path:
    """Return the directory of the cache, which need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "quartet"


def entries() -> list[Entry]:
    """Return the complete entries of this version and of others, the last used first."""
    found = []
    for file in root().glob(f"[!.]*/{SOURCE}"):
        fields = json.loads(file.read_text(encoding="utf-8"))
        found.append(Entry(file.parent, Source(**fields)))
    return sorted(found, key=lambda entry: -entry.used_s)


def entry_of(source: Source) -> Entry | None:
    """Return the entry of a source, and note its use; None where it is not in the cache."""
    entry = Entry(root() / source.key, source)
    if not (entry.folder / SOURCE).is_file():
        return None
    os.utime(entry.folder / SOURCE)
    return entry


@contextmanager
def writing(source: Source) -> Iterator[Path | None]:
    """Yield a temporary folder that becomes the entry of a source; None where another process wrote it meanwhile."""
    root().mkdir(parents=True, exist_ok=True)
    with (root() / f".{source.key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if entry_of(source) is not None:
            yield None
            return
        for stale in root().glob(f".{source.key}.*/"):  # of a process that was killed
            shutil.rmtree(stale)
        folder = Path(tempfile.mkdtemp(prefix=f".{source.key}.", dir=root()))
        try:
            yield folder
            (folder / SOURCE).write_text(json.dumps(asdict(source)), encoding="utf-8")
            folder.rename(root() / source.key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_entry(entry: Entry) -> None:
    """Remove an entry; a process that opens it meanwhile finds all or nothing."""
    hidden = entry.folder.with_name(f".{entry.folder.name}.removed")
    entry.folder.rename(hidden)
    shutil.rmtree(hidden)


# -- bundles at addresses -----------------------------------------------------------------------------


class NoBundle(BundleError):
    """An address without a manifest."""


class Unreachable(BundleError):
    """An address that cannot be read now; a later attempt may succeed."""


def fetch_bundle(path: Path | str) -> Path:
    """Return the directory of a bundle, which is downloaded if it is at an address. Raises BundleError."""
    url = address(path)
    return Path(path) if url is None else fetch(url).bundle


def fetch(url: str) -> Entry:
    """Return the entry of the bundle at an address, whose files are downloaded unless they are there.

    Raises BundleError, and NoBundle where there is no manifest. Then nothing is kept.
    """
    name = MANIFEST
    try:
        files = files_at(url)
        with files.open(MANIFEST) as opened:
            text = opened.read(MOST_MANIFEST_BYTES)
        manifest = parse_manifest(url, text)
        source = Source(url, key_of(hashlib.sha256(text).hexdigest()))
        with writing(source) as folder:
            if folder is not None:
                bundle = folder / Path(url).name
                for name, expected in manifest.files().items():
                    if (found := copy(files, name, bundle / name)) != expected:
                        reason = f"{name} has SHA-256 {found[:12]}..., the manifest says {expected[:12]}..."
                        raise BundleError(url, reason)
                with suppress(FileNotFoundError):
                    copy(files, README, bundle / README)
                (bundle / MANIFEST).write_bytes(text)
    except FileNotFoundError:
        raise (NoBundle if name == MANIFEST else BundleError)(url, f"it has no {name}") from None
    except RemoteError as error:
        raise Unreachable(url, str(error).removeprefix(f"{url}: ")) from None
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}: set XDG_CACHE_HOME to a directory with space"
        raise BundleError(url, reason) from None
    return Entry(root() / source.key, source)


def key_of(sha256: str) -> str:
    """Return the key of a bundle that was downloaded. sha256: of its manifest"""
    return sha256[:16]


def stored_bundle(path: str, sha256: str) -> Path:
    """Return the directory of a bundle that was downloaded once, also without a connection. Raises BundleError."""
    url = address(path)
    if url is not None and (entry := entry_of(Source(url, key_of(sha256)))):
        return entry.bundle
    return fetch_bundle(path)


def forget(path: str, sha256: str) -> None:
    """Remove a bundle that was downloaded from an address and is not served any more, unless it is absent."""
    url = address(path)
    if url is not None and (entry := entry_of(Source(url, key_of(sha256)))):
        remove_entry(entry)


def last_bundle(path: str) -> Path:
    """Return the directory of a bundle; that of the last download where its address cannot be read now."""
    try:
        return fetch_bundle(path)
    except Unreachable as error:
        for entry in entries():
            if entry.source.name == address(path):
                print(f"quartet: the last download is used, because {error}", file=sys.stderr)
                return entry.bundle
        raise


def main(paths: Sequence[str]) -> int:
    """Print the directory of each bundle, or the reason on standard error. Returns the exit status."""
    try:
        print(*map(last_bundle, paths), sep="\n")
    except BundleError as error:
        print(f"quartet: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
