"""The KV pools of one worker and every movement of KV between pages.

Owns the memory of the device pool (one tensor per layer, which kernels read and write) and of the host pool (one row
of bytes per page, all layers together, so that a page crosses the link in one copy). Does not know which page belongs
to whom.

Everything on the device runs in the order of a stream: a swap-out reads before anything later overwrites. What crosses
the link on a GPU has a stream of its own, and goes through staging buffers: pages on their way out hold up nothing, and
pages on their way in start while earlier steps still compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from weft.core.step import I32, Step
from weft.kernels.base import Kernels
from weft.kernels.cpu import huge_pages
from weft.models.base import KVSpec
from weft.worker.transfer import upload

STAGING_BYTES = 32 << 20
"""Device memory of one staging buffer."""
NUM_STAGING = 2
"""One is filled while another is emptied."""
ALIGNMENT = 4096


class KVStore:
    """The device and host pools of a model."""

    def __init__(
        self,
        spec: KVSpec,
        kernels: Kernels,
        page_size: int,
        num_device_pages: int,
        num_host_pages: int,
        device: torch.device,
    ):
        """Pools of zeros. On a CPU, memory is taken from the system when a page is first written."""
        self.bytes_per_page = spec.bytes_per_page(page_size)
        self._kernels = kernels
        shapes = [spec.layer_shape(i, num_device_pages, page_size) for i in range(len(spec.layers))]
        self.layers = [_zeros(shape, spec.dtype, device) for shape in shapes]
        """Per layer, [pages, 2 (K, V), KV heads, page size, head size]."""
        self._layer_bytes = [layer.view(num_device_pages, -1).view(torch.uint8) for layer in self.layers]
        self._widths = [view.shape[1] for view in self._layer_bytes]
        self._host = _host_pool(num_host_pages, self.bytes_per_page, pinned=device.type == "cuda")
        self._link = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._staging: list[_Staging] = []

    def move(self, step: Step) -> None:
        """Carry out the step's swap-outs, page copies, token copies and swap-ins, in this order."""
        if len(step.swap_outs):
            self._swap_out(step.swap_outs[:, 0], step.swap_outs[:, 1])
        for pairs, copy in (
            (step.page_copies, self._kernels.copy_pages),
            (step.token_copies, self._kernels.copy_slots),
        ):
            if len(pairs):
                source, destination = upload(pairs.T, self._device, np.int64)
                for layer in self.layers:
                    copy(layer, source, destination)
        if len(step.swap_ins):
            self._swap_in(step.swap_ins[:, 0], step.swap_ins[:, 1])

    @property
    def _device(self) -> torch.device:
        return self.layers[0].device

    def _swap_out(self, device_pages: I32, host_pages: I32) -> None:
        for part in self._parts(len(device_pages)):
            index = upload(device_pages[part], self._device, np.int64)
            staging = self._next_staging()
            staging.wait(None)
            pages = staging.buffer[: len(index)]
            torch.cat([view.index_select(0, index) for view in self._layer_bytes], dim=1, out=pages)
            with self._crossing(after_current=True):
                start = 0
                for first, count in _runs(host_pages[part]):
                    self._host[first : first + count].copy_(pages[start : start + count], non_blocking=True)
                    start += count
                staging.used()

    def _swap_in(self, host_pages: I32, device_pages: I32) -> None:
        for part in self._parts(len(device_pages)):
            index = upload(device_pages[part], self._device, np.int64)
            staging = self._next_staging()
            pages = staging.buffer[: len(index)]
            staging.wait(self._link)
            with self._crossing(after_current=False):
                start = 0
                for first, count in _runs(host_pages[part]):
                    pages[start : start + count].copy_(self._host[first : first + count], non_blocking=True)
                    start += count
            if self._link is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._link)
            for view, data in zip(self._layer_bytes, torch.split(pages, self._widths, dim=1), strict=True):
                view.index_copy_(0, index, data)
            staging.used()

    def _next_staging(self) -> _Staging:
        if len(self._staging) < NUM_STAGING:
            shape = (max(1, STAGING_BYTES // self.bytes_per_page), self.bytes_per_page)
            self._staging.append(_Staging(torch.empty(shape, dtype=torch.uint8, device=self._device)))
        else:
            self._staging.append(self._staging.pop(0))
        return self._staging[-1]

    @contextmanager
    def _crossing(self, *, after_current: bool) -> Iterator[None]:
        """What is inside goes to the link's stream; `after_current`: after all that the current stream has by now."""
        if self._link is None:
            yield
            return
        if after_current:
            self._link.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._link):
            yield

    def _parts(self, count: int) -> list[slice]:
        size = max(1, STAGING_BYTES // self.bytes_per_page)
        return [slice(start, start + size) for start in range(0, count, size)]


class _Staging:
    """A buffer on the device, [pages, bytes per page], and until when it is used."""

    def __init__(self, buffer: Tensor):
        self.buffer = buffer
        self._used = torch.cuda.Event() if buffer.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.used()

    def used(self) -> None:
        """It is in use until the current stream has done what it has by now."""
        if self._used is not None:
            self._used.record()

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Have `stream` (None: the current one) wait until it is free."""
        if self._used is not None:
            self._used.wait(stream)


def _runs(pages: I32) -> list[tuple[int, int]]:
    """Consecutive page numbers as (first, count): each is one copy."""
    bounds = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    return [(int(pages[a]), b - a) for a, b in pairwise(bounds)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return _lazy_bytes(num_bytes).view(dtype).view(shape)


def _host_pool(num_pages: int, bytes_per_page: int, *, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty(num_pages, bytes_per_page, dtype=torch.uint8, pin_memory=True)
    return _lazy_bytes(num_pages * bytes_per_page).view(num_pages, bytes_per_page)


def _lazy_bytes(num_bytes: int) -> Tensor:
    # numpy takes zeros from calloc, which touches no memory, where torch would write every page now.
    raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    pool = torch.from_numpy(raw[start : start + num_bytes])
    huge_pages.ask(pool)
    return pool
