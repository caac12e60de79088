"""The cache of exported bundles: what a name stands for, and when it is exported again."""

import json
import os
import shutil
import sys
import tarfile
from functools import partialmethod
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from quartet import cache, list_models, progress, pull, remove, serve
from quartet.cache import SourceError, resolve
from tests.hub_server import serve_hub
from tests.stores import lengthen, serve_folder


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of each export, which writes a manifest only; the working directory and the cache are new."""
    calls: list[list[str]] = []

    def run_export(arguments, scratch):
        origin, folder, *_ = arguments
        calls.append(arguments)
        if "broken" in origin:
            raise SourceError("broken: no weights")
        Path(folder).mkdir()
        (Path(folder) / "manifest.json").write_text(json.dumps({"origin": origin}))

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "run_export", run_export)
    return calls


def checkpoint(name: str = "mine", weights: str = "1") -> Path:
    folder = Path(name)
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text(weights)
    return folder


def bundle(folder: str) -> Path:
    Path(folder).mkdir(parents=True)
    (Path(folder) / "manifest.json").write_text("{}")
    return Path(folder)


def test_bundles_are_served_as_they_are(exports):
    """A bundle's directory, and the newest version that `quartet train` wrote for a name."""
    assert bundle("elsewhere/a") == resolve("elsewhere/a")
    bundle("bundles/reviews")
    bundle("bundles/reviews-v2")
    newest = bundle("bundles/reviews-v10")
    bundle("bundles/reviews-of-books")
    assert newest == resolve("reviews")
    assert [] == exports


def test_a_checkpoint_is_exported_once(exports):
    """Changed weights are another model; states of a trainer are not."""
    folder = checkpoint()
    first = resolve("mine")
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "optimizer.pt").write_text("much")
    assert first == resolve("./mine") == resolve(str(folder.resolve()))
    checkpoint(weights="2")
    assert first != resolve("mine")
    assert [["--name", "mine"]] * 2 == [call[2:] for call in exports]


def test_a_graph_is_exported_once_with_the_name_of_its_checkpoint(exports):
    onnx = checkpoint("e5") / "onnx"
    onnx.mkdir()
    (onnx / "model_quantized.onnx").write_text("graph")
    first = resolve("e5/onnx/model_quantized.onnx")
    assert first == resolve("e5/onnx/model_quantized.onnx")
    assert "e5" == first.name
    (onnx / "model_quantized.onnx").write_text("another")
    resolve("e5/onnx/model_quantized.onnx")
    assert 2 == len(exports)


def test_a_failed_export_leaves_nothing(exports):
    checkpoint("broken")
    with pytest.raises(SourceError, match="broken: no weights"):
        resolve("broken")
    assert [] == [*cache.root().glob("*/")] == cache.entries()


def test_a_cache_that_cannot_be_written(exports, monkeypatch, tmp_path):
    checkpoint()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        SourceError, match=r"Not a directory: .*: set XDG_CACHE_HOME to a directory"
    ):
        resolve("mine")


@pytest.mark.parametrize("name", ["./absent", "a/b/c", "bad name", "/absent"])
def test_a_path_that_does_not_exist_is_not_looked_up(exports, name):
    with pytest.raises(SourceError, match="no such file or directory"):
        resolve(name)


def test_names_on_the_hub(exports, monkeypatch, capsys):
    """A commit is exported once; without a connection the last one is served, and an unknown name is an error."""
    folder = checkpoint("published")
    with serve_hub() as hub:
        monkeypatch.setattr(HfApi, "__init__", partialmethod(HfApi.__init__, endpoint=hub.url))
        commit = hub.publish("me/e5", folder)
        first = resolve("me/e5")
        assert first == resolve("me/e5") == resolve(f"me/e5@{commit}")
        checkpoint("published", "2")
        assert commit != hub.publish("me/e5", folder)
        second = resolve("me/e5")
    assert [f"me/e5@{commit}", "me/e5"] == [exports[0][0], exports[0][3]]
    assert 2 == len(exports)

    def unreachable(name, revision):
        raise ConnectionError("no network")

    monkeypatch.setattr(cache, "hub_commit", unreachable)
    assert second == resolve("me/e5")
    assert "of the cache, because no network" in capsys.readouterr().err
    with pytest.raises(SourceError, match="the hub does not provide it"):
        resolve("me/e5@v2")  # which may be another commit
    with pytest.raises(SourceError, match=r"the hub does not provide it \(no network\)"):
        resolve("me/other")


