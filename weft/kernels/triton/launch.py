"""What every launch asks: whether Triton is interpreting, and whether a tensor is one that the kernels read."""

from __future__ import annotations

import os

from torch import Tensor

from weft.kernels.triton.support import DTYPES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels are interpreted on the CPU. Triton decides when it is imported, so this module does."""


def takes(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels can read these: on their device, contiguous, one dtype that they know."""
    if first.dtype not in DTYPES or first.is_cpu != INTERPRETED or not first.is_contiguous():
        return False
    return all(t is None or (t.dtype == first.dtype and t.is_contiguous()) for t in others)
