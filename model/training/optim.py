"""Optimizers (AdamW with decay groups, Muon), the learning rate schedule, and the best precision of a machine."""

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
    """AdamW (Loshchilov & Hutter 2019) without decay of biases and norms. head_lr: of the parameters under `heads.`"""
    encoder: list[nn.Parameter] = []
    heads: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (heads if head_lr and name.startswith("heads.") else encoder).append(parameter)
    groups = [
        {"params": [p for p in part if matrix == (p.dim() >= 2)], "weight_decay": decay, "scale": s}
        for part, s in ((encoder, 1.0), (heads, head_lr / lr if head_lr else 1.0))
        for matrix, decay in ((True, weight_decay), (False, 0.0))
        if part
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)


class Muon(torch.optim.Muon):
    """Muon (Jordan et al. 2024) in the fastest precision of its matrices' device.

    torch's own always computes in bfloat16, which is a hundred times slower on a CPU without bfloat16 units. The
    momentum is Nesterov's in both.
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
    """Return the matrix with all its singular values near 1, by Newton-Schulz iteration."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = (matrix.T if tall else matrix).to(best_precision(matrix.device))
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class CombinedOptimizer:
    """Several optimizers with separate parameters, used as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): each.state_dict() for number, each in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, each in enumerate(self.optimizers):
            each.load_state_dict(state[str(number)])
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]


OPTIMIZERS = ("adamw", "muon")


def optimizer(
    kind: str,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    muon_lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    head_lr: float | None = None,
) -> torch.optim.AdamW | CombinedOptimizer:
    """Return one of OPTIMIZERS: AdamW, or Muon at `muon_lr` for the layers' matrices and AdamW for the rest."""
    if kind == "adamw":
        return adamw(named_parameters, lr, weight_decay, betas, head_lr)
    named = list(named_parameters)
    matrices = [p for name, p in named if "layers." in name and p.dim() == 2]
    others = [(name, p) for name, p in named if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices, "scale": muon_lr / lr}]
    return CombinedOptimizer(
        Muon(groups, lr=muon_lr, weight_decay=weight_decay),
        adamw(others, lr, weight_decay, betas, head_lr),
    )


def linear_schedule(step: int, steps: int, warmup: float, hold: float = 0.0) -> float:
    """Return the share of the peak rate at a step: it rises for `warmup`, holds for `hold` of the rest, then falls."""
    warm = max(1, round(steps * warmup))
    if step < warm:
        return (step + 1) / warm
    falling = warm + round((steps - warm) * hold)
    if step < falling:
        return 1.0
    return max(0.0, (steps - step) / max(1, steps - falling))


def scheduled_steps(step: int, steps: int, share: float) -> int:
    """Count the first `step` steps in which a task is scheduled whose share rises linearly from `share` to 1."""
    return math.floor(share * step + (1 - share) * step**2 / (2 * steps))


def set_lr(optimizer: torch.optim.Optimizer | CombinedOptimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)


def add_normalized_gradients(
    loss: Tensor, parameters: Sequence[nn.Parameter], norm: float, shared: Sequence[nn.Parameter]
) -> None:
    """Add a loss's gradients to the parameters' gradients, scaled so that the gradient of `shared` has this norm.

    Losses with equal norms have equal influence on a step, whatever the size of their gradients (similar to GradNorm,
    Chen et al. 2018, but at every step and for the whole encoder). A loss with a zero gradient adds nothing.
    """
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    known = {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
    own_norm = torch.nn.utils.get_total_norm([known[p] for p in shared if p in known])
    scale = torch.where(own_norm > 0, norm / own_norm, 0.0)
    for parameter, gradient in known.items():
        scaled = gradient * scale
        parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)


PRECISIONS = ("auto", "fp32", "bf16")


def precision(name: str, device: torch.device) -> torch.dtype:
    """Return the type of one of PRECISIONS; `auto` is the best one of the device."""
    fixed = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return fixed.get(name) or best_precision(device)


def best_precision(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the hardware has units for it, else float32, which is many times faster there."""
    if device.type == "cuda":
        capable = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        capable = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if capable else torch.float32


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seed_dropout(seed: int, step: int, rank: int = 0) -> None:
    """Seed torch's random numbers of a step, as a function of seed, step and the process's rank."""
    torch.manual_seed((seed * 1_000_003 + step + (rank << 40)) % 2**63)


def check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at step {step}: lower the learning rate")