@pytest.mark.parametrize("file", ["config.json", "modules.json", "gliner_config.json"])
def test_the_cache_of_the_hub_client_without_a_network(file, exports, tmp_path, monkeypatch):
    """A model that was downloaded before is found by any of the files that a checkpoint begins with."""
    monkeypatch.setattr(HfApi, "model_info", raise_no_network)
    found = {file: str(tmp_path / "snapshots" / "c0ffee" / file)}
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda model, name, revision: found.get(name)
    )
    assert "c0ffee" == cache.find("me/e5").source.commit


def raise_no_network(*_: object, **__: object) -> None:
    raise OSError("no network")


def test_a_file_of_pull_is_served_elsewhere(exports, tmp_path, monkeypatch, capsys):
    checkpoint()
    monkeypatch.setattr(sys, "argv", ["quartet pull", "mine", "--to", "mine.tar"])
    assert 0 == pull.main()
    assert capsys.readouterr().out.startswith("mine.tar: mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    for _ in range(2):
        found = resolve("mine.tar")
        assert found.is_relative_to(tmp_path / "another")
        assert (found / "manifest.json").is_file()
    assert 1 == len(exports)


@pytest.mark.parametrize("content", ["text", "other tar", "a key outside"])
def test_another_file_is_refused(exports, content):
    Path("x.tar").write_text(content)
    if content != "text":
        folder = checkpoint()
        if content == "a key outside":
            (folder / "source.json").write_text(json.dumps({"name": "x", "key": "../../x"}))
        with tarfile.open("x.tar", "w") as archive:
            archive.add(folder)
    with pytest.raises(SourceError, match="not a file that quartet pull --to wrote"):
        resolve("x.tar")


def test_list_and_remove(exports, monkeypatch, capsys):
    for name in ("one", "two"):
        checkpoint(name, name)
        resolve(name)
    monkeypatch.setattr(sys, "argv", ["quartet list"])
    assert 0 == list_models.main()
    assert "2 models" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["quartet remove", "one"])
    assert 0 == remove.main()
    assert ["two"] == [Path(entry.source.name).name for entry in cache.entries()]
    assert 2 == remove.main()
    assert "one is not in the cache" in capsys.readouterr().err


def test_the_cache_is_bounded(exports, monkeypatch):
    """The model that was not used for the longest time goes; the new one stays even if it alone is too large."""
    checkpoint("one", "1")
    checkpoint("two", "2")
    resolve("one")
    monkeypatch.setattr(cache, "MOST_BYTES", 1)
    resolve("two")
    assert ["two"] == [Path(entry.source.name).name for entry in cache.entries()]


def test_serve_replaces_only_names(exports):
    """Values of flags are no models."""
    checkpoint()
    arguments = ["--port", "80", "mine", "--host=::1", "--check-config", "mine"]
    found = str(resolve("mine"))
    assert ["--port", "80", found, "--host=::1", "--check-config", found] == serve.with_bundles(
        arguments
    )


def test_an_error_of_an_export_is_one_line(monkeypatch, capsys):
    """It has the reason and, for a full disk, what to do; the lines before it were progress."""
    code = "print('tracing'); import sys; sys.exit('export: [Errno 28] No space left on device')"
    monkeypatch.setattr(cache, "child_python", lambda: [sys.executable, "-c", code])
    with pytest.raises(
        SourceError, match=r"^\[Errno 28\] No space left on device: free some space"
    ):
        cache.run_export([])
    assert "  tracing\n" == capsys.readouterr().err


