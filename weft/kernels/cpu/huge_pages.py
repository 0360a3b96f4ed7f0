"""Large memory in large pages: with pages of 4 KiB, looking up addresses takes a good part of a product's time.

Owns one request to the system. Where it is refused, or means nothing, memory works as before.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

from torch import Tensor

ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
LEAST_BYTES = 4 << 20
"""Below this, few whole pages of 2 MiB would lie within a tensor."""


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
