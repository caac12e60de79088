"""API keys are read again when their files change, and those in force stay where that fails."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.keys import Keys
from service.processes import key_file_watcher
from service.processes.key_file_watcher import KeyFiles
from service.settings_sources import KeySource, configure
from tests.service.fakes import until


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files are looked at all the time, in a directory of the test's own."""
    monkeypatch.setattr(key_file_watcher, "CHECK_S", 0.005)
    monkeypatch.chdir(tmp_path)


def records(**keys: str) -> str:
    return "\n".join(f'[keys.{name}]\nsha256 = "{digit * 64}"' for name, digit in keys.items())


@asynccontextmanager
async def watched(**flags: str) -> AsyncIterator[list[Keys]]:
    """Each change of the keys that these flags name, while their files are watched."""
    given = {"bundles": ["x"], **flags}
    configuration = configure(given)
    changes: list[Keys] = []
    source = KeySource(given, configuration.key_files)
    files = KeyFiles(source, configuration.settings.keys, changes.append)
    watching = asyncio.create_task(files.watch())
    try:
        await asyncio.sleep(0.05)
        yield changes
    finally:
        watching.cancel()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


async def first(changes: list[Keys]) -> list[str]:
    """Wait for a change; returns the names of the last."""
    await until(lambda: bool(changes))
    return [*changes[-1]]


async def test_a_file_that_is_written_again(lines):
    """The keys in it replace the previous ones, and the log has their names."""
    Path("keys.toml").write_text(records(a="1", b="2", c="3"))
    async with watched(api_keys="keys.toml") as changes:
        Path("keys.toml").write_text(records(a="1", b="4", d="5"))
        assert ["a", "b", "d"] == await first(changes)
    assert {
        "event": "API keys were read again",
        "log_level": "info",
        "added": ["d"],
        "removed": ["c"],
        "changed": ["b"],
    } in lines


async def test_a_link_that_is_set_to_another_directory():
    """As Kubernetes does with a secret that is mounted: the file is a link below a link, which is replaced."""
    for version, name in (("v1", "a"), ("v2", "b")):
        Path(version).mkdir()
        (Path(version) / "keys.toml").write_text(records(**{name: "1"}))
    Path("..data").symlink_to("v1")
    Path("keys.toml").symlink_to("..data/keys.toml")
    async with watched(api_keys="keys.toml") as changes:
        Path("..next").symlink_to("v2")
        os.replace("..next", "..data")
        assert ["b"] == await first(changes)


async def test_keys_in_the_file_of_settings():
    """They are read again like those in a file of their own, and are added to a key that is not in a file."""
    Path("quartet.toml").write_text(records(a="1"))
    async with watched() as changes:
        Path("quartet.toml").write_text(records(b="2"))
        assert ["b"] == await first(changes)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[keys.a", "keys.toml: Expected ']'"),
        ('[keys.a]\nsha256 = "1"', "keys.toml: keys.a.sha256: String should match"),
        ("", "keys.toml: keys: Field required"),
        (None, "keys.toml: No such file or directory"),
    ],
)
async def test_a_file_that_cannot_be_read(text, problem, lines):
    """The log has one error with the file's name, and the keys stay until the file can be read."""
    path = Path("keys.toml")
    path.write_text(records(a="1"))
    async with watched(api_keys="keys.toml") as changes:
        path.unlink() if text is None else path.write_text(text)
        async with asyncio.timeout(30):
            while not lines:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert ["cannot read API keys; the previous keys stay valid"] == [
            line["event"] for line in lines
        ]
        assert ("error", True) == (lines[0]["log_level"], problem in lines[0]["problem"])
        assert [] == changes
        path.write_text(records(b="2"))
        assert ["b"] == await first(changes)


async def test_the_last_key_stays(lines):
    """A file of settings that no longer has a key does not open the service."""
    Path("quartet.toml").write_text(records(a="1"))
    async with watched() as changes:
        Path("quartet.toml").write_text("port = 1")
        async with asyncio.timeout(30):
            while not lines:
                await asyncio.sleep(0.001)
        assert "no key is left" == lines[0]["problem"]
    assert [] == changes


async def test_a_signal_reads_at_once(monkeypatch, lines):
    """SIGHUP waits for no look at the files, and needs no change."""
    monkeypatch.setattr(key_file_watcher, "CHECK_S", 1000)
    Path("keys.toml").write_text(records(a="1"))
    async with watched(api_keys="keys.toml") as changes:
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(30):
            while not lines:
                await asyncio.sleep(0.001)
        assert [] == changes
        Path("keys.toml").write_text(records(b="1"))
        os.kill(os.getpid(), signal.SIGHUP)
        assert ["b"] == await first(changes)


async def test_a_file_that_is_being_written_is_left_alone(lines):
    """What is read was the same at two looks, so the first half of a file removes no key."""
    Path("keys.toml").write_text(records(a="1", b="2"))
    async with watched(api_keys="keys.toml") as changes:
        for size in range(200):
            Path("keys.toml").write_text(records(a="1") + "\n#" + "-" * size)
            await asyncio.sleep(0.001)
        Path("keys.toml").write_text(records(a="1", b="2", c="3"))
        assert ["a", "b", "c"] == await first(changes)
