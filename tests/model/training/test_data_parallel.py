"""Several processes train as one does: with the same losses, and when one is lost the run can go on."""

import json
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
FEW = {"batch_tokens": 16, "phases": [[1, 16]]}  # a sample in a step


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


# Starting two processes takes longer than training in them, so they do all that needs no other end.
RUNS = """
import json, os, sys, torch
from functools import partial
from torch import distributed, nn
from model import pretrain
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

join = distributed.init_process_group
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
own = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
for number, arguments in enumerate(json.loads(sys.argv[1])):
    # The store keeps the addresses of the group before.
    store = distributed.PrefixStore(str(number), distributed.TCPStore(*address, is_master=False))
    distributed.init_process_group = partial(join, store=store, **own)
    sys.argv = ["pretrain", *arguments]
    pretrain.main()
"""


@pytest.fixture(scope="module")
def folder(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of runs in the same two processes, and `said.txt` with what they printed; the last run fails."""
    folder = tmp_path_factory.mktemp("both")
    (folder / "runs.py").write_text(RUNS)
    electra, few = settings | {"family": "electra"}, settings | FEW
    runs = {"bert": settings, "electra": electra, "few": few}
    lists = [options(folder / name, given) for name, given in runs.items()]
    said = finish(start(str(folder / "runs.py"), json.dumps(lists)), 1)
    (folder / "said.txt").write_text(said)
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> str:
    return (folder / "said.txt").read_text()


@pytest.fixture(scope="module")
def both(folder: Path) -> Path:
    """The output of a run in two processes."""
    return folder / "bert"


def test_two_are_as_one(alone, both, said):
    """Two processes have the losses of one with the same batches, uneven shares and all."""
    assert len(losses(both)) == STEPS
    assert said.count(f"step {STEPS} of {STEPS}: held-out text: MLM loss") == 2  # of both families
    assert "2 x cpu" in said
    assert losses(both) == pytest.approx(losses(alone), rel=2e-5)
    for name, tensor in last(alone)["model"].items():
        torch.testing.assert_close(last(both)["model"][name], tensor, rtol=0, atol=2e-4)


def test_two_of_electra(settings, folder, tmp_path):
    """Each process draws the replaced tokens for itself, so that the losses are nearly those of one."""
    run(tmp_path / "alone", {**settings, "family": "electra"})
    assert losses(folder / "electra") == pytest.approx(losses(tmp_path / "alone"), rel=0.02)


def test_nothing_is_left_of_a_meeting(said):
    """Gradients are added up, and the threads that did it are gone: one that outlives Python may abort it."""
    assert said.count("[[2.0, 1.0]] None True True.") == 2


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


def test_too_many(said):
    """Steps with fewer samples than there are processes are refused."""
    assert "2 processes cannot share steps of 1 samples" in said
