"""Pages between a device and the host: the rate of the link, and how many move in a step beside its forward.

Three measurements, on a worker with random weights and no scheduler:

- `copies`: what the machine gives. Pinned memory is copied out, in, and in both directions at once.
- `alone`: steps that only move pages, between host pages in one run and between scattered ones.
- `beside`: steps that compute and move pages. Each is launched while the one before runs, as an engine does, and the
  time is that until the link is idle after the last one, by number of steps. Steps without pages are measured in turns
  with them. A forward hides the link if its time does not grow until T_swap(N) = T_fwd.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.gpu_models import SHAPES, random_model
from weft.config import EngineConfig
from weft.core.cost.model import HIDDEN_SHARE
from weft.core.protocols import WorkerSpec
from weft.core.step import I32, ForwardBatch, LateInputs, Step, StepHandle
from weft.worker.build import start_worker
from weft.worker.executor import TorchWorker

Save = Callable[[dict[str, Any]], None]
"""Called with all results so far."""
WARM_UP_STEPS = 3
"""The first compiles kernels, the second captures a graph."""
REPEATS = 2
DIRECTIONS = ("out", "in", "both")


class LinkLoad(NamedTuple):
    """The sizes of the measurements."""

    decodes: tuple[tuple[int, int], ...]
    """(rows, KV entries of each) of steps that decode."""
    chunks: tuple[int, ...]
    """Tokens of steps that compute a prompt."""
    pages: tuple[int, ...]
    """Pages that move in a step; `both` moves half of them in each direction."""
    copied_bytes: int
    seconds: float
    """About how long each measurement takes."""
    page_size: int
    dtype: torch.dtype


LARGE = LinkLoad(((64, 1024),), (512,), (8, 16, 32, 64, 128, 256, 512), 256 << 20, 0.1, 16, torch.bfloat16)
TINY = LinkLoad(((3, 20),), (16,), (2, 4), 1 << 20, 0.0, 8, torch.float32)


def measure(name: str, load: LinkLoad, device: str, save: Save) -> dict[str, Any]:
    """Measure the link beside the forwards of one shape."""
    found: dict[str, Any] = {"model": name, "copies_gb_s": copy_rates(load.copied_bytes, torch.device(device))}
    print(f"copies, GB/s: {found['copies_gb_s']}", flush=True)
    save(found)
    batches = {f"decode {rows} x {kv}": [(1, kv - 1)] * rows for rows, kv in load.decodes}
    batches |= {f"chunk {tokens}": [(tokens, 0)] for tokens in load.chunks}
    most, size = max(load.pages), load.page_size
    used = max(sum(-(-(n + before) // size) for n, before in rows) for rows in batches.values())
    sizes: dict[str, Any] = {"num_pages": used + 2 * most, "max_running": max([8, *(rows for rows, _ in load.decodes)])}
    sizes |= {"max_context": max(n + before for rows in batches.values() for n, before in rows)}
    loaded = random_model(SHAPES[name], load.dtype, torch.device(device))
    page_bytes = loaded.model.kv_spec().bytes_per_page(size)
    options: dict[str, Any] = {"page_size": size, "host_kv_bytes": 2 * most * page_bytes, "device": device, **sizes}
    worker = start_worker(EngineConfig(**options), loaded)
    try:
        mover = Mover(worker, used, most)
        found |= {"page_bytes": page_bytes, "page_tokens": size, "alone": [], "beside": {}}
        for count, direction, scattered in itertools.product(load.pages, DIRECTIONS, (False, True)):
            found["alone"].append(mover.alone(count, direction, scattered, load.seconds))
        print("\n".join(f"alone: {one}" for one in found["alone"][-6:]), flush=True)
        save(found)
        for title, rows in batches.items():
            found["beside"][title] = mover.beside(batch(rows, worker.spec), load)
            for line in lines(title, found["beside"][title]):
                print(line, flush=True)
            save(found)
    finally:
        worker.close()
    return found


def copy_rates(num_bytes: int, device: torch.device) -> dict[str, float]:
    """GB/s of copies between pinned memory and the device. `both` counts the bytes of both directions."""
    pinned = device.type == "cuda"
    hosts = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    devices = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    if not pinned:
        return {"cpu": num_bytes / _seconds(lambda: devices[0].copy_(hosts[0])) / 1e9}
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def crossing(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], object]:
        def cross() -> None:
            for (target, source), stream in zip(pairs, streams, strict=False):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return cross

    out, into = (hosts[0], devices[0]), (devices[1], hosts[1])
    found = {"out": [out], "in": [into], "both": [out, into]}
    return {name: len(pairs) * num_bytes / _seconds(crossing(pairs)) / 1e9 for name, pairs in found.items()}


def _seconds(act: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def batch(rows: Sequence[tuple[int, int]], spec: WorkerSpec) -> ForwardBatch:
    """A forward of rows of (query tokens, KV entries before them), each with pages of its own, from page 0 on."""
    size = spec.page_size
    counts = [-(-(tokens + before) // size) for tokens, before in rows]
    first = np.cumsum([0, *counts])
    own = [np.arange(before, before + tokens) for tokens, before in rows]
    positions = np.concatenate(own).astype(np.int32)
    q_indptr = np.cumsum([0, *(tokens for tokens, _ in rows)]).astype(np.int32)
    return ForwardBatch(
        token_ids=((positions.astype(np.int64) * 31 + 7) % spec.vocab_size).astype(np.int32),
        positions=positions,
        write_slots=np.concatenate([page * size + one for page, one in zip(first, own, strict=False)]).astype(np.int32),
        q_indptr=q_indptr,
        kv_indptr=first.astype(np.int32),
        kv_page_ids=np.arange(first[-1], dtype=np.int32),
        kv_lens=np.array([tokens + before for tokens, before in rows], np.int32),
        output_tokens=q_indptr[1:] - 1,
    )


class Mover:
    """Runs steps that move pages which no forward uses: device pages from `first` on, `most` in each direction."""

    def __init__(self, worker: TorchWorker, first: int, most: int):
        self._worker = worker
        self._ids = itertools.count(1)
        order = np.random.default_rng(0).permutation(most).astype(np.int32)
        numbers = np.arange(most, dtype=np.int32)
        self._hosts = {False: numbers, True: order}
        self._devices = first + order
        self._most = most

    def moves(self, count: int, direction: str, scattered: bool = False) -> dict[str, I32]:
        """Fields of a step that moves so many pages; the host's are scattered or follow each other."""
        outs, ins = {"out": (count, 0), "in": (0, count), "both": (count // 2, count - count // 2)}[direction]
        hosts = self._hosts[scattered] if scattered else np.sort(self._hosts[True])
        out = np.stack([self._devices[:outs], hosts[:outs]], axis=1)
        into = np.stack([self._most + hosts[:ins], self._most + self._devices[:ins]], axis=1)
        return {"swap_outs": out, "swap_ins": into}

    def alone(self, count: int, direction: str, scattered: bool, seconds: float) -> dict[str, Any]:
        """Time and rate of steps that only move pages. `both` counts the bytes of both directions."""
        fields = self.moves(count, direction, scattered)
        took_s = self._step_s(fields, seconds)
        rate = count * self._worker.spec.bytes_per_page / took_s / 1e9
        return {"pages": count, "direction": direction, "scattered": scattered, "ms": 1000 * took_s, "gb_s": rate}

    def beside(self, forward: ForwardBatch, load: LinkLoad) -> dict[str, Any]:
        """Times of steps with a forward and pages, and with how many pages a step is `HIDDEN_SHARE` longer."""
        links = {(count, way): self._step_s(self.moves(count, way), 0.0) for count in load.pages for way in DIRECTIONS}
        self._step_s({"forward": forward}, 0.0)
        found: dict[str, Any] = {"forward_ms": 1000 * self._step_s({"forward": forward}, load.seconds)}
        for direction in DIRECTIONS:
            points = []
            for count in load.pages:
                moves = self.moves(count, direction)
                without_s = self._step_s({"forward": forward}, load.seconds)
                with_s = self._step_s({"forward": forward, **moves}, load.seconds)
                points.append(Point(count, 1000 * without_s, 1000 * with_s, 1000 * links[count, direction]))
            pages = free_pages(points)
            tokens = None if pages is None else pages * load.page_size
            found[direction] = {"points": [p._asdict() for p in points], "free_pages": pages, "free_tokens": tokens}
        return found

    def _step_s(self, fields: Mapping[str, Any], seconds: float) -> float:
        """Seconds per step of a row of them, the least of `REPEATS`."""
        began = time.perf_counter()
        self._row(fields, WARM_UP_STEPS)
        once_s = (time.perf_counter() - began) / WARM_UP_STEPS
        count = max(WARM_UP_STEPS, min(64, round(seconds / REPEATS / max(once_s, 1e-6))))
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            self._row(fields, count)
            times.append((time.perf_counter() - began) / count)
        return min(times)

    def _row(self, fields: Mapping[str, Any], count: int) -> None:
        """Launch so many steps, each while the one before runs, and wait until the link is idle."""
        running: deque[StepHandle] = deque()
        for _ in range(count):
            running.append(self._launch(fields))
            if len(running) > 1:
                running.popleft().wait()
        running.append(self._launch(self.moves(1, "out")))  # without a forward: it waits for the link
        for handle in running:
            handle.wait()

    def _launch(self, fields: Mapping[str, Any]) -> StepHandle:
        handle = self._worker.launch(Step(next(self._ids), **fields))
        self._worker.bind(handle, LateInputs())
        return handle


class Point(NamedTuple):
    """Milliseconds per step."""

    pages: int
    forward_ms: float
    """Without pages, measured beside it."""
    step_ms: float
    link_ms: float
    """Of steps that only move them."""


def free_pages(points: Sequence[Point]) -> float | None:
    """How many pages lengthen a step by `HIDDEN_SHARE`: between the last number that lengthens it less and the next.

    None if even the most do not.
    """
    before = (0.0, 0.0)
    for point in points:
        added = point.step_ms / point.forward_ms - 1
        if added > HIDDEN_SHARE:
            pages, least = before
            share = (HIDDEN_SHARE - least) / (added - least)
            return round(pages + share * (point.pages - pages), 1)
        before = (float(point.pages), max(0.0, added))
    return None


def lines(title: str, found: Mapping[str, Any]) -> list[str]:
    """The measurements beside one forward, as text."""
    texts = [f"beside {title}, {found['forward_ms']:.2f} ms"]
    for direction in DIRECTIONS:
        one = found[direction]
        texts.append(f"  {direction}: {HIDDEN_SHARE:.0%} longer with {one['free_pages']} pages")
        texts += [
            f"    {p.pages:4d} pages: {p.step_ms:8.2f} ms, forward {p.forward_ms:8.2f}, link {p.link_ms:8.2f}"
            for p in (Point(**point) for point in one["points"])
        ]
    return texts
