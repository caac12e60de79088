"""AdamW with decay groups, Muon beside it, the schedule of rates, and the precision that a machine computes best in."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    head_lr: float | None = None,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019); matrices decay, biases and norms (one-dimensional) do not.

    head_lr: a learning rate of their own for the parameters under `heads.`
    """
    trunk: list[nn.Parameter] = []
    heads: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (heads if head_lr and name.startswith("heads.") else trunk).append(parameter)
    groups = [
        {"params": [p for p in part if matrix == (p.dim() >= 2)], "weight_decay": decay, "scale": s}
        for part, s in ((trunk, 1.0), (heads, head_lr / lr if head_lr else 1.0))
        for matrix, decay in ((True, weight_decay), (False, 0.0))
        if part
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)


class Muon(torch.optim.Muon):
    """Muon (Jordan et al. 2024) in the precision that its matrices' device multiplies best in.

    torch's own always takes bfloat16, with which a CPU without units for it spends a hundred times as long. As there,
    the momentum is Nesterov's.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, weight_decay: float):
        super().__init__(params, lr=lr, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalized(
                    matrix.grad.lerp(momentum, group["momentum"]),
                    group["ns_coefficients"],
                    group["ns_steps"],
                )
                rows, columns = matrix.shape
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def orthogonalized(matrix: Tensor, coefficients: Sequence[float], steps: int) -> Tensor:
    """The matrix with all its singular values near 1, by Newton-Schulz iteration."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = (matrix.T if tall else matrix).to(best_precision(matrix.device))
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Together:
    """Several optimisers that step as one, each with parameters of its own."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def step(self) -> None:
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): one.state_dict() for number, one in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, one in enumerate(self.optimizers):
            one.load_state_dict(state[str(number)])
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]


OPTIMIZERS = ("adamw", "muon")


def optimizer(
    kind: str,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    muon_lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    head_lr: float | None = None,
) -> torch.optim.AdamW | Together:
    """One of OPTIMIZERS: AdamW, or Muon at `muon_lr` for the matrices of the layers and AdamW for all else."""
    if kind == "adamw":
        return adamw(named_parameters, lr, weight_decay, betas, head_lr)
    named = list(named_parameters)
    matrices = [p for name, p in named if "layers." in name and p.dim() == 2]
    others = [(name, p) for name, p in named if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices, "scale": muon_lr / lr}]
    return Together(
        Muon(groups, lr=muon_lr, weight_decay=weight_decay),
        adamw(others, lr, weight_decay, betas, head_lr),
    )


def linear_schedule(step: int, steps: int, warmup: float, hold: float = 0.0) -> float:
    """Compute the share of the peak rate at a step: up from zero, then the peak, then down to zero.

    warmup: share of the steps in which the rate rises
    hold: share of the steps after the warm-up at the peak. Until these end, the number of steps may still change.
    """
    warm = max(1, round(steps * warmup))
    if step < warm:
        return (step + 1) / warm
    falling = warm + round((steps - warm) * hold)
    if step < falling:
        return 1.0
    return max(0.0, (steps - step) / max(1, steps - falling))


def heard(step: int, steps: int, share: float) -> int:
    """In how many of the first `step` steps something takes part whose share of them goes evenly from `share` to 1."""
    return math.floor(share * step + (1 - share) * step**2 / (2 * steps))


def set_lr(optimizer: torch.optim.Optimizer | Together, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)


def add_gradients(
    loss: Tensor, parameters: Sequence[nn.Parameter], norm: float, of: Sequence[nn.Parameter]
) -> None:
    """Add a loss's gradients to those of the parameters, scaled so that those of `of` have this norm together.

    With a norm for each of several losses, a step goes as far for one as for another, however steep they are (as
    Chen et al. 2018 want, but at every step and for all of the trunk). A loss that is flat there adds nothing.
    """
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    known = {p: g for p, g in zip(parameters, found, strict=True) if g is not None}
    steepness = torch.nn.utils.get_total_norm([known[p] for p in of if p in known])
    scale = torch.where(steepness > 0, norm / steepness, 0.0)
    for parameter, gradient in known.items():
        scaled = gradient * scale
        parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)


PRECISIONS = ("auto", "fp32", "bf16")


def precision(asked: str, device: torch.device) -> torch.dtype:
    """What to compute in: as asked, or the best here."""
    fixed = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return fixed.get(asked) or best_precision(device)


def best_precision(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies in it, else float32.

    Autocast to bfloat16 on a CPU without such units is many times slower than float32, so the choice goes by
    capability, never by the kind of device.
    """
    if device.type == "cuda":
        capable = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        capable = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if capable else torch.float32


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seed_dropout(seed: int, step: int, rank: int = 0) -> None:
    """Make what the step draws at random in torch (dropout) follow from the seed and the step alone.

    rank: of several processes, which draw differently
    """
    torch.manual_seed((seed * 1_000_003 + step + (rank << 40)) % 2**63)


def check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at step {step}: lower the learning rate")
