"""Bundles that Quartet exported from checkpoints, ONNX graphs and names on the hub, each once.

`service.core.bundle_cache` has the layout. The key of an entry is a hash of the files' contents, of their versions at
an address or of the hub's commit, and of Quartet's version.
"""

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from quartet.progress import Progress
from service import __version__
from service.core.addresses import RemoteError, address
from service.core.bundle import BundleError
from service.core.bundle_cache import (
    SOURCE,
    Entry,
    NoBundle,
    Source,
    entries,
    entry_of,
    fetch,
    remove_entry,
    root,
    writing,
)
from service.core.bundle_versions import MANIFEST, versions_of
from service.core.remote_files import copy, files_at
from service.processes.child_process import child_python

BUNDLES = Path("bundles")  # where `quartet train` writes
# Of the cache: above it, the entries that were not used for the longest time are removed.
MOST_BYTES = 20 * 10**9
MAIN_FILES = ("config.json", "modules.json", "gliner_config.json")  # a checkpoint has one
HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+")
KEY = re.compile(r"[0-9a-f]{16}")
COMMIT = re.compile(r"[0-9a-f]{40}")
FAILED = "export: "  # before an error of the export
FREE_SPACE = (
    "free some space, remove models (quartet remove), or set XDG_CACHE_HOME to another disk"
)
TRAINING_STATES = "checkpoint-*"  # folders that trainers write next to the weights


class SourceError(Exception):
    """A model that cannot be opened or exported; the message has its name and the reason in one line."""


def resolve(name: str) -> Path:
    """Return the bundle of a model, which is exported first where the cache does not have it. Raises SourceError.

    name: a bundle, the name of one in bundles/, a checkpoint, a directory or file with an ONNX graph, a file that
    `quartet pull --to` wrote, NAME[@REVISION] on the hub, or the address of one of these
    """
    path = Path(name)
    if (path / MANIFEST).is_file():
        return path
    if trained := versions_of(BUNDLES / name):
        return trained[max(trained)]
    try:
        if path.suffix == ".tar" and path.is_file():
            return unpack(path).bundle
        return find(name).bundle
    except OSError as error:
        parts = [name, error.strerror or str(error), *filter(None, [error.filename])]
        if error.errno == errno.ENOSPC:
            parts.append(FREE_SPACE)
        elif error.filename and (
            root().is_relative_to(error.filename) or Path(error.filename).is_relative_to(root())
        ):
            parts.append("set XDG_CACHE_HOME to a directory that Quartet may write")
        raise SourceError(": ".join(map(str, parts))) from None


def find(name: str) -> Entry:
    """Return the entry of a path, an address or a hub name, which is exported first where there is none.

    Raises SourceError.
    """
    path = Path(name)
    if url := address(name):
        if url.endswith((".tar", ".onnx")):
            return find_file(url)
        try:
            return fetch(url)
        except NoBundle:
            name = url.removeprefix("hf://")
            if name == url or name.count("/") > 1:
                return find_checkpoint(url)
        except BundleError as error:
            raise SourceError(str(error)) from None
    if path.exists():
        source = Source(str(path.resolve()), make_key(hash_files(path)))
        return entry_of(source) or export(source, name, folder_of(path).name)
    model, _, revision = name.partition("@")
    if not HUB_NAME.fullmatch(model) or name.startswith("."):
        raise SourceError(f"{name}: no such file or directory")
    source = hub_source(model, revision)
    return entry_of(source) or export(source, f"{model}@{source.commit}", model)


def find_checkpoint(url: str) -> Entry:
    """Return the entry of a checkpoint or an ONNX graph at an address, exported where its files have changed."""
    from model.checkpoints.hub_download import READ_FILES

    try:
        files = files_at(url).list(READ_FILES)
    except RemoteError as error:
        raise SourceError(str(error)) from None
    if not {*MAIN_FILES} & files.keys():
        raise SourceError(
            f"{url}: no bundle and no checkpoint: it has no {MANIFEST} and no config.json"
        )
    source = Source(url, make_key(f"{url} {sorted(files.items())}"))
    return entry_of(source) or export(source, url, Path(url).name)


def find_file(url: str) -> Entry:
    """Return the entry of a graph or of a file of `pack` at an address, which are read again when they have changed."""
    from model.checkpoints.hub_download import SETTINGS_FILES

    base, _, name = url.rpartition("/")
    if name.endswith(".tar"):
        wanted = [name]
    else:  # a graph, its weights, and the settings of the model
        base = base.removesuffix("/onnx")
        name = url.removeprefix(f"{base}/")
        wanted = [name, f"{name}_data", f"{name}.data", *SETTINGS_FILES]
    try:
        files = files_at(base)
        found = {file: version for file, version in files.list(wanted).items() if file in wanted}
        if name not in found:
            raise SourceError(f"{url}: no such file")
        source = Source(url, make_key(f"{url} {sorted(found.items())}"))
        if entry := entry_of(source):
            return entry
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / Path(base).name
            for file in found:
                copy(files, file, folder / file)
            if name.endswith(".tar"):
                return unpack(folder / name, source)
            return export(source, str(folder / name), Path(base).name)
    except RemoteError as error:
        raise SourceError(str(error)) from None


def make_key(content: str) -> str:
    return hashlib.sha256(f"{content} {__version__}".encode()).hexdigest()[:16]


# -- what a name is now -------------------------------------------------------------------------------


def folder_of(path: Path) -> Path:
    """Return the directory of a model's configuration: of `DIR/onnx/model.onnx` it is DIR."""
    whole = path.resolve()
    if whole.is_dir():
        return whole
    return whole.parent.parent if whole.parent.name == "onnx" else whole.parent


