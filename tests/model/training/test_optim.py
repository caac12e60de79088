"""The optimiser decays matrices only, follows its schedule, and says no to broken losses."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from model.heads import Pretraining
from model.training import optim
from tests.model.helpers import shape


def test_decay_groups():
    """Every parameter is in one group: matrices decay, biases and norms do not."""
    model = Pretraining(shape())

    optimizer = optim.adamw(model.named_parameters(), 1e-3, 0.1, (0.9, 0.98))

    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, flat = ([names.pop(id(p)) for p in g["params"]] for g in (decayed, others))
    assert all(name.endswith(".weight") and "norm" not in name for name in matrices)
    assert all(name.endswith((".bias", "norm.weight")) for name in flat)
    assert not names


def test_decay_works():
    """A step without gradients shrinks matrices by rate times decay, and nothing else."""
    layer = nn.Linear(3, 3)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)

    optim.adamw(layer.named_parameters(), 0.5, 0.1, (0.9, 0.98)).step()

    torch.testing.assert_close(layer.weight, before["weight"] * 0.95)
    assert torch.equal(layer.bias, before["bias"])


class Dtypes(TorchDispatchMode):
    """The types of all that is computed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.found.add(result.dtype)
        return result


@pytest.mark.parametrize("kind", optim.OPTIMIZERS)
def test_own_rate_of_heads(kind):
    """Heads may have a learning rate of their own, which follows the same schedule."""
    model = nn.ModuleDict({"encoder": nn.Linear(3, 3), "heads": nn.Linear(3, 3)})
    named = [("encoder.layers.0.weight", nn.Parameter(torch.ones(3, 3))), *model.named_parameters()]

    optimizer = optim.optimizer(kind, named, 0.1, 0.3, 0.01, (0.9, 0.98), head_lr=0.4)
    optim.set_lr(optimizer, 0.05)

    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(named[0][1])] == pytest.approx(0.15 if kind == "muon" else 0.05)
    assert {rates[id(p)] for p in model["encoder"].parameters()} == {0.05}
    assert {rates[id(p)] for p in model["heads"].parameters()} == {0.2}


def test_muon():
    """Muon takes the matrices of the layers, AdamW all else, and both follow one schedule."""
    model = Pretraining(shape())

    together = optim.optimizer("muon", model.named_parameters(), 0.001, 0.02, 0.1, (0.9, 0.98))
    optim.set_lr(together, 0.0005)

    muon, adamw = together.optimizers
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = [names.pop(id(p)) for group in muon.param_groups for p in group["params"]]
    assert len(matrices) == 2 * 4
    assert all(".layers." in name and name.endswith(".weight") for name in matrices)
    assert {id(p) for group in adamw.param_groups for p in group["params"]} == set(names)
    assert {group["lr"] for group in muon.param_groups} == {0.01}
    assert {group["lr"] for group in adamw.param_groups} == {0.0005}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_muon_is_torchs_in_the_precision_that_is_fast(monkeypatch, precision):
    """Torch's takes bfloat16 whatever the CPU; ours does where that is fast, and then steps as torch's, bit for bit."""
    monkeypatch.setattr(optim, "best_precision", lambda device: precision)
    torch.manual_seed(0)
    shapes = [(24, 8), (8, 24), (16, 16)]
    begun = [torch.randn(shape) for shape in shapes]
    ours, theirs = ([nn.Parameter(matrix.clone()) for matrix in begun] for _ in range(2))
    settings = {"lr": 0.02, "weight_decay": 0.1}
    pair = (
        optim.Muon([{"params": ours}], **settings),
        torch.optim.Muon([{"params": theirs}], **settings),
    )
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        with Dtypes() as seen:
            pair[0].step()
        assert (torch.bfloat16 in seen.found) == (precision == torch.bfloat16)
        pair[1].step()

    for one, other, matrix in zip(ours, theirs, begun, strict=True):
        moved = (other - matrix).norm()
        exact = 0.0 if precision == torch.bfloat16 else 0.02 * moved.item()
        assert (one - other).norm().item() <= exact
        assert torch.equal(
            pair[0].state[one]["momentum_buffer"], pair[1].state[other]["momentum_buffer"]
        )


