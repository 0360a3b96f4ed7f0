"""Where the kernels in Triton can be used. Imports neither Triton nor what needs it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from weft.kernels.base import Kernels

NAME = "triton"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def is_installed() -> bool:
    """Whether `import triton` would find something."""
    return find_spec("triton") is not None


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of `dtype` on `device`."""
    return device.type == "cuda" and dtype in DTYPES and is_installed()


def note(dtype: torch.dtype) -> str:
    """For people: which Triton is used on a CUDA device for `dtype`, or why none is."""
    if not is_installed():
        return "Triton: not installed; torch's builds for CUDA bring it"
    if dtype not in DTYPES:
        return f"Triton: no kernels for {str(dtype).removeprefix('torch.')}"
    try:
        return f"Triton: {version('triton')}"
    except PackageNotFoundError:  # a build of another name
        return "Triton: version unknown"


def load() -> Kernels:
    """The operations. Imports Triton."""
    from weft.kernels.triton.ops import KERNELS

    return KERNELS
