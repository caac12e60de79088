"""The contract between training and serving: a bundle directory and its manifest.

The format is specified in `docs/reference/bundle.md`. This module reads and writes it and checks every hash. It does
not depend on how a bundle is made or served.
"""

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from service.core.bundle_versions import MANIFEST as MANIFEST
from service.core.goldens import Golden, disagreement
from service.core.graph_files import external_files
from service.core.manifest import Graph, Manifest, Tolerance

MOST_GOLDEN_BYTES = 2**28  # of all arrays, uncompressed


class BundleError(Exception):
    """A bundle that must not be served; the message contains its path and the reason."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = Path(path)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BundleTexts:
    """The parts of a bundle that a process needs to encode texts and decode outputs, without the graphs."""

    manifest: Manifest
    sha256: str  # of the manifest, which contains the hashes of all other files
    tokenizer: bytes  # the bytes of its file; empty for a head bundle, which has its encoder's


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk whose manifest, hashes and goldens were read and agree; `sha256` is the manifest's."""

    path: Path
    manifest: Manifest
    sha256: str
    golden: Golden

    def file(self, name: str) -> Path:
        return self.path / name


def read_texts(bundle: Bundle) -> BundleTexts:
    """Read a bundle's tokenizer for an HTTP process. Raises BundleError if the tokenizer has changed."""
    return _read_texts(bundle.path, bundle.manifest, bundle.sha256)


def list_texts(folder: Path) -> BundleTexts:
    """Read the manifest and the tokenizer of a bundle that is not opened yet. Raises BundleError."""
    text = _read_manifest(folder)
    return _read_texts(folder, parse_manifest(folder, text), hashlib.sha256(text).hexdigest())


def _read_texts(folder: Path, manifest: Manifest, sha256: str) -> BundleTexts:
    vocabulary = manifest.vocabulary
    if manifest.encoder is not None:
        return BundleTexts(manifest, sha256, b"")
    try:
        tokenizer = (folder / vocabulary.file).read_bytes()
    except OSError as error:
        reason = f"{vocabulary.file} cannot be read: {error.strerror}"
        raise BundleError(folder, reason) from None
    if hashlib.sha256(tokenizer).hexdigest() != vocabulary.sha256:
        raise BundleError(folder, f"{vocabulary.file} was changed while it was being opened")
    return BundleTexts(manifest, sha256, tokenizer)


def read_manifest(folder: Path) -> Manifest:
    """Read a bundle's manifest alone. Raises BundleError."""
    return parse_manifest(folder, _read_manifest(folder))


def load(path: Path | str, *, proven: bool = False) -> Bundle:
    """Read a bundle, and check what can be checked without a run. Raises BundleError with the wrong file or field.

    proven: whether its files are known to have the manifest's hashes
    """
    folder = Path(path)
    text = _read_manifest(folder)
    manifest = parse_manifest(folder, text)
    for precision, tolerance in manifest.goldens.tolerance.items():
        if tolerance.max_difference is None and not tolerance.min_cosine:
            raise BundleError(folder, f"the golden tolerance for {precision} is empty")
    if not proven:
        for name, expected in manifest.files().items():
            _check_file(folder, name, expected)
        for graph in manifest.all_graphs:
            _check_external_data(folder, graph)
    golden = _read_golden(folder, manifest)
    return Bundle(folder, manifest, hashlib.sha256(text).hexdigest(), golden)


def _read_manifest(folder: Path) -> bytes:
    if not folder.is_dir():
        reason = "the bundle directory does not exist"
        if not folder.is_absolute() and len(folder.parts) <= 2 and ".." not in folder.parts:
            reason += f"; quartet serve {folder} exports a model of the hub and serves it"
        raise BundleError(folder, reason)
    path = folder / MANIFEST
    if path.is_symlink() or path.is_fifo() or path.is_socket() or path.is_char_device():
        raise BundleError(folder, f"{MANIFEST} is not a plain file")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        reason = f"not a bundle: it has no {MANIFEST}"
        if any((folder / name).is_file() for name in ("config.json", "gliner_config.json")):
            reason += f"; quartet serve {folder} exports a checkpoint and serves it"
        raise BundleError(folder, reason) from None
    except OSError as error:
        raise BundleError(folder, f"{MANIFEST} cannot be read: {error.strerror}") from None


def parse_manifest(folder: Path | str, text: bytes) -> Manifest:
    """Return a manifest from its text. folder: for messages. Raises BundleError."""
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'manifest'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise BundleError(folder, f"{MANIFEST} is not valid: {problems}") from None


