"""What lies in a directory is served: it comes, is replaced, and goes."""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service.core.remote_files import files_at
from service.rollout import directory_watcher
from service.rollout.directory_watcher import DirectoryWatcher, scan_address, scan_bundles
from tests.service.rollout.test_model_manager import Curated, curated
from tests.stores import BUCKET, serve_s3, upload
from tests.versions import WEIGHTS

__all__ = ["curated"]


class Watched:
    """A curator whose directory is looked at when a test says so."""

    def __init__(self, curated: Curated) -> None:
        self.curated = curated
        self.watcher = DirectoryWatcher(curated.models_dir, curated.manager)

    def save(self, name: str, version: str, /, **manifest: object) -> Path:
        """Write a version in a directory of that name, as `export` does."""
        made = self.curated.save(version, **manifest)
        if name != version:
            shutil.rmtree(self.curated.models_dir / name, ignore_errors=True)
            made = made.rename(self.curated.models_dir / name)
        return made

    async def looks(self, times: int = 2) -> Sequence[str]:
        """The models that are served after some scans, once replaced ones are unloaded."""
        for _ in range(times):
            await self.watcher.heed(scan_bundles(self.curated.models_dir))
        async with asyncio.timeout(30):
            while any("draining" in state for state in await self.curated.shown()):
                await asyncio.sleep(0.001)
        return await self.curated.shown()


@pytest.fixture
def watched(curated: Curated) -> Watched:
    return Watched(curated)


async def test_what_comes_is_served(watched):
    """A bundle is served if two scans find it unchanged; each one stays, and the newest answers for the name."""
    watched.save("a", "2")
    assert ["tiny@1 current"] == await watched.looks(1)
    assert ["tiny@2 current", "tiny@1 previous"] == await watched.looks(1)
    watched.save("b", "3")
    assert ["tiny@3 current", "tiny@2 previous"] == await watched.looks()
    watched.save("c", "4")
    assert ["tiny@4 current", "tiny@3 previous", "tiny@2 pinned"] == await watched.looks()


async def test_of_several_the_last_answers(watched):
    """At the first scan, none of the others does in between."""
    for version in ("2", "3", "4"):
        watched.save(version, version)
    await watched.looks()
    adopted = watched.curated.subscriber.adopted
    answered = [model.id for models in adopted for model in models if model.state == "current"]
    assert ["tiny@1", "tiny@1", "tiny@1", "tiny@4"] == answered
    assert {"tiny@1", "tiny@2", "tiny@3", "tiny@4"} == {*watched.curated.device.texts}


async def test_what_is_moved_here_comes_when_it_is_moved(watched):
    """However long before it was written."""
    written = watched.save(".b", "3")
    watched.save("a", "2")
    assert ["tiny@2 current", "tiny@1 previous"] == await watched.looks()
    written.rename(watched.curated.models_dir / "b")
    assert ["tiny@3 current", "tiny@2 previous"] == await watched.looks()


async def test_what_is_replaced_is_exchanged(watched):
    """The old one is kept for a step back, until the next one comes."""
    watched.save("a", "2")
    await watched.looks()
    watched.save("a", "3")
    assert ["tiny@3 current", "tiny@2 previous"] == await watched.looks()
    watched.save("a", "4")
    assert ["tiny@4 current", "tiny@3 previous"] == await watched.looks()


async def test_a_name_is_answered_for_while_its_directory_changes(watched):
    """The bundle in the new directory is served before the bundle in the old one is unloaded."""
    watched.save("a", "2")
    watched.save("b", "1", name="other")
    await watched.looks()
    await watched.curated.unload("tiny@1")
    shutil.rmtree(watched.curated.models_dir / "a")
    watched.save("c", "3")
    before = len(watched.curated.subscriber.adopted)
    assert {"tiny@3 current", "other@1 current"} == {*await watched.looks()}
    since = watched.curated.subscriber.adopted[before:]
    assert all("tiny" in {model.name for model in models} for models in since)