def test_frozen_parameters_are_left_out():
    """Parameters that need no gradient are not the optimiser's."""
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad_(False)

    optimizer = optim.adamw(layer.named_parameters(), 1e-3, 0.1, (0.9, 0.98))

    found = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(parameter) for parameter in found] == [id(layer.bias)]


def test_linear_schedule():
    """The rate rises over the warm-up to its peak and falls in a line to almost nothing."""
    rates = [optim.linear_schedule(step, 12, 1 / 3) for step in range(13)]

    assert rates == [0.25, 0.5, 0.75, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0]


def test_a_rate_that_is_held():
    """Half of the steps after the warm-up have the peak rate, and more steps change none of those."""
    rates = [optim.linear_schedule(step, 10, 0.2, hold=0.5) for step in range(11)]
    longer = [optim.linear_schedule(step, 20, 0.1, hold=0.5) for step in range(11)]

    assert rates == [0.5, 1, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0]
    assert longer[:7] == rates[:7]
    assert longer[7:] == [1, 1, 1, 1]


@pytest.mark.parametrize("steps", [1, 2, 3, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("hold", [0.0, 0.5, 1.0])
def test_schedule_stays_within_bounds(steps, warmup, hold):
    """Whatever the warm-up, every step has a rate above zero and none above the peak."""
    rates = [optim.linear_schedule(step, steps, warmup, hold) for step in range(steps)]

    assert max(rates) == 1
    assert min(rates) > 0


def test_heard_more_and_more():
    """From the share that was asked for to every step; each step takes the next batch or none."""
    heard = [optim.scheduled_steps(step, 1000, 0.2) for step in range(1001)]
    turns = [after - before for before, after in itertools.pairwise(heard)]

    assert {*turns} == {0, 1}
    assert [sum(turns[:100]), sum(turns[450:550]), sum(turns[900:])] == pytest.approx(
        [24, 60, 96], abs=1
    )
    assert [optim.scheduled_steps(step, 1000, 1.0) for step in range(1001)] == [*range(1001)]


def test_set_lr():
    """Setting the rate sets it for every group."""
    optimizer = optim.adamw(nn.Linear(3, 3).named_parameters(), 1e-3, 0.1, (0.9, 0.98))

    optim.set_lr(optimizer, 0.25)

    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("avx512", "amx", "dtype"),
    [(False, False, torch.float32), (True, False, torch.bfloat16), (False, True, torch.bfloat16)],
)
def test_precision_by_capability(monkeypatch, avx512, amx, dtype):
    """A CPU computes in bfloat16 only if it has units that multiply in it."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)

    assert optim.best_precision(torch.device("cpu")) is dtype


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)]
)
def test_precision_of_a_gpu(monkeypatch, capability, dtype):
    """A GPU computes in bfloat16 from Ampere on."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    assert optim.best_precision(torch.device("cuda")) is dtype


def test_dropout_follows_seed_and_step():
    """Random numbers of a step are the same in each run, and differ between steps and seeds."""

    def drawn(seed, step):
        optim.seed_dropout(seed, step)
        return torch.rand(()).item()

    assert drawn(1, 2) == drawn(1, 2)
    assert len({drawn(1, 2), drawn(1, 3), drawn(2, 2)}) == 3


def test_steep_losses_weigh_no_more():
    """The part of each loss in the shared encoder has the requested norm; other parts are scaled with it."""
    trunk, first, second = parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]

    optim.add_normalized_gradients(1000 * (trunk[0] + 2 * first[1]), parameters, 1.0, [trunk])
    optim.add_normalized_gradients(0.001 * (trunk[1] + 2 * second[1]), parameters, 3.0, [trunk])

    for parameter, wanted in ((trunk, [1.0, 3.0]), (first, [0.0, 2.0]), (second, [0.0, 6.0])):
        torch.testing.assert_close(parameter.grad, torch.tensor(wanted))


def test_flat_losses_add_nothing():
    """Where a loss has no slope there is no direction to go."""
    trunk = nn.Parameter(torch.ones(2))

    optim.add_normalized_gradients(0 * trunk.sum(), [trunk], 1.0, [trunk])

    torch.testing.assert_close(trunk.grad, torch.zeros(2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_loss(value):
    """A loss that is not finite stops the run, naming the step."""
    optim.check_finite(1.0, step=6)

    with pytest.raises(FloatingPointError, match="at step 7"):
        optim.check_finite(value, step=7)
