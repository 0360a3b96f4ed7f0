"""Large memory in large pages: with pages of 4 KiB, looking up addresses takes a good part of a product's time.

Owns one request to the system. Where it is refused, or means nothing, memory works as before.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
from functools import cache

import torch
from torch import Tensor

ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
PAGE_BYTES = 2 << 20
LEAST_BYTES = 2 * PAGE_BYTES
"""Below this, few whole pages would lie within a tensor."""
PIECE_BYTES = 64 << 20
LINE_BYTES = 64


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


class Arena:
    """Memory for tensors that live equally long, such as a model's weights: they lie one after the other in pieces of
    huge pages, which a weight of a few megabytes would hardly fill alone. A piece is freed with the last of its
    tensors, but for the one at hand."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor, from a line of a cache on."""
        size = math.prod(shape) * dtype.itemsize
        if size > PIECE_BYTES:
            return empty(*shape, dtype=dtype)
        taken = -(-size // LINE_BYTES) * LINE_BYTES
        with self._lock:
            if taken > len(self._rest):
                self._rest = empty(PIECE_BYTES, dtype=torch.uint8)
            found, self._rest = self._rest[:size], self._rest[taken:]
        return found.view(dtype).view(shape)


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
