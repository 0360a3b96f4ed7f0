"""The portable fast path: the same operations with library kernels of torch, few temporaries, indices made once."""

from __future__ import annotations

from weft.kernels import reference
from weft.kernels.base import Kernels

NAME = "torch"

KERNELS: Kernels = reference.KERNELS
