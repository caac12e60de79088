"""Small models, random batches, and what transformers is called with for the same batch."""

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.attention import FULL, Mask, PackedLayout
from model.config import BertConfig
from model.training.training_run import TrainingRun
from service.core import packing
from service.core.packing import Packed

M = TypeVar("M", bound=nn.Module)
# fp32 sums in another order: a few units in the last place per layer, of values around one.
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}

LENGTHS = {
    "one": [7],
    "one token": [1],
    "equal": [5, 5, 5],
    "mixed": [9, 1, 4, 16, 2],
    "rising": [1, 2, 3, 4, 5, 6, 7, 8],
}


def shape(**fields: Any) -> BertConfig:
    """The config of a model that takes no time."""
    small: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    return BertConfig(**{**small, **fields})


def perturb(module: M, seed: int = 0, scale: float = 0.1) -> M:
    """Move every parameter, norms and biases too, away from what it was set to; ready to be asked."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def batch(lengths: Sequence[int], vocab_size: int = 96, seed: int = 0) -> Packed:
    """A packed batch of random ids and segments."""
    rng = np.random.default_rng(seed)
    layout = packing.make_layout(lengths)
    total = sum(lengths)
    ids, types = rng.integers(vocab_size, size=total), rng.integers(2, size=total)
    return Packed(ids, types, packing.positions(layout), layout)


def ours(packed: Packed) -> tuple[Tensor, Tensor, Tensor, PackedLayout]:
    """What our modules take."""
    ids = (packed.input_ids, packed.token_type_ids, packed.position_ids)
    return (*map(torch.as_tensor, ids), PackedLayout.of(packed.layout))


def theirs(packed: Packed) -> dict[str, Tensor]:
    """What transformers takes: `[B, S]` ids, segments and mask; padding has id 0."""
    lengths, longest = packed.lengths, packed.layout.longest
    mask = np.arange(longest) < lengths[:, None]
    fields = {"input_ids": packed.input_ids, "token_type_ids": packed.token_type_ids}
    padded = {name: np.zeros(mask.shape, dtype=np.int64) for name in fields}
    for name, values in fields.items():
        padded[name][mask] = values
    return {name: torch.as_tensor(v) for name, v in padded.items()} | {
        "attention_mask": torch.as_tensor(mask.astype(np.int64))
    }


class Heads(NamedTuple):
    """Numbers of heads, and their size."""

    queries: int
    keys: int
    size: int

    @property
    def widths(self) -> list[int]:
        return [self.queries * self.size, *[self.keys * self.size] * 2]


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    heads: Heads,
    mask: Mask | tuple[float, float] = FULL,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(Q Kᵀ / √D + bias) V over the visible keys, one sequence, head and query after the other.

    mask: or the tokens before and after a query that it attends to
    """
    if isinstance(mask, Mask):
        reach = math.inf if mask.reach is None else mask.reach
        mask = (reach, 0 if mask.causal else reach)
    before, after = mask
    contexts = []
    for i, rows in enumerate(zip(*(part.split([*lengths]) for part in (q, k, v)), strict=True)):
        queries, keys, values = (part.split(heads.size, dim=1) for part in rows)
        for n, query in enumerate(queries):
            group = n * heads.keys // heads.queries
            scores = query @ keys[group].T * (scale or heads.size**-0.5)
            if bias is not None:
                own = bias[i % len(bias), n % bias.shape[1]]
                scores = scores + own[: len(query), : len(query)]
            for place, row in enumerate(scores):
                seen = [j for j in range(len(row)) if -before <= j - place <= after]
                contexts.append(torch.softmax(row[seen], -1) @ values[group][seen])
    pieces = iter(contexts)
    return torch.cat(
        [
            torch.cat(
                [torch.stack([next(pieces) for _ in range(length)]) for _ in range(heads.queries)],
                1,
            )
            for length in lengths
        ]
    )


def real(slots: Tensor, packed: Packed) -> Tensor:
    """The rows of real tokens, `[T, ...]`, of padded slots `[B, S, ...]` or `[B * S, ...]`."""
    total = packed.layout.unpack.size
    return slots.reshape(total, -1).index_select(0, torch.as_tensor(packed.layout.pack))


def watch_steps(monkeypatch: pytest.MonkeyPatch) -> tuple[list[set[float]], list[float]]:
    """The learning rates of AdamW's groups and the norm of all gradients, one of each for every step to come."""
    rates: list[set[float]] = []
    norms: list[float] = []
    step = torch.optim.AdamW.step

    def watched(optimizer: torch.optim.AdamW, *rest: Any) -> Any:
        groups = optimizer.param_groups
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        rates.append({group["lr"] for group in groups})
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        return step(optimizer, *rest)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    return rates, norms


@contextlib.contextmanager
def interrupted(at: int) -> Iterator[None]:
    """A training run within is interrupted in this step, before anything of the step is kept."""
    record = TrainingRun.step

    def step(run: TrainingRun, step: int, *rest: Any) -> None:
        if step == at:
            raise KeyboardInterrupt
        record(run, step, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "step", step)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            yield


@contextlib.contextmanager
def stopped(at: int) -> Iterator[None]:
    """A training run within gets SIGTERM in this step, and ends when the step is saved."""
    record = TrainingRun.step

    def step(run: TrainingRun, step: int, *rest: Any) -> None:
        record(run, step, *rest)
        if step == at:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "step", step)
        with pytest.raises(SystemExit) as ended:
            yield
    assert ended.value.code == 128 + signal.SIGTERM


SIGNALED = """
import os, runpy, sys
from model.training.training_run import TrainingRun

module, step, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.argv = [module, *sys.argv[4:]]
record = TrainingRun.step

def signaled(run, at, *rest):
    if at == step and os.environ.get("RANK", "1") == "1":  # the second of two processes
        os.kill(os.getpid(), number)
    record(run, at, *rest)

TrainingRun.step = signaled
runpy.run_module(module, run_name="__main__")
"""


def run_with_signal(
    module: str, number: signal.Signals, *arguments: str, step: int
) -> subprocess.CompletedProcess[str]:
    """Run a training script that gets a signal in this step, and return its output and its exit status."""
    command = [sys.executable, "-c", SIGNALED, module, str(step), str(int(number)), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
