"""Large memory in large pages: with pages of 4 KiB, looking up addresses takes a good part of a product's time.

Owns one request to the system. Where it is refused, or means nothing, memory works as before.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from functools import cache

import torch
from torch import Tensor

ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
PAGE_BYTES = 2 << 20
LEAST_BYTES = 2 * PAGE_BYTES
"""Below this, few whole pages would lie within a tensor."""


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory for a tensor on the CPU, on huge pages from its first byte on if it is large."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8)  # what is left over is never touched, so costs nothing
    begin = -memory.data_ptr() % PAGE_BYTES
    found = memory[begin : begin + size].view(dtype).view(shape)
    ask(found)
    return found


def ask(tensor: Tensor) -> None:
    """Ask for huge pages under a tensor that nothing was written to yet. Other devices' memory is left alone."""
    size = tensor.numel() * tensor.element_size()
    advise = _madvise()
    if advise is None or tensor.device.type != "cpu" or size < LEAST_BYTES:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
    # A refusal (a kernel without them) changes nothing but speed.
    advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ADVICE)


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    if ADVICE is None or not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
