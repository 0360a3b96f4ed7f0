"""Small arrays on their way between host and device.

Owns the two crossings a step makes: its numbers up (`upload`, and `upload_all` in one copy) and its results down
(`Readback`, one copy for all of them). Does not know what the numbers mean; KV pages move in `kv_store`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes, of each array in a packed copy."""


def upload(array: npt.NDArray[Any], device: torch.device, dtype: Any = None) -> Tensor:
    """A private copy of `array` on `device`, of numpy dtype `dtype` if given. Does not wait for the device."""
    # Arrays decoded from the wire are read-only, and the caller may reuse the rest: always copy.
    host = torch.from_numpy(np.array(array, dtype=dtype, copy=True, order="C"))
    return host if device.type == "cpu" else _send(host, device)


def upload_all(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """`upload` of each of `arrays`, in one copy."""
    if device.type == "cpu":
        return [upload(array, device) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
    packed = np.empty(starts[-1], np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = _send(torch.from_numpy(packed), device)
    return [
        sent[start : start + array.nbytes].view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def _send(host: Tensor, device: torch.device) -> Tensor:
    return host.pin_memory().to(device, non_blocking=True)


class Readback:
    """Named int and float tensors on their way to the host, packed into one buffer so that one copy moves them all.

    Floating tensors arrive as float32, integers as int32: what a `StepResult` holds.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, stream: torch.cuda.Stream | None = None):
        """Start the copy of `tensors`, which are on `device`, on `stream` if given, so that what the current stream is
        given next does not wait for it. It is done after what the current stream already holds, also where there are no
        tensors."""
        self._layout = [(name, tuple(t.shape), t.dtype.is_floating_point) for name, t in tensors.items()]
        self._event: torch.cuda.Event | None = None
        empty = torch.empty(0, dtype=torch.int32)
        packed = torch.cat([_as_words(t) for t in tensors.values()]) if tensors else empty
        self._host = packed
        if device.type == "cpu":
            return
        current = torch.cuda.current_stream(device)
        stream = stream or current
        stream.wait_stream(current)
        if tensors:
            self._host = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
            with torch.cuda.stream(stream):
                self._host.copy_(packed, non_blocking=True)
            # Its memory must not be another tensor's before the copy has been made.
            packed.record_stream(stream)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

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
