"""A directory with more models than its memory budget holds, and a model that ends its process."""

import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import faulty
from tests.e2e.calls import same_answer
from tests.e2e.conftest import children, serving, until
from tests.versions import restate, save_fleet

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAMES = ("a", "b", "c", "d")
BUDGET = "2MB"  # for two of them


@pytest.fixture(scope="module")
def fleet_folder(tiny_bundle, tmp_path_factory):
    return save_fleet(tiny_bundle, tmp_path_factory.mktemp("fleet"), NAMES)


@pytest.mark.promise(
    "More models than fit lose no request, and each answers as itself, also after a crash."
)
def test_a_fleet_in_little_memory(fleet_folder, seconds):
    """Requests for random models are answered by these models while they are opened and closed."""
    rng = random.Random(3)

    def ask(name):
        return name, server.post("/embed", {"inputs": "Ada drew a comet.", "model": name})

    def ask_all(pool, number):
        for name, reply in pool.map(ask, rng.choices(NAMES, [8, 4, 2, 1], k=number)):
            assert 200 == reply.status, reply.body
            assert same_answer(alone[name], reply.json())

    with (
        serving("--models-dir", fleet_folder, "--memory-budget", BUDGET) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        assert {"cold"} == {model["state"] for model in server.get("/models").json()["models"]}
        alone = {name: ask(name)[1].json() for name in NAMES}
        assert len(NAMES) == len({str(answer["embeddings"]) for answer in alone.values()})
        end = time.monotonic() + seconds
        ask_all(pool, 40)
        while time.monotonic() < end:
            ask_all(pool, 40)
        (inference,) = children(server)["inference"]
        os.kill(inference, signal.SIGKILL)
        until(lambda: 200 == ask("a")[1].status, 60)
        ask_all(pool, 40)
        assert any('"closed"' in line for line in server.log)


@pytest.mark.promise(
    "A model that ends its process again and again is set aside, and others serve on."
)
def test_a_model_that_ends_its_process_is_set_aside(tiny_bundle, tmp_path):
    """Its requests get its name and the reason, as the list of models does."""
    folder = faulty.with_fault(tiny_bundle, tmp_path / "killer", faulty.endless_loop)
    restate(folder, name="killer")
    good = shutil.copytree(tiny_bundle, tmp_path / "tiny")
    bad = {"inputs": f"Ada drew a {faulty.WORD}.", "model": "killer"}
    with serving(good, folder, "--hang-s", "1") as server:
        before = server.answer("/embed", {"inputs": "Ada"})
        assert 503 == server.post("/embed", bad).status  # its process is lost twice
        until(lambda: "is set aside" in server.post("/embed", bad).body.decode(), 120)

        def problems():
            models = server.get("/models").json()["models"]
            return {model["name"]: model["problem"] for model in models}

        until(lambda: problems()["killer"], 60)
        assert problems()["killer"].startswith("killer@1 is set aside: it has ended the inference")
        assert problems()["tiny"] is None
        assert same_answer(before, server.answer("/embed", {"inputs": "Ada"}))
        assert 200 == server.get("/health/ready").status