def hash_files(path: Path) -> str:
    """Return a hash of the names and contents of the files from which a path is exported."""
    folder, path = folder_of(path), path.resolve()
    files = {*folder.glob("*"), *(folder.glob("*/*") if path.is_dir() else path.parent.glob("*"))}
    total = hashlib.sha256(path.name.encode())
    for file in sorted(filter(Path.is_file, files)):
        within = file.relative_to(folder)
        if within.parts[0].startswith(".") or within.match(f"{TRAINING_STATES}/*"):
            continue
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        total.update(f"{within} {digest}\n".encode())
    return total.hexdigest()


def hub_source(model: str, revision: str) -> Source:
    """Return a hub model at the commit that its revision has now; without a connection, at the last one of the cache.

    revision: a branch, tag or commit, "" for the hub's default. Raises SourceError where neither is known.
    """
    reason = ""
    commit = revision if COMMIT.fullmatch(revision) else ""
    if not commit:
        try:
            commit = hub_commit(model, revision)
        except ModuleNotFoundError as error:
            reason = f'{error.name} is not installed: pip install "quartet-serving[hub]"'
            commit = last_commit(model, revision)
        except Exception as error:  # the hub client's many errors mean one thing here
            reason = " ".join(str(error).split()) or type(error).__name__
            commit = last_commit(model, revision)
    if not commit:
        raise SourceError(
            f"{model}: no bundle, file or directory has this name, and the hub does not provide it ({reason}): "
            "correct the name; on a machine without a network, serve a file of quartet pull --to"
        )
    if reason:
        print(f"quartet: {model}: commit {commit} of the cache, because {reason}", file=sys.stderr)
    return Source(model, make_key(f"{model} {commit}"), commit, revision)


def hub_commit(model: str, revision: str) -> str:
    """Ask the hub for the commit of a revision. Raises the hub client's errors."""
    from huggingface_hub import HfApi

    return str(HfApi().model_info(model, revision=revision or "main", timeout=10).sha)


def last_commit(model: str, revision: str) -> str:
    """Return the last used commit of a revision in this cache, or that of the hub client's cache; "" without one."""
    for entry in entries():
        if (entry.source.name, entry.source.revision) == (model, revision):
            return entry.source.commit
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return ""
    files = (
        try_to_load_from_cache(model, name, revision=revision or "main") for name in MAIN_FILES
    )
    return next((Path(file).parent.name for file in files if isinstance(file, str)), "")


# -- writing ------------------------------------------------------------------------------------------


def export(source: Source, origin: str, name: str) -> Entry:
    """Export a checkpoint or an ONNX graph into the cache, in a process of its own. Raises SourceError.

    name: of the model in requests, made of the letters that such names may have
    """
    words = [re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("._-") for word in name.split("/")]
    name = "/".join(filter(None, words)) or "model"
    with writing(source) as folder:
        if folder is not None:
            print(
                f"quartet: exporting {origin}, once; later starts take it from the cache",
                file=sys.stderr,
            )
            run_export([origin, str(folder / name.rpartition("/")[2]), "--name", name], folder)
    remove(above_limit(), keep=source.key)
    return Entry(root() / source.key, source)


def run_export(arguments: list[str], scratch: Path | None = None) -> None:
    """Run `python -m export` and show its progress on standard error. Raises SourceError with its last line.

    scratch: for temporary files, which are as large as the model; None for the system's directory
    """
    command = [*child_python(), "-m", "export", *arguments]
    environment = {**({"TMPDIR": str(scratch)} if scratch else {}), **os.environ}
    last, progress = "", Progress()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        try:
            for line in run.stdout:
                last = line.strip() or last
                if not last.startswith(FAILED):
                    progress.show(line.rstrip())
        except BaseException:  # Ctrl-C or SIGTERM
            run.terminate()
            raise
        finally:
            progress.end()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if run.returncode:
        if os.strerror(errno.ENOSPC) in last:
            last = f"{last}: {FREE_SPACE}"
        if run.returncode == -signal.SIGKILL:
            last = "the export was killed, probably because memory ran out: see quartet doctor"
        raise SourceError(last.removeprefix(FAILED))


def pack(entry: Entry, file: Path) -> None:
    """Write an entry to a tar file, which `resolve` takes."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        with tarfile.open(partial, "w") as archive:
            archive.add(entry.folder, arcname=entry.source.key)
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


def unpack(file: Path, own: Source | None = None) -> Entry:
    """Unpack a file of `pack` into the cache. Raises SourceError for a file that is none.

    own: the source of the entry, if another one than that in the file
    """
    try:
        with tarfile.open(file) as archive:
            top = archive.next()
            reader = archive.extractfile(f"{top.name}/{SOURCE}") if top else None
            if reader is None:
                raise KeyError(SOURCE)
            source = Source(**json.load(reader))
            inner = source.key
            if not KEY.fullmatch(inner):
                raise ValueError(f"key {inner!r}")
            source = own or source
            with writing(source) as folder:
                if folder is not None:
                    archive.extractall(folder, filter="data")
                    for path in (folder / inner).iterdir():
                        path.rename(folder / path.name)
                    (folder / inner).rmdir()
    except (tarfile.TarError, KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{file}: not a file that quartet pull --to wrote: {error}") from None
    return Entry(root() / source.key, source)


# -- removing -----------------------------------------------------------------------------------------


def above_limit() -> Iterator[Entry]:
    """Yield the entries, last used first, from the one with which the cache exceeds its limit."""
    total = 0
    for entry in entries():
        total += entry.size
        if total > MOST_BYTES:
            yield entry


def remove(unwanted: Iterable[Entry], keep: str = "") -> None:
    """Remove entries, but for the one with the key `keep`."""
    for entry in unwanted:
        if entry.source.key != keep:
            remove_entry(entry)
