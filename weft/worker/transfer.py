"""Small arrays on their way between host and device.

Owns the two crossings a step makes: its numbers up (`upload`) and its results down (`Readback`, one copy for all of
them). Does not know what the numbers mean; KV pages move in `kv_store`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device, dtype: Any = None) -> Tensor:
    """A private copy of `array` on `device`, of numpy dtype `dtype` if given. Does not wait for the device."""
    # Arrays decoded from the wire are read-only, and the caller may reuse the rest: always copy.
    host = torch.from_numpy(np.array(array, dtype=dtype, copy=True, order="C"))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Readback:
    """Named int and float tensors on their way to the host, packed into one buffer so that one copy moves them all.

    Floating tensors arrive as float32, integers as int32: what a `StepResult` holds.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        """Start the copy; it is ordered after what the current stream already holds."""
        self._layout = [(name, tuple(t.shape), t.dtype.is_floating_point) for name, t in tensors.items()]
        self._event: torch.cuda.Event | None = None
        if not tensors:
            self._host = torch.empty(0, dtype=torch.int32)
            return
        packed = torch.cat([_as_words(t) for t in tensors.values()])
        if packed.device.type == "cpu":
            self._host = packed
            return
        self._host = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
        self._host.copy_(packed, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        """Whether `arrays` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The tensors by name, once they are on the host. Blocks until then."""
        if self._event is not None:
            self._event.synchronize()
        words = self._host.numpy()
        found: dict[str, npt.NDArray[Any]] = {}
        start = 0
        for name, shape, is_float in self._layout:
            size = int(np.prod(shape, dtype=np.int64))
            part = words[start : start + size]
            found[name] = (part.view(np.float32) if is_float else part).reshape(shape)
            start += size
        return found


def _as_words(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if tensor.dtype.is_floating_point:
        return flat.to(torch.float32).view(torch.int32)
    return flat.to(torch.int32)
