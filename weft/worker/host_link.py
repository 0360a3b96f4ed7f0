"""The link between the device pool and the host pool: how pages cross it, and what waits for it.

The contract is one for all devices:

- What a step moves out is read before anything that the step writes. The source page may be overwritten at once.
- What a step brings in is in its place before the forward of the *next* step. Until then the link works beside the
  forward. Where the forward of the same step reads or writes such a page, that step waits, and so does a step without
  a forward, which has nothing to work beside, for what it moves in either direction: its time is that of the link.
- Movements happen in the order of steps: a page that was moved out can be brought in again by the same step.

`CudaLink` has a stream of its own and staging buffers on the device. `CpuLink` copies at once, with the cores that
compute: on a CPU both pools are the same memory. A `LinkThrottle` makes that link as slow as a configured rate, so that
decisions which depend on a slow link can be measured without one: the bytes move at once, their time passes beside the
forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from weft.core.step import I32
from weft.kernels.base import PrepareMove
from weft.worker.transfer import upload

STAGING_BYTES = 32 << 20
"""Device memory of one staging buffer."""
WORD = torch.int64
"""A page has a whole number of them in each layer: at least 8 tokens of whole heads."""
NUM_STAGING = 4
"""Up to so many times `STAGING_BYTES` leave in one step without a wait of its forward."""


class HostLink(Protocol):
    """Moves pages between the pools of a `KVStore`, in the order of calls."""

    def swap_out(self, device_pages: I32, host_pages: I32) -> None:
        """Copy device pages [n] to host pages [n]."""
        ...

    def swap_in(self, host_pages: I32, device_pages: I32) -> None:
        """Copy host pages [n] to device pages [n]."""
        ...

    def wait(self) -> None:
        """Have what follows on the device begin after all pages that were brought in are in their places."""
        ...

    def wait_idle(self) -> None:
        """Have what follows on the device begin after all pages have crossed, in both directions."""
        ...

    def remaining_s(self) -> float:
        """Seconds until the link is idle, as far as the host knows them: those of a throttled link, else 0."""
        ...

    def close(self) -> None:
        """Block until the link is idle: the pools may be freed."""
        ...


class LinkThrottle:
    """The time that a link of `bytes_per_s` needs, which carries one transfer after the other, in both directions."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._idle_at_s = clock()

    def carry(self, num_bytes: int) -> None:
        """A transfer begins as soon as the link is idle."""
        self._idle_at_s = max(self._idle_at_s, self._clock()) + num_bytes / self._bytes_per_s

    def remaining_s(self) -> float:
        """Seconds until the link is idle."""
        return max(0.0, self._idle_at_s - self._clock())

    def wait(self) -> None:
        """Sleep, without a core, until the link is idle."""
        if (left := self.remaining_s()) > 0.0:
            self._sleep(left)


class CpuLink:
    """Pools in the same memory: every movement is done when the call returns, and takes time where it is throttled."""

    def __init__(
        self, layers: Sequence[Tensor], host: Tensor, prepare: PrepareMove, throttle: LinkThrottle | None = None
    ):
        """`layers` are bytes [device pages, bytes] of each layer, `host` is bytes [host pages, bytes of all layers]."""
        parts = torch.split(host, [layer.shape[1] for layer in layers], dim=1)
        self._move_out, self._move_in = prepare(layers, parts), prepare(parts, layers)
        self._bytes_per_page = host.shape[1]
        self._throttle = throttle

    def swap_out(self, device_pages: I32, host_pages: I32) -> None:
        """Copy device pages [n] to host pages [n]."""
        self._carry(len(device_pages))
        self._move_out(_index(device_pages), _index(host_pages))

    def swap_in(self, host_pages: I32, device_pages: I32) -> None:
        """Copy host pages [n] to device pages [n]."""
        self._carry(len(device_pages))
        self._move_in(_index(host_pages), _index(device_pages))

    def wait(self) -> None:
        """Let the time of a throttled link pass."""
        if self._throttle is not None:
            self._throttle.wait()

    wait_idle = wait

    def remaining_s(self) -> float:
        """Seconds until a throttled link is idle."""
        return 0.0 if self._throttle is None else self._throttle.remaining_s()

    def close(self) -> None:
        """Do nothing: copies are done when their calls return."""

    def _carry(self, num_pages: int) -> None:
        # Before the copy: the time that copying takes is part of the link's, not added to it.
        if self._throttle is not None:
            self._throttle.carry(num_pages * self._bytes_per_page)


