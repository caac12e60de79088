"""Checkpoints on the hub: which files are downloaded, of which revision, from a local stand-in for the hub."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model.checkpoints import reader
from model.checkpoints.errors import CheckpointError
from model.checkpoints.hub_download import (
    SETTINGS_FILES,
    commit_of,
    join_name,
    split_name,
    weight_folders,
    with_folders,
)
from tests import hub
from tests.hub_server import Hub, serve_hub
from tests.json_files import editing
from tests.stores import BUCKET, serve_folder, serve_s3, upload

ROOT = Path(__file__).parents[2]
NAME = "someone/model"
LOCATE = """
import json, sys
from model.checkpoints.reader import locate
from model.checkpoints.errors import CheckpointError
found = []
for source in sys.argv[1:]:
    try:
        found.append(str(locate(source)))
    except CheckpointError as error:
        found.append(f"error: {error}")
print(json.dumps(found))
"""


@pytest.fixture
def server() -> Iterator[Hub]:
    with serve_hub() as running:
        yield running


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers directory with a dense layer and files that nothing reads."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    hub.save_sentence_transformer("bert", folder, num_hidden_layers=1)
    with editing(folder / "modules.json") as modules:
        kind = "sentence_transformers.models.Dense"
        modules.insert(2, {"idx": 3, "name": "3", "path": "2_Dense", "type": kind})
    (folder / "2_Dense").mkdir()
    layer = {"in_features": 32, "out_features": 32, "bias": False}
    (folder / "2_Dense/config.json").write_text(json.dumps(layer))
    torch.save({"linear.weight": torch.eye(32)}, folder / "2_Dense/pytorch_model.bin")
    for name in (
        "onnx/model.onnx",
        "onnx/config.json",
        "openvino/openvino_model.bin",
        "tf_model.h5",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"unread")
    (folder / "checkpoint-9").mkdir()
    for name in ("pytorch_model.bin", "rust_model.ot", "checkpoint-9/model.safetensors", "a.py"):
        (folder / name).write_bytes(b"unread")
    return folder


def locate(server: Hub, cache: Path, *sources: str, **more: str) -> list[str]:
    """The result of `locate` in a separate process, which downloads from the stand-in."""
    environment = {**os.environ, **server.environment(cache), **more}
    command = [sys.executable, "-c", LOCATE, *sources]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return list(json.loads(ran.stdout.splitlines()[-1]))


def test_files(server, saved, tmp_path):
    """Each file is downloaded once if the reader opens it: no pickle next to safetensors, no other framework."""
    commit = server.publish(NAME, saved)
    (first,) = locate(server, tmp_path, NAME)
    assert commit == commit_of(Path(first))
    expected = {
        *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/pytorch_model.bin"),
        *("3_Normalize/config.json", "README.md"),
    }
    expected |= {path for path in ("2_Normalize/config.json",) if (saved / path).is_file()}
    assert {path for path in expected if (saved / path).is_file()} == {*server.downloads}
    assert len(server.downloads) == len({*server.downloads})
    (again,) = locate(server, tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert first == again


def test_shards(server, saved, tmp_path):
    """Shards come with their index, and pickles where there are no safetensors files."""
    plain = tmp_path / "plain"
    peer = hub.transformers.AutoModel.from_pretrained(saved)
    peer.save_pretrained(plain, max_shard_size="30KB")
    shards = {path.name for path in plain.iterdir()}
    assert len(shards) > 3
    server.publish("some/shards", plain)
    pickled = tmp_path / "pickled"
    peer.config.save_pretrained(pickled)
    torch.save(peer.state_dict(), pickled / "pytorch_model.bin")
    (pickled / "flax_model.msgpack").write_bytes(b"unread")
    server.publish("some/pickle", pickled)

    found = locate(server, tmp_path / "cache", "some/shards", "some/pickle")
    assert shards == {path.name for path in Path(found[0]).iterdir()}
    assert {"config.json", "pytorch_model.bin"} == {path.name for path in Path(found[1]).iterdir()}
    states = [reader.load_encoder(path).state_dict() for path in found]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_revisions(server, saved, tmp_path):
    """A branch, a tag and a commit are pinned by NAME@REVISION; without one the newest commit is read."""
    old = tmp_path / "old"
    shutil.copytree(saved, old)
    (old / "provenance.json").write_text("{}")
    first = server.publish(NAME, old, "v1.0")
    second = server.publish(NAME, saved)
    sources = [NAME, f"{NAME}@main", f"{NAME}@v1.0", f"{NAME}@{first}", f"{NAME}@none", "no/thing"]
    *found, none, nothing = locate(server, tmp_path / "cache", *sources)
    assert [second, second, first, first] == [Path(path).name for path in found]
    assert none.startswith(
        f"error: {NAME}@none is no local directory, and the hub does not provide it"
    )
    assert nothing.startswith("error: no/thing is no local directory")


@pytest.mark.slow
def test_commit_in_the_manifest(server, saved, tmp_path):
    """A bundle says which commit of which repository it was made from."""
    commit = server.publish(NAME, saved, "v2")
    options = ["--revision", "v2", "--precision", "fp32"]
    command = [sys.executable, "-m", "export", NAME, str(tmp_path / "out"), *options]
    environment = {**os.environ, **server.environment(tmp_path / "cache")}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert 0 == ran.returncode, ran.stderr
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert f"{NAME}@{commit}" == manifest["provenance"]["checkpoint"]
    assert not [*(tmp_path / "out").glob("pytorch_model*")]


def test_local_names(tmp_path):
    """A local path with an @ is a local path where it exists."""
    folder = tmp_path / "model@v1"
    folder.mkdir()
    assert folder == reader.locate(str(folder))
    with pytest.raises(CheckpointError, match="leave out --revision"):
        join_name(str(folder), "v1")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a/b", ("a/b", None)),
        ("a/b@main", ("a/b", "main")),
        ("a/b@refs/pr/3", ("a/b", "refs/pr/3")),
    ],
)
def test_split_name(source, expected):
    """The revision stands behind the first @."""
    assert expected == split_name(source)


@pytest.mark.parametrize("source", ["a/b@", "@main", "@"])
def test_half_a_name(source):
    """A name without its revision, or the other way round, is refused."""
    with pytest.raises(CheckpointError, match="must be NAME or NAME@REVISION"):
        split_name(source)


def test_join_name():
    """`--revision` is the same as NAME@REVISION, and not both."""
    assert "a/b" == join_name("a/b", None)
    assert "a/b@v1" == join_name("a/b", "v1")
    with pytest.raises(CheckpointError, match="has a revision already"):
        join_name("a/b@v1", "v2")
    with pytest.raises(CheckpointError, match="is not on the hub"):
        join_name("package:gt/model", "v2")


def test_patterns():
    """One list names the files that readers open, at the top and in the folders of modules."""
    assert {"config.json", "modules.json", "vocab.txt", "model.safetensors.index.json"} < {
        *SETTINGS_FILES
    }
    assert ["a", "*/a"] == with_folders(["a"])


def test_weight_folders(saved, tmp_path):
    """Weights are read at the top, in the folders of modules, and in the generator's."""
    assert ["", "2_Dense"] == weight_folders(saved)
    (tmp_path / "generator").mkdir()
    (tmp_path / "generator/config.json").write_text("{}")
    assert ["", "generator"] == weight_folders(tmp_path)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_of_a_web_server(saved):
    """Which has no list of its files: the folders of modules are those that the checkpoint names."""
    with serve_folder(saved.parent) as web:
        found = reader.locate(f"{web.url}/model")
        assert names(found) <= names(saved)
        loaded = [reader.load_encoder(folder).state_dict() for folder in (saved, found)]
        assert all(torch.equal(value, loaded[1][name]) for name, value in loaded[0].items())
        assert {"1_Pooling/config.json", "2_Dense/config.json"} < names(found)
        with pytest.raises(CheckpointError, match=r"^http://.*/absent"):
            reader.load_encoder(reader.locate(f"{web.url}/absent"))


def test_shards_of_a_web_server(tmp_path):
    """Which the index names; a name that leads out of the folder is refused."""
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"weights")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with serve_folder(tmp_path) as web:
        assert names(tmp_path) - {"pytorch_model.bin"} == names(reader.locate(web.url))


@pytest.mark.slow
def test_a_checkpoint_of_an_object_store(saved):
    with serve_s3():
        found = reader.locate(upload(saved, f"{BUCKET}/model"))
    assert {"modules.json", "1_Pooling/config.json", "model.safetensors"} <= names(found)
    assert names(found) <= names(saved)
