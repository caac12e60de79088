"""Several processes train as one does: with the same losses, and when one is lost the run can go on."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from model import pretrain
from tests.model.helpers import SIGNALED
from tests.model.test_pretrain import last, options, run

pytestmark = pytest.mark.slow

ROOT = Path(pretrain.__file__).parents[1]
STEPS = 6


@pytest.fixture(scope="module")
def settings(
    tmp_path_factory: pytest.TempPathFactory, corpus_file: Path, tokenizer_file: Path
) -> dict[str, Any]:
    """Settings of a few small steps."""
    return {
        "corpus": [str(corpus_file)],
        "tokenizer": str(tokenizer_file),
        "cache": str(tmp_path_factory.mktemp("cache")),
        "preset": "tiny",
        "max_position_embeddings": 32,
        "phases": [[0.5, 16], [0.5, 32]],
        "batch_tokens": 160,
        "steps": STEPS,
        "save_every": 2,
        "dropout": 0.0,
        "precision": "fp32",
    }


def start(*program: str) -> "subprocess.Popen[str]":
    """Run a Python program in two processes."""
    endpoint = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *endpoint, "--nproc-per-node=2", *program],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == code, said
    return said


def losses(output: Path) -> list[float]:
    return [loss for _, loss in last(output)["history"]]


@pytest.fixture(scope="module")
def alone(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run in one process."""
    output = tmp_path_factory.mktemp("alone") / "run"
    run(output, settings)
    return output


@pytest.fixture(scope="module")
def both(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run in two processes, and `said.txt` with what they printed."""
    output = tmp_path_factory.mktemp("both") / "run"
    said = finish(start("-m", "model.pretrain", *options(output, settings)))
    (output / "said.txt").write_text(said)
    return output


def test_two_are_as_one(alone, both):
    """Two processes have the losses of one with the same batches, uneven shares and all."""
    assert len(losses(both)) == STEPS
    said = (both / "said.txt").read_text()
    assert said.count(f"step {STEPS} of {STEPS}: held-out text: MLM loss") == 1
    assert "2 x cpu" in said
    assert losses(both) == pytest.approx(losses(alone), rel=2e-5)
    for name, tensor in last(alone)["model"].items():
        torch.testing.assert_close(last(both)["model"][name], tensor, rtol=0, atol=2e-4)


def test_two_of_electra(settings, tmp_path):
    """Each process draws the replaced tokens for itself, so that the losses are nearly those of one."""
    own = {**settings, "family": "electra"}
    run(tmp_path / "alone", own)
    finish(start("-m", "model.pretrain", *options(tmp_path / "both", own)))
    assert losses(tmp_path / "both") == pytest.approx(losses(tmp_path / "alone"), rel=0.02)


MEET = """
import os, torch
from torch import nn
from model.training.data_parallel import Ranks

def threads():
    return len(os.listdir("/proc/self/task"))

layer = nn.Linear(2, 1, bias=False)
unused = nn.Linear(2, 1)  # without gradients
alone = threads()
with Ranks.join() as ranks:
    layer(torch.tensor([1.0, ranks.rank])).sum().backward()
    ranks.sum_gradients([*layer.parameters(), *unused.parameters()])
    among = threads()
print(f"{layer.weight.grad.tolist()} {unused.weight.grad} {among > alone} {threads() == alone}.")
"""


def test_nothing_is_left_of_a_meeting(tmp_path):
    """Gradients are added up, and the threads that did it are gone: one that outlives Python may abort it."""
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    assert finish(start(str(script))).count("[[2.0, 1.0]] None True True.") == 2


@pytest.mark.parametrize("bite", [48, 1])  # and never less than a sample
def test_small_bites(settings, alone, tmp_path, bite):
    """A step's gradients can be summed from parts: the losses equal the losses of the whole."""
    run(tmp_path / "parts", {**settings, "micro_batch_tokens": bite})
    assert losses(tmp_path / "parts") == pytest.approx(losses(alone), rel=2e-5)


def test_one_is_killed_and_one_is_signaled(settings, both, tmp_path):
    """A killed process ends the run with an error; a signal to one stops both after the same step, which is saved.

    Each time the same command resumes the run, which ends with the losses of an uninterrupted one.
    """
    parts, script = tmp_path / "parts", tmp_path / "signaled.py"
    script.write_text(SIGNALED)

    def resume(step, number, code):
        given = ["model.pretrain", str(step), str(number), *options(parts, settings)]
        return finish(start(str(script), *given), code)

    assert re.search(r"exitcode *: *-9", resume(3, signal.SIGKILL, 1))
    said = resume(4, signal.SIGTERM, 1)
    assert f"resuming {parts} at step 2" in said
    (done,) = re.findall(rf"SIGTERM: stopped after step (\d) of {STEPS}", said)
    assert int(done) < STEPS
    assert f"resuming {parts} at step {done}" in resume(0, 0, 0)
    assert losses(parts) == losses(both)


def test_too_many(settings, tmp_path):
    """Steps with fewer samples than there are processes are refused."""
    few = {**settings, "batch_tokens": 16, "phases": [[1, 16]]}
    said = finish(start("-m", "model.pretrain", *options(tmp_path / "run", few)), 1)
    assert "2 processes cannot share steps of 1 samples" in said