async def test_what_goes_is_served_no_longer(watched):
    """Not at the first scan that misses it, and the last one stays until there is another."""
    watched.save("a", "2")
    await watched.looks()
    shutil.rmtree(watched.curated.models_dir / "a")
    assert ["tiny@2 current", "tiny@1 previous"] == await watched.looks(1)
    assert ["tiny@1 current"] == await watched.looks(1)
    watched.save("a", "2")
    await watched.looks()
    await watched.curated.unload("tiny@1")
    shutil.rmtree(watched.curated.models_dir / "a")
    with capture_logs() as logs:
        assert ["tiny@2 current"] == await watched.looks(4)
    assert ["tiny@2 is the last served model"] == [line["reason"] for line in logs]
    watched.save("b", "3", name="other")
    assert ["other@3 current"] == await watched.looks()


async def test_what_comes_back_while_it_goes_is_served_when_it_has_gone(watched):
    """It is logged once; a bundle that is refused for another reason is not loaded again in every scan."""
    watched.save("a", "2")
    await watched.looks()
    watched.curated.subscriber.hold.clear()
    leaving = asyncio.create_task(watched.curated.unload("tiny@2"))
    while "tiny@2 draining" not in await watched.curated.shown():
        await asyncio.sleep(0.001)
    back = watched.save("a", "2").rename(watched.curated.models_dir / "b")
    with capture_logs() as logs:
        for _ in range(4):
            await watched.watcher.heed(scan_bundles(watched.curated.models_dir))
        watched.curated.subscriber.hold.set()
        await leaving
        assert ["tiny@2 current", "tiny@1 previous"] == await watched.looks(1)
    reasons = [line["reason"] for line in logs if line["event"] == "refused"]
    assert ["tiny@2 is being unloaded: try again later"] == reasons
    shutil.rmtree(back)
    assert ["tiny@1 current"] == await watched.looks()


async def test_what_cannot_be_read_stays_as_it_is(watched, monkeypatch):
    """It counts neither as removed nor as changed, and is unchanged when it can be read again."""
    kept, new = watched.save("a", "2"), watched.curated.models_dir / "b"
    expected = await watched.looks()
    able = directory_watcher.examine

    def examine(folder):
        if folder in (kept, new):
            raise PermissionError(13, "Permission denied")
        return able(folder)

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(directory_watcher, "examine", examine)
        watched.save("b", "3")
        assert expected == await watched.looks(3)
    assert [] == logs
    assert ["tiny@3 current", "tiny@2 previous"] == await watched.looks()


