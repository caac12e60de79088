"""Checkpoints on the hub and at addresses: their names and revisions, and which of their files are downloaded.

The files are those that a reader opens: settings and tokenizers first, then weights of the folders that these name. A
pickle is downloaded only for a folder without safetensors files.
"""

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase as fnmatch
from functools import cache
from glob import escape
from pathlib import Path

from model.checkpoints.errors import INSTALL_HUB, CheckpointError
from model.checkpoints.head_config import CARD
from model.checkpoints.sentence_config import (
    METADATA,
    MODULES,
    ROOT,
    ROUTER_FILE,
    SENTENCE_FILES,
    STATIC,
    WEIGHTED,
    is_sentence_directory,
    read_all_modules,
)
from model.checkpoints.weight_files import ADAPTER_FILES, INDEX, PICKLE, SAFETENSORS
from service.core.addresses import RemoteError, address
from service.core.remote_files import copy, files_at

COMMIT = re.compile(r"[0-9a-f]{40}")
GLINER = "gliner_config.json"
CONFIG_FILES = ("config.json", GLINER, METADATA, "heads.json", "provenance.json", *ADAPTER_FILES)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt"),
    *("sentencepiece.bpe.model", "sentencepiece.model", "spiece.model"),
    *("spm.model", "tokenizer.model"),
)
# All files but weights that a reader opens, at the top or in a module's folder.
SETTINGS_FILES = (
    *CONFIG_FILES,
    *TOKENIZER_FILES,
    *(MODULES, ROOT, ROUTER_FILE, CARD, *SENTENCE_FILES),
    *(SAFETENSORS + INDEX, PICKLE + INDEX),
)
OTHER_FRAMEWORKS = ("onnx/*", "openvino/*", "coreml/*", "flax/*")
PLACES = ("model.onnx", "onnx/model.onnx")  # a graph here is taken, whatever other graphs there are
# Where a server has no list of its files, they are looked for by these names.
READ_FILES = (*SETTINGS_FILES, SAFETENSORS, PICKLE, *PLACES)
GENERATOR = "generator"  # of an ELECTRA that was pretrained here


def split_name(source: str) -> tuple[str, str | None]:
    """Return the name and the revision of `NAME@REVISION`; None for the hub's default. Raises CheckpointError."""
    if (url := address(source)) and not is_repository(url):
        return url, None
    name, at, revision = source.removeprefix("hf://").partition("@")
    if at and not (name and revision):
        raise CheckpointError(
            f"{source}: must be NAME or NAME@REVISION, with a branch, tag or commit"
        )
    return name, revision if at else None


def is_repository(source: str) -> bool:
    """Return whether an address is that of a model on the hub, `hf://OWNER/NAME`, and not of a folder in it."""
    return source.startswith("hf://") and source.count("/") == 3


def join_name(source: str, revision: str | None) -> str:
    """Return NAME@REVISION. Raises CheckpointError for a local path, and for a name that has a revision already."""
    if revision is None:
        return source
    if Path(source).exists() or source.startswith("package:"):
        raise CheckpointError(f"--revision: {source} is not on the hub: leave out --revision")
    if "@" in source:
        raise CheckpointError(
            f"--revision: {source} has a revision already: leave out one of the two"
        )
    return f"{source}@{revision}"


def download(source: str) -> Path:
    """Download the missing files of NAME or NAME@REVISION; return their folder. Raises CheckpointError."""
    name, revision = split_name(source)
    folder = _fetch(source, name, revision, with_folders(SETTINGS_FILES))
    commit = commit_of(folder) or revision
    places = weight_folders(folder)
    _fetch(source, name, commit, _weights(places, SAFETENSORS))
    if without := [place for place in places if not _has_safetensors(folder / place)]:
        _fetch(source, name, commit, _weights(without, PICKLE))
    return folder


def download_graph(source: str) -> Path:
    """Download settings and ONNX graph of NAME or NAME@REVISION; return their folder. Raises CheckpointError."""
    name, revision = split_name(source)
    folder = _fetch(source, name, revision, with_folders(SETTINGS_FILES))
    graphs = choose_graphs(list_files(source))
    if len(graphs) != 1:
        listed = f"several ONNX graphs: {', '.join(graphs)}" if graphs else "no ONNX graph"
        raise CheckpointError(f"{source} has {listed}: download one, and give the path of the file")
    patterns = [escape(graph) + suffix for graph in graphs for suffix in ("", "_data", ".data")]
    _fetch(source, name, commit_of(folder) or revision, patterns, ignored=())
    return folder