def test_a_terminal_has_a_bar(monkeypatch, capsys):
    """It shows the step and the time left; a warning has a line of its own, and nothing else is left."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda _: os.terminal_size((40, 24)))
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2)
    bar = progress.Progress()
    for line in ("warning: no pooling", "tracing the packed graph ...", "a table"):
        bar.show(line)
    bar.end()
    shown = capsys.readouterr().err.split("\r\033[K")
    assert ["", "  warning: no pooling\n", "████░░░░░░░░░░░░░░░░    0 s left  traci", ""] == shown


def test_bundles_and_checkpoints_at_addresses(exports, mini_bundle, tmp_path, monkeypatch, capsys):
    """A bundle is downloaded. A checkpoint is exported once, and again when a file of it has changed."""
    with serve_folder(tmp_path / "work") as web:
        with pytest.raises(SourceError, match=r"mine: no bundle and no checkpoint"):
            resolve(f"{web.url}/mine")
        folder = checkpoint()
        (folder / "config.json").write_text("{}")
        first = resolve(f"{web.url}/mine")
        assert first == resolve(f"{web.url}/mine/")
        assert [f"{web.url}/mine", "--name", "mine"] == [exports[0][0], *exports[0][2:]]
        checkpoint(weights="12")
        assert first != resolve(f"{web.url}/mine")
        (folder / "config.json").rename(folder / "gliner_config.json")
        resolve(f"{web.url}/mine")
        assert 3 == len(exports)
        shutil.copytree(mini_bundle, tmp_path / "work" / "mini")
        url = f"{web.url}/mini"
        assert ["--port", "1", str(resolve(url))] == serve.with_bundles(["--port", "1", url])
        monkeypatch.setattr(sys, "argv", ["quartet pull", url, "--to", "mini.tar"])
        assert 0 == pull.main()
        (tmp_path / "work" / "mini" / "golden.npz").unlink()
        lengthen(tmp_path / "work" / "mini" / "manifest.json")
        with pytest.raises(SourceError, match=r"mini: it has no golden\.npz"):
            resolve(url)
    with pytest.raises(SourceError, match=f"{url}: .*refused"):
        resolve(url)
    monkeypatch.setattr(sys, "argv", ["quartet remove", url])
    capsys.readouterr()
    assert 0 == remove.main()
    assert capsys.readouterr().out.startswith(f"removed {url}, ")


def test_repositories_of_the_hub_by_their_addresses(exports, mini_bundle, monkeypatch):
    """A repository with a bundle is served; another one is the checkpoint of that name."""
    with serve_hub() as hub:
        monkeypatch.setattr(HfApi, "__init__", partialmethod(HfApi.__init__, endpoint=hub.url))
        hub.publish("me/e5", checkpoint("published"))
        assert resolve("me/e5") == resolve("hf://me/e5")
        hub.publish("me/mini", mini_bundle)
        assert (resolve("hf://me/mini") / "golden.npz").is_file()
    assert 1 == len(exports)


def test_single_files_at_addresses(exports, tmp_path, monkeypatch):
    """A file of pull is unpacked, and a graph exported with the settings of its model: once, until they change."""
    graph = checkpoint("e5") / "onnx" / "model_quantized.onnx"
    graph.parent.mkdir()
    graph.write_text("graph")
    Path("e5/config.json").write_text("{}")
    checkpoint()
    monkeypatch.setattr(sys, "argv", ["quartet pull", "mine", "--to", "mine.tar"])
    assert 0 == pull.main()
    with serve_folder(tmp_path / "work") as web:
        first = resolve(f"{web.url}/mine.tar")
        assert first == resolve(f"{web.url}/mine.tar")
        assert (first / "manifest.json").is_file()
        assert "/mine.tar" == web.requests[-1]
        exports.clear()
        second = resolve(f"{web.url}/e5/onnx/model_quantized.onnx")
        assert second == resolve(f"{web.url}/e5/onnx/model_quantized.onnx")
        assert {"e5/config.json", "e5/onnx/model_quantized.onnx"} <= {r[1:] for r in web.requests}
        graph.write_text("another graph")
        assert second != resolve(f"{web.url}/e5/onnx/model_quantized.onnx")
        assert [["--name", "e5"]] * 2 == [call[2:] for call in exports]
        with pytest.raises(SourceError, match=r"other\.onnx: no such file"):
            resolve(f"{web.url}/e5/other.onnx")
