"""Heads of a shared encoder are loaded and unloaded while clients send requests to other heads."""

import itertools
import shutil
import statistics
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import Reply, until
from tests.e2e.test_models import Desk, desk
from tests.head_bundles import save_head

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXTS = ["moss on clay", "a wheel, rust and then more of it", "oil"]
HEADS = 10
LOAD_MS = 50  # of the median load, with the round trip


@pytest.fixture(scope="session")
def heads(states_bundle, built_once) -> Path:
    """Ten head bundles with other weights, of which `kept` is not unloaded."""

    def build(path: Path) -> None:
        path.mkdir()
        for seed, name in enumerate(["kept", *(f"guest-{n}" for n in range(HEADS - 1))]):
            save_head(states_bundle, path / name, seed=seed)

    return built_once("bundles/ten-heads", build)


def ask(at: Desk, model: str, text: str) -> Reply:
    return at.server.post("/classify", {"inputs": text, "model": model}, at.client)


@pytest.mark.promise("Heads are loaded and unloaded under load without a lost or changed answer.")
@pytest.mark.parametrize("workers", [1, 0], ids=["one http process", "one process"])
def test_heads_come_and_go_under_load(
    tiny_bundle, states_bundle, heads, tmp_path, workers, pytestconfig
):
    """Clients of a head that stays, and of the encoder's own head, get the same answers as alone; loads take ms."""
    times = 1000 if pytestconfig.getoption("--chaos") else 27
    enough = threading.Event()
    replies: list[tuple[str, str, Reply]] = []

    def run() -> None:
        for model, text in itertools.cycle(itertools.product(("kept", "states"), TEXTS)):
            if enough.is_set():
                return
            replies.append((model, text, ask(at, model, text)))

    with desk(tiny_bundle, tmp_path, workers=workers, others=[states_bundle, heads / "kept"]) as at:
        shutil.copytree(heads, at.models_dir, dirs_exist_ok=True)
        alone = {
            (model, text): ask(at, model, text).json()["results"]
            for model in ("kept", "states")
            for text in TEXTS
        }
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        loads, guests = [], []
        try:
            for number in range(times):
                guest = f"guest-{number % (HEADS - 1)}"
                began = time.monotonic()
                at.load(guest)
                loads.append(1000 * (time.monotonic() - began))
                guests.append(ask(at, guest, TEXTS[0]))
                gone = at.order("DELETE", f"/admin/models/{guest}@1")
                assert gone.status == 200, gone.body
        finally:
            enough.set()
            for thread in threads:
                thread.join(60)
        until(lambda: set(at.models()) == {"tiny@1", "states@1", "kept@1"})
    assert {200} == {reply.status for reply in guests} | {reply.status for *_, reply in replies}
    wrong = [key for *key, reply in replies if reply.json()["results"] != alone[tuple(key)]]
    assert not wrong, Counter(map(tuple, wrong))
    if pytestconfig.getoption("--chaos"):
        assert statistics.median(loads) < LOAD_MS
    print(f"load: median {statistics.median(loads):.1f} ms; {len(replies)} requests meanwhile")
