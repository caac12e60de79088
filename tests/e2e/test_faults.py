"""What a real server refuses, and how it ends: bad inputs, the drain, and bundles not to be served."""

import shutil
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests import samples
from tests.e2e.calls import embed_calls, same_answer
from tests.e2e.conftest import SLOWLY, queued, serving, start, until
from tests.versions import change_a_byte, change_the_goldens

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG = samples.text(2000, seed=1)


@pytest.mark.promise("An invalid request gets every fault at once, before anything is computed.")
def test_every_bad_input_is_named(tiny):
    """Of a request, all bad texts are named; good ones are not."""
    wrong = tiny.post("/classify", {"inputs": ["good", 1, "good", None]})
    long = tiny.post("/classify", {"inputs": [LONG, "short", LONG], "truncate": False})

    assert (422, "inputs[1]") == (wrong.status, wrong.json()["error"]["param"])
    assert "inputs[3]" in wrong.json()["error"]["message"]
    assert (422, "inputs[0]") == (long.status, long.json()["error"]["param"])
    assert "inputs[2]" in long.json()["error"]["message"]
    assert "inputs[1]" not in long.json()["error"]["message"]


@pytest.mark.promise("A drain loses no request.")
def test_drain_loses_none(tiny_bundle):
    """After SIGTERM all that was sent is answered, in every dialect, and the exit is clean."""
    calls = embed_calls(
        [[samples.text(200, seed=seed + n) for n in range(12)] for seed in range(60)]
    )
    replies = {}
    with serving(tiny_bundle, *SLOWLY) as server:
        alone = [server.answer(*call) for call in calls]

        def ask(number):
            replies[number] = server.post(*calls[number])

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
        for client in clients:
            client.start()
        until(lambda: queued(server) > 5_000)
        server.process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(60)
        code = server.process.wait(40)

    assert {200: 60} == Counter(reply.status for reply in replies.values())
    assert all(same_answer(alone[number], reply.json()) for number, reply in replies.items())
    assert 0 == code


# -- bundles that are not served ------------------------------------------------------------------


def refused(*arguments: str | Path) -> tuple[int, str]:
    """The exit status and what was said, of a service that must not start."""
    process = start(*arguments, "--port", "0")
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.promise("A bundle with a changed byte is not served.")
def test_a_changed_byte_is_found(tiny_bundle, tmp_path):
    """Weights with another hash than in the manifest are not served."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    change_a_byte(copy)

    code, said = refused(copy)
    assert code != 0
    assert "weights.bin has SHA-256" in said
    assert "Traceback" not in said


@pytest.mark.promise("A bundle that computes other results than at its export is not served.")
def test_goldens_that_disagree_are_found(tiny_bundle, tmp_path):
    """Other weights with right hashes are not served: what they answer is not what PyTorch answered."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    change_the_goldens(copy)

    code, said = refused(copy)
    assert code != 0
    assert "goldens disagree at fp32: sentiment differs by " in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--precision", "fp16"], "it has no fp16 graph, only fp32, int8"),
        (["--provider", "cuda"], "provider is cuda, but"),
        (["THE SAME"], "tiny@1 is served already"),
    ],
)
def test_what_is_not_to_be_had(tiny_bundle, more, said):
    """A precision or provider that is not there, or a second bundle of the same model, ends the start with its name."""
    code, log = refused(tiny_bundle, *(tiny_bundle if x == "THE SAME" else x for x in more))
    assert 3 == code
    assert 1 == log.count("cannot start")
    assert said in log
    assert "Traceback" not in log
