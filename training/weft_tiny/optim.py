"""Muon (orthogonalised momentum) for the matrices inside the blocks, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)


def multiplies_bfloat16(device: str | torch.device) -> bool:
    """Whether the device has instructions for products of bfloat16.

    A processor without AVX-512 BF16 and without AMX multiplies bfloat16 ten times slower than float32.
    """
    if torch.device(device).type != "cpu":
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix of each matrix in a stack by Newton-Schulz iterations."""
    a, b, c = _QUINTIC
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(torch.bfloat16 if multiplies_bfloat16(matrices.device) else torch.float32)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; equal shapes are handled in one batch."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply one update to the parameters."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for shape, parameters in shapes.items():
                for parameter in parameters:
                    if not self.state[parameter]:
                        self.state[parameter]["momentum"] = torch.zeros_like(parameter)
                momenta = [self.state[parameter]["momentum"] for parameter in parameters]
                gradients = [parameter.grad for parameter in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                updates = orthogonalize(torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"])))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(parameters, updates.unbind(), alpha=-scale)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices for Muon, and the rest (embedding and norms)."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name else rest).append(parameter)
    return matrices, rest
