"""Versions of a bundle whose answers differ, each with goldens of its own: what a running service is to swap."""

import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from service.core import bundle
from service.core.cpu import CPU
from service.core.goldens import Golden, save_golden
from service.core.session import Session, SessionOptions

GRAPH, WEIGHTS = "fp32.onnx", "weights.bin"


def save_version(full: Path, path: Path, version: str, **manifest: Any) -> Path:
    """Write a bundle with one graph of a full one, at fp32, and weights that are moved at random; returns its path.

    manifest: what it is to say differently
    """
    with bundle.writing(path, replace=True) as folder:
        for name in ("tokenizer.json", "golden.npz", GRAPH):
            shutil.copy(full / name, folder)
        move_weights(full / WEIGHTS, folder / WEIGHTS, seed=zlib.crc32(version.encode()))
        said = read_manifest(full)
        graphs = [graph for graph in said["graphs"] if graph["file"] == GRAPH]
        graphs[0]["weights"] = bundle.describe_file(folder / WEIGHTS)
        write_manifest(folder, {**said, "version": version, "graphs": graphs, **manifest})
        answer_goldens(folder)
    return path


def save_fleet(full: Path, folder: Path, names: Sequence[str]) -> Path:
    """Write a bundle of each name, whose answers differ; returns the folder."""
    for name in names:
        save_version(full, folder / name, name)
        restate(folder / name, name=name, version="1")
    return folder


def change_a_byte(folder: Path) -> None:
    data = bytearray((folder / "weights.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "weights.bin").write_bytes(data)


def change_the_goldens(folder: Path) -> None:
    golden = bundle.load(folder).golden
    golden.outputs["sentiment"][0] += 1
    save_golden(folder / "golden.npz", golden)
    restate_goldens(folder)


def move_weights(source: Path, target: Path, seed: int) -> None:
    weights = np.fromfile(source, np.float32)
    noise = np.random.default_rng(seed).normal(1, 0.05, weights.shape)
    (weights * noise).astype(np.float32).tofile(target)


def answer_goldens(folder: Path) -> None:
    """Let the goldens be what the bundle's graph answers."""
    own = bundle.load(folder)
    session = Session(own, own.manifest.graphs[0], CPU, SessionOptions(threads=1))
    outputs = session._recompute(own.golden)
    golden = Golden(own.golden.input_ids, own.golden.token_type_ids, own.golden.lengths, outputs)
    save_golden(folder / "golden.npz", golden)
    restate_goldens(folder)


def restate_goldens(folder: Path) -> None:
    told = read_manifest(folder)["goldens"] | bundle.describe_file(folder / "golden.npz")
    restate(folder, goldens=told)


def read_manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def write_manifest(folder: Path, said: Any) -> None:
    (folder / "manifest.json").write_text(json.dumps(said))


def restate(folder: Path, **changes: Any) -> None:
    """Let a manifest say other things."""
    write_manifest(folder, {**read_manifest(folder), **changes})
