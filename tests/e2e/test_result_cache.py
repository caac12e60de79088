"""Remembered results while models change."""

import threading
from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.conftest import Reply
from tests.e2e.test_models import desk

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXTS = ["Ada drew a comet.", "moss on clay", "a wheel, rust and then more of it"]


@pytest.mark.promise(
    "A remembered result is the one that its model computes, also while models change."
)
@pytest.mark.parametrize("workers", [1, 0], ids=["one http process", "one process"])
def test_no_remembered_result_is_stale(tiny_bundle, tmp_path: Path, workers, pytestconfig):
    """Of clients that repeat three texts during swaps, each gets its version's vector, most from the cache."""
    swaps = 50 if pytestconfig.getoption("--chaos") else 3
    enough = threading.Event()
    replies: list[tuple[str, Reply]] = []

    with desk(tiny_bundle, tmp_path, "--cache-mb", "1", workers=workers) as at:

        def ask(text: str) -> Reply:
            reply = at.server.post("/embed", {"inputs": text, "model": "tiny"}, at.client)
            replies.append((text, reply))
            return reply

        def run(text: str) -> None:
            while not enough.is_set():
                ask(text)

        threads = [threading.Thread(target=run, args=(text,)) for text in TEXTS]
        for thread in threads:
            thread.start()
        try:
            for number in range(2, swaps + 2):
                at.load(at.save(str(number)))
                first, again = ask(TEXTS[0]), ask(TEXTS[0])
                assert f"tiny@{number}" == first.json()["model"] == again.json()["model"]
                assert "hit" == again.headers["x-quartet-cache"]
        finally:
            enough.set()
            for thread in threads:
                thread.join(60)
    assert {200} == {reply.status for _, reply in replies}
    vectors = defaultdict(set)
    for text, reply in replies:
        vectors[reply.json()["model"], text].add(str(reply.json()["embeddings"]))
    assert all(len(own) == 1 for own in vectors.values())
    assert len(vectors) == len({vector for own in vectors.values() for vector in own})
    hits = sum(reply.headers.get("x-quartet-cache") == "hit" for _, reply in replies)
    assert hits > len(replies) / 2
