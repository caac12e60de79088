"""Bundles at addresses: downloaded once, each file checked, and nothing kept of what is wrong."""

import shutil
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from service.core import bundle, bundle_cache
from service.core.addresses import RemoteError, address
from service.core.bundle import BundleError
from service.core.bundle_cache import NoBundle, Unreachable, fetch_bundle, last_bundle, root
from service.core.remote_files import copy, files_at
from tests.hub_server import serve_hub
from tests.stores import BUCKET, PUBLIC, WebServer, serve_folder, serve_gcs, serve_s3, upload


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def web(mini_bundle: Path, tmp_path: Path) -> Iterator[WebServer]:
    """A server with the bundle `mini`."""
    shutil.copytree(mini_bundle, tmp_path / "served" / "mini")
    with serve_folder(tmp_path / "served") as server:
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kept() -> list[Path]:
    return [path for path in root().rglob("*") if path.suffix != ".lock"]


def test_a_bundle_of_a_web_server(web, mini_bundle):
    """Its manifest is read first, and its other files once."""
    found = fetch_bundle(f"{web.url}/mini/")
    assert contents(mini_bundle) == contents(found)
    assert "/mini/manifest.json" == web.requests[0]
    assert bundle.load(mini_bundle).sha256 == bundle.load(found).sha256
    web.requests.clear()
    assert found == fetch_bundle(Path(f"{web.url}/mini"))  # which loses a slash
    assert ["/mini/manifest.json"] == web.requests


@pytest.mark.parametrize("fault", ["changed", "absent", "truncated"])
def test_nothing_is_kept_of_a_wrong_bundle(web, tmp_path, fault, monkeypatch):
    graph = max((tmp_path / "served" / "mini").glob("*.onnx"), key=lambda path: path.stat().st_size)
    content = graph.read_bytes()
    if fault == "changed":
        graph.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif fault == "absent":
        graph.unlink()
    else:
        monkeypatch.setattr(
            web.RequestHandlerClass.func,
            "copyfile",
            lambda _, source, target: target.write(source.read()[:50_000]),
        )
    with pytest.raises(BundleError, match=r"^http://127\.0\.0\.1:\d+/mini: ") as caught:
        fetch_bundle(f"{web.url}/mini")
    assert (fault == "truncated") == isinstance(caught.value, Unreachable)
    assert [] == kept()


def test_redirects_are_not_followed(web):
    """An address that is allowed must not lead to one that is not."""
    with serve_folder(Path("/nonexistent")) as other:
        web.moved["/mini/manifest.json"] = f"{other.url}/secret"
        with pytest.raises(BundleError, match="redirected to another address"):
            fetch_bundle(f"{web.url}/mini")
        assert [] == other.requests


def test_the_last_download_is_used_while_an_address_does_not_answer(web, capsys):
    url = f"{web.url}/mini"
    found = fetch_bundle(url)
    web.shutdown()
    web.server_close()
    assert found == last_bundle(url)
    assert "the last download is used" in capsys.readouterr().err
    assert found == bundle_cache.stored_bundle(url, bundle.load(found).sha256)
    with pytest.raises(Unreachable):
        fetch_bundle(url)
    with pytest.raises(Unreachable):
        last_bundle(f"{web.url}/other")


def test_an_address_without_a_manifest(web):
    with pytest.raises(NoBundle, match=r"it has no manifest\.json"):
        fetch_bundle(web.url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://me:secret@example.org/a", "credentials in an address"),
        ("s3://key:secret@bucket/a", "credentials in an address"),
        ("hf://only", "must be hf://OWNER/NAME"),
    ],
)
def test_addresses_that_are_refused(url, reason):
    with pytest.raises(RemoteError, match=reason) as caught:
        files_at(url)
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.fs", None)
    with pytest.raises(RemoteError, match=r'pip install "quartet-serving\[bulk\]"'):
        files_at("s3://bucket/a")


def test_a_login_of_netrc_is_sent(web, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        web.RequestHandlerClass.func,
        "send_head",
        lambda self: seen.append(self.headers["Authorization"]) or self.send_error(404),
    )
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(NoBundle):
        fetch_bundle(web.url)
    assert ["Basic bWU6c2VjcmV0"] == seen


@pytest.mark.parametrize("path", ["bundles/mini", "/s3:/a", "a/s3://b", "ftp://a/b", "s3:", ""])
def test_local_paths_are_no_addresses(path):
    assert address(path) is None


def test_a_bundle_of_the_hub(mini_bundle, monkeypatch):
    with serve_hub() as hub:
        monkeypatch.setattr(HfApi, "__init__", partialmethod(HfApi.__init__, endpoint=hub.url))
        hub.publish("me/mini", mini_bundle)
        found = fetch_bundle("hf://me/mini@main")
        assert contents(mini_bundle) == contents(found)
        assert {*contents(mini_bundle)} == {*files_at("hf://me/mini").list()}
        with pytest.raises(NoBundle):
            fetch_bundle("hf://me/mini/folder")
        with pytest.raises(Unreachable, match="hf://me/other"):
            fetch_bundle("hf://me/other")


@pytest.mark.slow
@pytest.mark.parametrize(("serve", "bucket"), [(serve_s3, BUCKET), (serve_gcs, PUBLIC)])
def test_a_bundle_of_an_object_store(mini_bundle, tmp_path, serve, bucket):
    """By the variables of AWS or Google; names with spaces and signs are names."""
    with serve():
        url = upload(mini_bundle, f"{bucket}/a b/50%?/mini")
        found = fetch_bundle(url)
        assert contents(mini_bundle) == contents(found)
        assert {*contents(mini_bundle)} == {*files_at(url).list()}
        wrong = tmp_path / "README.md"
        wrong.write_text("wrong")
        graph = next(mini_bundle.glob("*.onnx")).name
        files_at(url).put(graph, wrong)
        shutil.rmtree(found.parent)
        with pytest.raises(BundleError, match=f"{graph} has SHA-256"):
            fetch_bundle(url)
        assert [] == kept()
        with pytest.raises(FileNotFoundError):
            copy(files_at(url), "absent", tmp_path / "absent")
        with pytest.raises(BundleError, match="it has no"):
            fetch_bundle(f"{bucket}/another/mini")
