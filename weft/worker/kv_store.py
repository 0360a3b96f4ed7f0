"""The KV pools of one worker and every movement of KV between pages.

Owns the memory of the device pool (one tensor per layer, which kernels read and write) and of the host pool (one row
of bytes per page, all layers together, so that a page crosses the link in one copy), and the order of movements within
a step. Does not know which page belongs to whom. How pages cross the link, and what waits for them, is in `host_link`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.abi.errors import ConfigError
from weft.core.step import Step
from weft.kernels.base import Kernels
from weft.kernels.cpu import huge_pages
from weft.models.base import KVSpec
from weft.worker.host_link import CpuLink, CudaLink, HostLink, LinkThrottle
from weft.worker.transfer import upload

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
        throttle: LinkThrottle | None = None,
    ):
        """Pools of zeros. On a CPU, memory of device pages is taken from the system when a page is first written, that
        of host pages at once: a swap-out must not pay for it.

        `throttle` slows the link between the pools down; for a CPU only. Raises `ConfigError` for a host pool that the
        system does not give.
        """
        if throttle is not None and device.type != "cpu":
            raise ConfigError(f"host_link_gbs slows down copies on a CPU; the device is {device.type}: unset it")
        self.bytes_per_page = spec.bytes_per_page(page_size)
        self._page_size = page_size
        self._num_device_pages = num_device_pages
        self._kernels = kernels
        shapes = [spec.layer_shape(i, num_device_pages, page_size) for i in range(len(spec.layers))]
        self.layers = [_zeros(shape, spec.dtype, device) for shape in shapes]
        """Per layer, [pages, 2 (K, V), KV heads, page size, head size]."""
        layer_bytes = [layer.view(num_device_pages, -1).view(torch.uint8) for layer in self.layers]
        self._host = _HostPool(num_host_pages, self.bytes_per_page, pinned=device.type == "cuda")
        self._link: HostLink
        # In host memory, pages of the device's pool are copied as those between both pools are: all layers in one call.
        on_host = device.type == "cpu"
        self._copy_pages = kernels.prepare_move(layer_bytes, layer_bytes) if on_host else self._copy_each
        if device.type == "cuda":
            self._link = CudaLink(layer_bytes, self._host.pages, kernels.prepare_move)
        else:
            self._link = CpuLink(layer_bytes, self._host.pages, kernels.prepare_move, throttle)

    def move(self, step: Step) -> None:
        """Carry out the step's swap-outs, page copies, token copies and swap-ins, in this order, after what earlier
        steps brought in is in its place.

        What this step brings in is there when the next one moves, and before this one's forward where that needs it.
        """
        self._link.wait()
        if len(step.swap_outs):
            self._link.swap_out(step.swap_outs[:, 0], step.swap_outs[:, 1])
        if len(step.page_copies):
            self._copy_pages(*upload(step.page_copies.T, self._device, np.int64))
        if len(step.token_copies):
            source, destination = upload(step.token_copies.T, self._device, np.int64)
            for layer in self.layers:
                self._kernels.copy_slots(layer, source, destination)
        if len(step.swap_ins):
            self._link.swap_in(step.swap_ins[:, 0], step.swap_ins[:, 1])
            arriving = step.swap_ins[:, 1]
            if step.forward is not None and step.forward.touches(arriving, self._page_size, self._num_device_pages):
                self._link.wait()

    def _copy_each(self, source: Tensor, destination: Tensor) -> None:
        for layer in self.layers:
            self._kernels.copy_pages(layer, source, destination)

    def settle(self) -> None:
        """Have what follows begin after the pages that earlier steps brought in are in their places."""
        self._link.wait()

    def wait_for_link(self) -> None:
        """Have what follows begin after all pages have crossed, in both directions."""
        self._link.wait_idle()

    def remaining_s(self) -> float:
        """Seconds until a throttled link is idle; else 0."""
        return self._link.remaining_s()

    def close(self) -> None:
        """Block until no movement needs the pools, and give up what pins them."""
        self._link.close()
        self._host.close()

    @property
    def _device(self) -> torch.device:
        return self.layers[0].device


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy takes zeros from calloc, which touches no memory, where torch would write every page now.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    pool = torch.from_numpy(raw[start : start + num_bytes])
    huge_pages.ask(pool)
    return pool.view(dtype).view(shape)


class _HostPool:
    """Host pages of zeros, [pages, bytes per page]. The system has given all of their memory."""

    def __init__(self, num_pages: int, bytes_per_page: int, *, pinned: bool):
        """`pinned`: the device copies from and to it by itself. Raises `ConfigError` where there is not so much."""
        self._is_registered = False
        try:
            self.pages = huge_pages.empty(num_pages, bytes_per_page, dtype=torch.uint8).zero_()
            if pinned and self.pages.numel():
                # Not torch's pinned memory: its allocator takes the next power of two of bytes, and never returns them.
                cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(cuda.cudaHostRegister(self.pages.data_ptr(), self.pages.numel(), 0))
                self._is_registered = True
        except RuntimeError as error:
            size = num_pages * bytes_per_page
            held = "pinned " if pinned else ""
            raise ConfigError(
                f"the system gives no {size / 2**30:.2f} GiB of {held}memory for {num_pages} host pages "
                f"({str(error).splitlines()[0]}); lower host_kv_bytes, or set it to 0 to do without a host tier"
            ) from error

    def close(self) -> None:
        """Give up the pinning: nothing crosses to or from the device any more. Idempotent."""
        if self._is_registered:
            self._is_registered = False
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cuda.cudaHostUnregister(self.pages.data_ptr()))