def list_files(source: str) -> list[str]:
    """Return the paths of all files of NAME or NAME@REVISION; of the hub client's cache without a connection.

    At an address of a web server, of those of `READ_FILES`. Raises RemoteError where an address cannot be read.
    """
    name, revision = split_name(source)
    if address(name):
        return list(files_at(name).list(READ_FILES))
    from huggingface_hub import HfApi, snapshot_download

    try:
        # Listing the files alone would repeat a failed request for half a minute.
        found = HfApi().model_info(name, revision=revision or "main", timeout=10)
        return [file.rfilename for file in found.siblings or ()]
    except Exception:  # the hub client's many errors mean one thing here
        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except Exception:
            return []
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*")]


def choose_graphs(files: Sequence[str]) -> list[str]:
    """Return the graph in the first of PLACES, else all graphs at the top and in `onnx`."""
    usual = [place for place in PLACES if place in files]
    return usual[:1] or sorted(filter(re.compile(r"(onnx/)?[^/]+\.onnx").fullmatch, files))


def with_folders(names: Iterable[str]) -> list[str]:
    """Return patterns for files of these names, at the top and in folders."""
    return [pattern for name in names for pattern in (name, f"*/{name}")]


def weight_folders(folder: Path) -> list[str]:
    """Return the folders whose weights are read, relative to the checkpoint's: `""` is its own."""
    places = [""]
    if is_sentence_directory(folder):
        modules = read_all_modules(folder)
        places = [
            place.relative_to(folder).as_posix()
            for kind, place in modules
            if kind in ("Transformer", "Dense", "LayerNorm", STATIC, WEIGHTED)
        ]
        places = ["" if place == "." else place for place in places]
    if (folder / GENERATOR / "config.json").is_file():
        places.append(GENERATOR)
    return list(dict.fromkeys(places))


def _weights(places: Iterable[str], file: str) -> list[str]:
    """Return patterns of a weight file in folders, and of its shards."""
    stem, _, suffix = file.partition(".")
    prefixes = [f"{escape(place)}/" if place else "" for place in places]
    return [
        pattern
        for prefix in prefixes
        for pattern in (f"{prefix}{file}", f"{prefix}{stem}-*-of-*.{suffix}")
    ]


def _has_safetensors(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SAFETENSORS, SAFETENSORS + INDEX))


def _fetch(
    source: str,
    name: str,
    revision: str | None,
    patterns: Sequence[str],
    ignored: Sequence[str] = OTHER_FRAMEWORKS,
) -> Path:
    if address(name):
        return _copy(name, patterns, ignored)
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise CheckpointError(
            f"{source} is no local directory, and a name on the hub needs huggingface_hub: {INSTALL_HUB}"
        ) from None

    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=[*patterns], ignore_patterns=[*ignored]
            )
        )
    except Exception as error:  # the hub client's many errors mean one thing here
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{source} is no local directory, and the hub does not provide it: {reason}"
        ) from error


def _copy(url: str, patterns: Sequence[str], ignored: Sequence[str]) -> Path:
    """Copy the files of an address that match patterns, unless they are there. Raises CheckpointError."""
    folder = _folder_of(url)
    try:
        files = files_at(url)
        for _ in range(2):  # first the files that name folders and shards
            for name in files.list(_named(folder, patterns)):
                is_read = any(fnmatch(name, pattern) for pattern in patterns)
                if is_read and not any(fnmatch(name, pattern) for pattern in ignored):
                    target = (folder / name).resolve()
                    if folder not in target.parents:
                        raise CheckpointError(f"{url}: {name} leads out of the folder")
                    if not target.exists():
                        copy(files, name, target)
    except (RemoteError, FileNotFoundError, ValueError, KeyError) as error:
        raise CheckpointError(f"{url}: {error}") from None
    if not folder.is_dir():
        raise CheckpointError(f"{url}: none of the files of a checkpoint is there")
    return folder


def _named(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Return the names of patterns, at the top and in the folders of modules, and of the shards of weights."""
    names = [pattern for pattern in patterns if "*" not in pattern]
    if is_sentence_directory(folder):
        places = [place.relative_to(folder) for _, place in read_all_modules(folder)]
        names += [(place / name).as_posix() for place in places for name in names]
    for index in folder.glob(f"**/*{INDEX}"):
        shards = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        names += [(index.parent.relative_to(folder) / str(shard)).as_posix() for shard in shards]
    return list(dict.fromkeys(names))


@cache
def _folder_of(url: str) -> Path:
    """Return a directory for the files of an address, which is removed when the process ends."""
    folder = Path(tempfile.mkdtemp()).resolve() / Path(url).name
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    return folder


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder in the hub's cache; None for any other folder."""
    is_snapshot = folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name)
    return folder.name if is_snapshot else None