class CudaLink:
    """Pinned host memory behind a stream of its own.

    Pages on their way out are gathered into staging by the current stream, so that what follows may overwrite them, and
    cross on the link's stream. Pages on their way in cross to staging on the link's stream as early as a buffer is
    free, and are spread from there on the same stream, after the work that the current stream has by then: it may still
    read or copy what the pages held before. The current stream waits for the link in `wait`, and where more leaves at a
    time than staging holds.
    """

    def __init__(self, layers: Sequence[Tensor], host: Tensor):
        """As `CpuLink`, with `layers` on the device and `host` pinned."""
        # Pages are gathered and spread in words: the device moves a single element at a time.
        self._layers = [layer.view(WORD) for layer in layers]
        self._widths = [layer.shape[1] for layer in self._layers]
        self._host = host.view(WORD)
        self._bytes_per_page = host.shape[1]
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._arrived: torch.cuda.Event | None = None
        self._staging: list[_LinkBuffer] = []

    @property
    def _device(self) -> torch.device:
        return self._layers[0].device

    def swap_out(self, device_pages: I32, host_pages: I32) -> None:
        """Copy device pages [n] to host pages [n]."""
        current = torch.cuda.current_stream(self._device)
        for part in self._parts(len(device_pages)):
            index = upload(device_pages[part], self._device, np.int64)
            staging = self._next_staging()
            staging.wait(current)
            pages = staging.buffer[: len(index)]
            torch.cat([layer.index_select(0, index) for layer in self._layers], dim=1, out=pages)
            self._stream.wait_stream(current)
            with self._crossing():
                for start, first, count in _runs(host_pages[part]):
                    self._host[first : first + count].copy_(pages[start : start + count], non_blocking=True)
                staging.used(self._stream)

    def swap_in(self, host_pages: I32, device_pages: I32) -> None:
        """Copy host pages [n] to device pages [n]."""
        current = torch.cuda.current_stream(self._device)
        for part in self._parts(len(device_pages)):
            index = upload(device_pages[part], self._device, np.int64)
            staging = self._next_staging()
            pages = staging.buffer[: len(index)]
            staging.wait(self._stream)
            with self._crossing():
                for start, first, count in _runs(host_pages[part]):
                    pages[start : start + count].copy_(self._host[first : first + count], non_blocking=True)
                self._stream.wait_stream(current)
                for layer, data in zip(self._layers, torch.split(pages, self._widths, dim=1), strict=True):
                    layer.index_copy_(0, index, data)
                staging.used(self._stream)
            # It belongs to the current stream, which may reuse its memory once this call returns.
            index.record_stream(self._stream)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record(self._stream)

    def wait(self) -> None:
        """Have the current stream wait for the pages that were brought in."""
        if self._arrived is not None:
            self._arrived.wait(torch.cuda.current_stream(self._device))
            self._arrived = None

    def wait_idle(self) -> None:
        """Have the current stream wait for the link's, whatever it carries."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._arrived = None

    def remaining_s(self) -> float:
        """0: what is left of a transfer is known to the device alone."""
        return 0.0

    def close(self) -> None:
        """Block until the link's stream is idle."""
        self._stream.synchronize()

    def _next_staging(self) -> _LinkBuffer:
        if len(self._staging) < NUM_STAGING:
            shape = (max(1, STAGING_BYTES // self._bytes_per_page), self._host.shape[1])
            buffer = torch.empty(shape, dtype=WORD, device=self._device)
            # Its memory may have been another tensor's, which the current stream still reads.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._staging.append(_LinkBuffer(buffer))
        else:
            self._staging.append(self._staging.pop(0))
        return self._staging[-1]

    @contextmanager
    def _crossing(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def _parts(self, count: int) -> list[slice]:
        size = max(1, STAGING_BYTES // self._bytes_per_page)
        return [slice(start, start + size) for start in range(0, count, size)]


class _LinkBuffer:
    """A buffer on the device, [pages, bytes per page], and until when it is used."""

    def __init__(self, buffer: Tensor):
        self.buffer = buffer
        self._used: torch.cuda.Event | None = None

    def used(self, stream: torch.cuda.Stream) -> None:
        """It is in use until `stream` has done what it has by now."""
        self._used = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._used.record(stream)

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Have `stream` wait until it is free."""
        if self._used is not None:
            self._used.wait(stream)


def _index(pages: I32) -> Tensor:
    return torch.from_numpy(pages.astype(np.int64))


def _runs(pages: I32) -> list[tuple[int, int, int]]:
    """Consecutive page numbers as (index of the first, first, count): each is one copy."""
    bounds = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    return [(a, int(pages[a]), b - a) for a, b in pairwise(bounds)]
