"""The link between the device pool and the host pool: how pages cross it, and what waits for it.

The contract is one for all devices:

- What a step moves out is read before anything that the step writes. The source page may be overwritten at once.
- What a step brings in is in its place before the forward of the *next* step. Until then the link works beside the
  forward. Where the forward of the same step reads or writes such a page, that step waits, and so does a step without
  a forward, which has nothing to work beside, for what it moves in either direction: its time is that of the link.
- Movements happen in the order of steps: a page that was moved out can be brought in again by the same step.

`CudaLink` has a stream for each direction, so that both work at a time, and staging buffers on the device. `CpuLink`
copies at once, with the cores that compute: on a CPU both pools are the same memory. A `LinkThrottle` makes that link
as slow as a configured rate, so that decisions which depend on a slow link can be measured without one: the bytes move
at once, their time passes beside the forward.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from weft.core.step import I32
from weft.kernels.base import MovePages, PrepareMove
from weft.worker.transfer import upload

STAGING_BYTES = 32 << 20
"""Device memory of one staging buffer."""
NUM_STAGING = 4
"""Up to so many times `STAGING_BYTES` leave in one step without a wait of its forward. One more buffer is for pages on
their way in."""


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
    """Pinned host memory behind two streams, one for each direction.

    Pages cross in parts, each as large as a staging buffer, and one launch moves all layers of a part between the pool
    and staging. Pages on their way out are gathered by the current stream, so that what follows may overwrite them, and
    cross on the stream for that direction. Pages on their way in cross to staging on the other stream as soon as the
    part before is in its place, and are spread from there on the same stream, after the work that the current stream
    has by then: it may still read or copy what the pages held before.

    The directions wait for each other only where they have to:

    - A part that comes in waits for the copies out of its own host pages, if these are still in flight.
    - What leaves waits for all that was brought in by earlier calls, as the current stream does: it is gathered from
      pages in their places, and no host page is overwritten while it is read.

    Beyond these, the current stream waits for the link in `wait`, and where more leaves at a time than staging holds.
    """

    def __init__(self, layers: Sequence[Tensor], host: Tensor, prepare: PrepareMove):
        """As `CpuLink`, with `layers` on the device and `host` pinned."""
        self._layers = layers
        self._host = host
        self._prepare = prepare
        self._part_pages = max(1, STAGING_BYTES // host.shape[1])
        self._outward, self._inward = (torch.cuda.Stream(self._device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._arrived: torch.cuda.Event | None = None
        self._leaving: deque[tuple[torch.cuda.Event, set[int]]] = deque()
        """Copies out that may be in flight, oldest first: when each is done, and its host pages."""
        self._out_staging: list[_Staging] = []
        self._in_staging: _Staging | None = None

    @property
    def _device(self) -> torch.device:
        return self._layers[0].device

    def swap_out(self, device_pages: I32, host_pages: I32) -> None:
        """Copy device pages [n] to host pages [n]."""
        self.wait()
        self._forget_done()
        current = torch.cuda.current_stream(self._device)
        for hosts, devices in self._parts(host_pages, device_pages):
            staging = self._next_out_staging()
            staging.free.wait(current)
            staging.move(devices, staging.rows[: len(hosts)])
            self._outward.wait_stream(current)
            with torch.cuda.stream(self._outward):
                for start, first, count in _runs(hosts):
                    pages = staging.pages[start : start + count]
                    self._host[first : first + count].copy_(pages, non_blocking=True)
            staging.free = self._outward.record_event()
            self._leaving.append((staging.free, set(hosts.tolist())))

    def swap_in(self, host_pages: I32, device_pages: I32) -> None:
        """Copy host pages [n] to device pages [n]."""
        self._forget_done()
        staging = self._in_staging = self._in_staging or self._new_staging(outward=False)
        parts = self._parts(host_pages, device_pages)
        may_overwrite = torch.cuda.current_stream(self._device).record_event()
        for hosts, devices in parts:
            self._wait_for_copies_out(hosts)
            with torch.cuda.stream(self._inward):
                for start, first, count in _runs(hosts):
                    pages = self._host[first : first + count]
                    staging.pages[start : start + count].copy_(pages, non_blocking=True)
                self._inward.wait_event(may_overwrite)
                staging.move(staging.rows[: len(hosts)], devices)
            # It belongs to the current stream, which may reuse its memory once this call returns.
            devices.record_stream(self._inward)
        self._arrived = self._inward.record_event()

    def wait(self) -> None:
        """Have the current stream wait for the pages that were brought in."""
        if self._arrived is not None:
            self._arrived.wait(torch.cuda.current_stream(self._device))
            self._arrived = None

    def wait_idle(self) -> None:
        """Have the current stream wait for all that those of the link carry."""
        for stream in (self._outward, self._inward):
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._arrived = None

    def remaining_s(self) -> float:
        """0: what is left of a transfer is known to the device alone."""
        return 0.0

    def close(self) -> None:
        """Block until the streams of the link are idle."""
        self._outward.synchronize()
        self._inward.synchronize()

    def _parts(self, host_pages: I32, device_pages: I32) -> list[tuple[I32, Tensor]]:
        """The host pages of each part, and the device pages that go with them, on the device.

        In the order of host pages, whose runs cross in one copy: runs that were allocated again are often reversed.
        """
        order = np.argsort(host_pages)
        hosts, size = host_pages[order], self._part_pages
        devices = upload(device_pages[order], self._device, np.int64)
        return [(hosts[i : i + size], devices[i : i + size]) for i in range(0, len(hosts), size)]

    def _forget_done(self) -> None:
        while self._leaving and self._leaving[0][0].query():  # type: ignore[no-untyped-call]
            self._leaving.popleft()

    def _wait_for_copies_out(self, host_pages: I32) -> None:
        """Have what is brought in next begin after the last copy out of one of `host_pages`."""
        pages = set(host_pages.tolist())
        for copied, leaving in reversed(self._leaving):
            if not pages.isdisjoint(leaving):
                copied.wait(self._inward)
                return

    def _next_out_staging(self) -> _Staging:
        """The buffer that has been in use for longest."""
        is_full = len(self._out_staging) == NUM_STAGING
        self._out_staging.append(self._out_staging.pop(0) if is_full else self._new_staging(outward=True))
        return self._out_staging[-1]

    def _new_staging(self, *, outward: bool) -> _Staging:
        pages = torch.empty((self._part_pages, self._host.shape[1]), dtype=torch.uint8, device=self._device)
        parts = torch.split(pages, [layer.shape[1] for layer in self._layers], dim=1)
        move = self._prepare(self._layers, parts) if outward else self._prepare(parts, self._layers)
        staging = _Staging(pages, torch.arange(len(pages), device=self._device), move)
        # Its memory may have been another tensor's, which the current stream still reads.
        self._inward.wait_stream(torch.cuda.current_stream(self._device))
        return staging


class _Staging:
    """A buffer on the device and the movement of pages between it and the pool, in one direction."""

    def __init__(self, pages: Tensor, rows: Tensor, move: MovePages):
        self.pages = pages
        """[pages, bytes per page]"""
        self.rows = rows
        """0 to the number of pages, on the device: where a part lies."""
        self.move = move
        self.free: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        """When what it held last has left. Not kept of a buffer that one stream writes and reads."""


def _index(pages: I32) -> Tensor:
    return torch.from_numpy(pages.astype(np.int64))


def _runs(pages: I32) -> list[tuple[int, int, int]]:
    """Consecutive page numbers as (index of the first, first, count): each is one copy."""
    bounds = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    return [(a, int(pages[a]), b - a) for a, b in pairwise(bounds)]