async def test_a_copy_that_is_under_way_is_left_alone(watched):
    """An incomplete copy is not logged; it is served once it is complete."""
    whole = watched.save("a", "2").rename(watched.curated.models_dir / ".a")
    part = watched.curated.models_dir / "a"
    part.mkdir()
    with capture_logs() as logs:
        for file in sorted(whole.iterdir(), key=lambda file: file.name == WEIGHTS):
            shutil.copy(file, part)
            os.truncate(part / file.name, file.stat().st_size // 2)
            assert ["tiny@1 current"] == await watched.looks(1)
            shutil.copy(file, part)
            assert ["tiny@1 current"] == await watched.looks(1)
    assert [] == logs
    assert ["tiny@2 current", "tiny@1 previous"] == await watched.looks(1)


async def test_a_refused_bundle_is_logged_once(watched):
    """It is loaded again after a change; the current version keeps serving."""
    good = watched.save("good", "2")
    await watched.looks()
    bad = watched.save("bad", "3")
    weights = (bad / WEIGHTS).read_bytes()
    (bad / WEIGHTS).write_bytes(weights[:-1])
    with capture_logs() as logs:
        assert ["tiny@2 current", "tiny@1 previous"] == await watched.looks(5)
    (refused,) = [line for line in logs if line["log_level"] == "warning"]
    assert ("refused", "models_dir") == (refused["event"], refused["by"])
    assert "weights.bin has SHA-256" in refused["reason"]
    (bad / WEIGHTS).write_bytes(weights)
    assert ["tiny@3 current", "tiny@2 previous"] == await watched.looks()
    assert good.is_dir()


async def test_another_embedding_space_is_not_for_a_directory_to_bring(watched):
    """That takes an order which says so."""
    watched.save("a", "2", embedding_space="another")
    with capture_logs() as logs:
        assert ["tiny@1 current"] == await watched.looks(3)
    assert ["another embedding space" in line["reason"] for line in logs] == [True]


async def test_what_an_administrator_decided_stands(watched):
    """A step back and an unloading, even when another watcher begins: only changes are heeded."""
    watched.save("a", "2")
    watched.save("b", "3")
    await watched.looks()
    await watched.curated.roll_back("tiny")
    await watched.curated.unload("tiny@2")
    expected = await watched.looks(3)
    assert not any("tiny@2" in state for state in expected)
    watched.watcher = DirectoryWatcher(watched.curated.models_dir, watched.curated.manager)
    shutil.rmtree(watched.curated.models_dir / "a")
    assert expected == await watched.looks(3)


async def test_hidden_ones_links_and_others_are_no_bundles(watched):
    """Nor is what is just being written by `export`, which is hidden until it is whole."""
    root = watched.curated.models_dir
    watched.save(".hidden", "2")
    (root / "link").symlink_to(root / ".hidden")
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    assert {} == scan_bundles(root)


async def test_a_directory_that_cannot_be_read_says_nothing(watched):
    """The models served from it stay, and the error is logged once."""
    watched.save("a", "2")
    expected = await watched.looks()
    root = watched.curated.models_dir
    root.rename(root.parent / "away")
    with capture_logs() as logs:
        running = asyncio.create_task(watched.watcher.run(0.001))
        await asyncio.sleep(0.1)
        assert expected == await watched.curated.shown()
        (root.parent / "away").rename(root)
        watched.save("b", "3")
        async with asyncio.timeout(30):
            while "tiny@3 current" not in await watched.curated.shown():
                await asyncio.sleep(0.001)
        running.cancel()
    problems = [line for line in logs if line["event"] == "models_dir cannot be read"]
    assert 1 == len(problems)


@pytest.mark.slow
async def test_an_address_is_watched(curated, tmp_path, monkeypatch):
    """A bundle is served when it is complete, replaced, and unloaded when its manifest is gone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serve_s3():
        from pyarrow.fs import FileSystem

        url = f"{BUCKET}/team"
        store, _ = FileSystem.from_uri(BUCKET)
        own = curated.settings.model_copy(update={"models_dir": Path(url)})
        monkeypatch.setattr(curated.manager, "_settings", own)
        watcher = DirectoryWatcher(Path(url), curated.manager)

        async def looks() -> list[str]:
            for _ in range(2):
                await watcher.heed(scan_address(url))
            async with asyncio.timeout(30):
                while any("draining" in state for state in await curated.shown()):
                    await asyncio.sleep(0.001)
            return await curated.shown()

        manifest = curated.save("2") / "manifest.json"
        files_at(url).put("a/manifest.json", manifest)
        with capture_logs() as logs:
            assert ["tiny@1 current"] == await looks() == await looks()
        assert 1 == sum(line["event"] == "refused" for line in logs)
        upload(manifest.parent, f"{url}/a")
        assert ["tiny@2 current", "tiny@1 previous"] == await looks()
        upload(curated.save("3"), f"{url}/b")
        assert "tiny@3 current" in await looks()
        store.delete_dir("models/team/b")
        assert "tiny@3 current" not in await looks()
    with capture_logs() as logs:
        task = asyncio.create_task(watcher.run(0.01))
        async with asyncio.timeout(60):
            while not logs:  # the client of S3 tries several times
                await asyncio.sleep(0.1)
        task.cancel()
    assert ["models_dir cannot be read"] == [line["event"] for line in logs]