def _check_file(folder: Path, name: str, expected: str) -> None:
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise BundleError(folder, f"{name} is missing or not a plain file")
    found = hash_file(path)
    if found != expected:
        raise BundleError(
            folder, f"{name} has SHA-256 {found[:12]}..., the manifest says {expected[:12]}..."
        )


def _check_external_data(folder: Path, graph: Graph) -> None:
    """Raise BundleError for a graph that reads another file than the weights that the manifest names."""
    allowed = {graph.weights.file} if graph.weights else set()
    try:
        others = external_files((folder / graph.file).read_bytes()) - allowed
    except ValueError as error:
        raise BundleError(folder, f"{graph.file} cannot be read: {error}") from None
    if others:
        raise BundleError(
            folder, f"{graph.file} reads {min(others)!r}, which is not its weights file"
        )


def _read_golden(folder: Path, manifest: Manifest) -> Golden:
    try:
        with (
            (folder / manifest.goldens.file).open("rb") as file,
            np.load(file, allow_pickle=False) as arrays,
        ):
            size = sum(entry.file_size for entry in arrays.zip.infolist())
            if size > MOST_GOLDEN_BYTES:
                raise ValueError(f"its arrays have {size} bytes, more than {MOST_GOLDEN_BYTES}")
            golden = Golden(
                arrays["input_ids"],
                arrays["token_type_ids"],
                arrays["lengths"],
                {head: arrays[f"output.{head}"] for head in manifest.heads},
            )
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        EOFError,
        OSError,
        zipfile.BadZipFile,
    ) as error:
        raise BundleError(folder, f"{manifest.goldens.file} cannot be read: {error}") from None
    if len(golden.input_ids) != golden.lengths.sum():
        raise BundleError(folder, f"{manifest.goldens.file}: lengths and input_ids disagree")
    for name, head in manifest.heads.items():
        if golden.outputs[name].shape[-1:] != (head.width,):
            shape = golden.outputs[name].shape
            raise BundleError(folder, f"head {name} gives {shape}, its rows should be {head.width}")
    return golden


def check_goldens(
    bundle: Bundle,
    precision: str,
    tolerance: Tolerance,
    outputs: Mapping[str, NDArray[np.float32]],
    runtime: str,
) -> None:
    """Compare outputs of this machine with the goldens. Raises BundleError with head, difference and runtimes."""
    for head, expected in bundle.golden.outputs.items():
        problem = disagreement(head, expected, outputs[head], tolerance)
        if problem:
            was = bundle.manifest.provenance.runtime
            changed = f" (exported with {was}, running {runtime})" if was != runtime else ""
            raise BundleError(bundle.path, f"goldens disagree at {precision}: {problem}{changed}")


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path) -> dict[str, str]:
    """Return the manifest's record of a file, its name and hash."""
    return {"file": path.name, "sha256": hash_file(path)}


@contextmanager
def writing(path: Path | str, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary directory next to `path`; rename it to `path` on success, and remove it on failure.

    Raises FileExistsError when `path` exists and `replace` is false, or when it is neither a bundle nor empty.
    """
    if Path(path).exists() and not replace:
        raise FileExistsError(f"{path} exists; choose another path, or use --replace")
    check_replaceable(Path(path))
    target = Path(path).resolve()  # the target of a link is replaced, not the link
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        for file in [*folder.iterdir(), folder]:
            _sync(file)
        if replace:
            swap(folder, target)
        else:
            folder.rename(target)  # the system refuses it if another directory has appeared there
        _sync(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # it has another path after success


def check_replaceable(path: Path) -> None:
    """Raise FileExistsError for a path that exists and is neither a bundle nor an empty directory."""
    empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not empty and not (path / MANIFEST).is_file():
        raise FileExistsError(
            f"{path} is not replaced: it is not a bundle, because it has no {MANIFEST}"
        )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def swap(folder: Path, target: Path) -> None:
    """Rename a directory to the path of another, which keeps the path until then and is removed afterwards."""
    put_back(folder, target)
    if target.exists():
        target.rename(_aside(folder))
    try:
        folder.rename(target)
    finally:
        put_back(folder, target)


def put_back(folder: Path, target: Path) -> None:
    """Repair an interrupted swap: restore the old directory if `target` is missing, and otherwise remove it."""
    old = _aside(folder)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        old.rename(target)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.old")
