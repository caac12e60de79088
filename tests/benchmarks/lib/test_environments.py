"""An environment is built once for its requirements, and one that cannot be built has a reason."""

import re

import pytest

from benchmarks.lib import environments
from benchmarks.lib.environments import PEERS, Unavailable
from tests.e2e.client_calls.environments import REQUIREMENTS


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """The folder of a peer without requirements, next to an empty `build`."""
    folder = tmp_path / "peers" / "no-peer"
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text("# nothing\n")
    monkeypatch.setattr(environments, "PEERS", folder.parent)
    monkeypatch.setattr(environments, "BUILT", tmp_path / "build")
    return folder


@pytest.mark.e2e
@pytest.mark.slow
def test_build(peer, capsys):
    """It is built when it is missing, left alone when it is up to date, and out of date when the peer changes."""
    assert ["no-peer"] == environments.names()
    with pytest.raises(Unavailable, match="has not been built"):
        environments.of_peer("no-peer").python()

    python = environments.of_peer("no-peer").build()
    assert python.is_file()
    assert "no-peer: building" in capsys.readouterr().out
    assert (
        python
        == environments.of_peer("no-peer").build()
        == environments.of_peer("no-peer").python()
    )
    assert "is up to date" in capsys.readouterr().out

    (peer / "requirements.txt").write_text("# nothing at all\n")
    with pytest.raises(Unavailable, match="is out of date"):
        environments.of_peer("no-peer").python()


@pytest.mark.e2e
@pytest.mark.slow
def test_build_fails(peer):
    """The error has pip's message, and no incomplete environment is left."""
    (peer / "requirements.txt").write_text("./absent\n")

    with pytest.raises(Unavailable, match=r"cannot be built: ERROR: .*absent"):
        environments.of_peer("no-peer").build()
    assert not (environments.BUILT / "no-peer").exists()


FILES = [*PEERS.glob("*/requirements.txt"), *REQUIREMENTS.glob("*.txt")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_requirements_are_pinned(path):
    """Every line names one version, so that a comparison can be repeated."""
    lines = path.read_text().splitlines()

    assert [] == [line for line in lines if not re.fullmatch(r"[\w.-]+(\[[\w,]+\])?==[\d.]+", line)]
