"""Several processes train as one does: with the same losses, and when one is lost the run can go on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model import pretrain

pytestmark = pytest.mark.slow

ROOT = Path(pretrain.__file__).parents[1]
Start = Callable[..., "subprocess.Popen[str]"]
SIGNALLED_STEPS = 200  # some seconds: a run must not end before the test sees its first save


@pytest.fixture
def start(tmp_path: Path, corpus_file: Path, tokenizer_file: Path) -> Start:
    """Starts a run of this many processes with the settings of a few small steps, and with the given ones."""

    def started(output: str, processes: int, **other: Any) -> "subprocess.Popen[str]":
        settings = {
            "output": str(tmp_path / output),
            "corpus": json.dumps([str(corpus_file)]),
            "tokenizer": str(tokenizer_file),
            "cache": str(tmp_path / "cache"),
            "preset": "tiny",
            "max_position_embeddings": "32",
            "phases": "[[0.5, 16], [0.5, 32]]",
            "batch_tokens": "160",
            "steps": "6",
            "save_every": "2",
            "dropout": "0.0",
            "precision": "fp32",
            **{name: str(value) for name, value in other.items()},
        }
        flat = [p for k, v in settings.items() for p in (f"--{k.replace('_', '-')}", v)]
        return launch(processes, "-m", "model.pretrain", *flat)

    return started


def launch(processes: int, *program: str) -> "subprocess.Popen[str]":
    """Run Python in this many processes: with torchrun if there are several."""
    endpoint = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1"]
    torchrun = ["-m", "torch.distributed.run", *endpoint, f"--nproc-per-node={processes}"]
    return subprocess.Popen(
        [sys.executable, *(torchrun if processes > 1 else []), *program],
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


def last(output: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(output / "last.pt", weights_only=True)
    return state


def losses(output: Path) -> list[float]:
    return [loss for _, loss in last(output)["history"]]


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_two_are_as_one(start: Start, tmp_path: Path, family: str) -> None:
    """Two processes have the losses of one with the same batches, uneven shares and all; so has one with small bites.

    But for ELECTRA, whose replaced tokens each process draws for itself.
    """
    finish(start("alone", 1, family=family))
    said = finish(start("both", 2, family=family))

    alone, both = losses(tmp_path / "alone"), losses(tmp_path / "both")
    assert len(both) == 6
    assert said.count("step 6 of 6: held-out text: MLM loss") == 1
    assert "2 x cpu" in said
    if family == "electra":
        assert both == pytest.approx(alone, rel=0.02)
        return
    assert both == pytest.approx(alone, rel=2e-5)
    for name, tensor in last(tmp_path / "alone")["model"].items():
        torch.testing.assert_close(
            last(tmp_path / "both")["model"][name], tensor, rtol=0, atol=2e-4
        )


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


def test_nothing_is_left_of_a_meeting(tmp_path: Path) -> None:
    """Gradients are added up, and the threads that did it are gone: one that outlives Python may abort it."""
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    said = finish(launch(2, str(script)))
    assert said.count("[[2.0, 1.0]] None True True.") == 2


def test_small_bites(start: Start, tmp_path: Path) -> None:
    """A step's gradients can be summed from parts: the losses equal the losses of the whole."""
    for bite in (0, 48, 1):  # and never less than a sample
        finish(start(str(bite), 1, micro_batch_tokens=bite))

    whole = losses(tmp_path / "0")
    assert losses(tmp_path / "48") == pytest.approx(whole, rel=2e-5)
    assert losses(tmp_path / "1") == pytest.approx(whole, rel=2e-5)


def test_one_is_lost(start: Start, tmp_path: Path) -> None:
    """A killed process ends the run with an error; the same command resumes it with the same losses."""
    finish(start("whole", 2, steps=SIGNALLED_STEPS))

    run = start("parts", 2, steps=SIGNALLED_STEPS, save_every=1)
    while not (tmp_path / "parts" / "last.pt").is_file():
        assert run.poll() is None
        time.sleep(0.05)
    victim = sorted(workers(run.pid))[-1]
    os.kill(victim, signal.SIGKILL)
    said = finish(run, code=1)
    done = last(tmp_path / "parts")["step"]
    assert 0 < done < SIGNALLED_STEPS
    assert re.search(r"exitcode *: *-9", said)

    assert f"resuming {tmp_path / 'parts'} at step" in finish(
        start("parts", 2, steps=SIGNALLED_STEPS)
    )
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_one_is_signaled(start: Start, tmp_path: Path) -> None:
    """A signal to one process stops all after the same step, which is saved; the run continues with the same losses."""
    finish(start("whole", 2, steps=SIGNALLED_STEPS))

    run = start("parts", 2, steps=SIGNALLED_STEPS, save_every=1)
    while not (tmp_path / "parts" / "last.pt").is_file():
        assert run.poll() is None
        time.sleep(0.05)
    os.kill(sorted(workers(run.pid))[-1], signal.SIGTERM)
    said = finish(run, code=1)
    done = last(tmp_path / "parts")["step"]
    assert 0 < done < SIGNALLED_STEPS
    assert f"SIGTERM: stopped after step {done} of {SIGNALLED_STEPS}" in said

    assert f"resuming {tmp_path / 'parts'} at step {done}" in finish(
        start("parts", 2, steps=SIGNALLED_STEPS)
    )
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def workers(parent: int) -> list[int]:
    """The processes that a process has started."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in found]


def test_too_many(start: Start) -> None:
    """Steps with fewer samples than there are processes are refused."""
    said = finish(start("run", 2, batch_tokens=16, phases="[[1, 16]]"), code=1)

    assert "2 processes cannot share steps of 1 samples" in said
