"""A worker in this process: a thread that carries out steps in the order they were launched.

Owns the thread, the queue of launched steps, and their failures. What a step does is in `runner`. On a GPU the thread
only issues work; results come back with one asynchronous copy, and `wait` waits for that copy.

A step whose pages are still on the link when its tokens are known is complete; the next step waits for them before it
begins. With a throttled link `device_s` is the time until the link is idle. On a GPU such a wait is in the time of no
step, because the host cannot know it without waiting itself; a step without a forward has all of its link's time.

A step that fails takes the worker with it: what it wrote is unknown, so every later step fails as well, naming it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import NamedTuple

import torch

from weft.abi.errors import WeftError
from weft.core.protocols import WorkerSpec
from weft.core.step import LateInputs, Step, StepHandle, StepResult
from weft.kernels import dispatch
from weft.models.base import LanguageModel
from weft.worker.checks import check_step
from weft.worker.errors import StepError
from weft.worker.graphs import GraphCounts, GraphOptions
from weft.worker.host_link import LinkThrottle
from weft.worker.kv_store import KVStore
from weft.worker.results import step_result
from weft.worker.runner import StepRunner
from weft.worker.transfer import Readback


class PoolSizes(NamedTuple):
    """How much of everything a worker has; see `WorkerSpec`."""

    page_size: int
    num_device_pages: int
    num_host_pages: int
    num_slots: int
    num_embed_slots: int


class TorchWorker:
    """`core.protocols.Worker` on torch. `launch`, `bind` and `close` belong to one thread; handles to any."""

    def __init__(
        self,
        model: LanguageModel,
        sizes: PoolSizes,
        *,
        max_context: int | None = None,
        device: torch.device | str = "cpu",
        threads: int | None = None,
        graphs: GraphOptions | None = None,
        throttle: LinkThrottle | None = None,
    ):
        """Allocates the pools. `model` is on `device`.

        `threads` are the CPU threads of each kernel; None leaves torch's choice. With `graphs`, decode passes are
        captured; the model's attention must follow `AttentionBatch.tables`. `throttle` slows the link to the host pool
        down, on a CPU. Raises `ConfigError` for a host pool that the system does not give.
        """
        self._device = torch.device(device)
        spec = model.spec
        kv_spec = model.kv_spec()
        self._spec = WorkerSpec(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            max_context=max_context or spec.max_position,
            bytes_per_page=kv_spec.bytes_per_page(sizes.page_size),
            device=self._device.type,
            dtype=str(spec.dtype).removeprefix("torch."),
            quantization=spec.quantization or ", ".join(spec.block_types) or None,
            has_windows=any(window is not None for window in spec.sliding_windows),
            **sizes._asdict(),
        )
        kernels = dispatch.select(self._device, kv_spec.dtype)
        pages = (sizes.page_size, sizes.num_device_pages, sizes.num_host_pages)
        with torch.inference_mode():
            kv = KVStore(kv_spec, kernels, *pages, self._device, throttle)
            runner = StepRunner(model, kv, self._spec, self._device, threads or torch.get_num_threads())
            if graphs is not None:
                runner.use_graphs(graphs, self._spec.max_context)
        self._graphs = runner.graphs
        self._queue: SimpleQueue[_Launched | None] = SimpleQueue()
        self._pending: list[_Launched] = []
        self._closed = False
        loop = _Loop(runner, kv, self._queue, self._device, threads)
        self._thread = threading.Thread(target=loop.run, name="weft-device", daemon=True)
        self._thread.start()

    @property
    def spec(self) -> WorkerSpec:
        """Sizes and shapes of the worker; they never change."""
        return self._spec

    @property
    def graph_counts(self) -> GraphCounts | None:
        """What became of passes; None: no graphs are used."""
        return None if self._graphs is None else self._graphs.counts

    def launch(self, step: Step) -> StepHandle:
        """Queue a step. Raises `StepError`, with nothing queued, for one that does not fit this worker."""
        if self._closed:
            raise StepError(f"step {step.step_id} was launched on a closed worker")
        check_step(step, self._spec)
        launched = _Launched(step)
        self._pending = [*(p for p in self._pending if not p.bound.is_set()), launched]
        self._queue.put(launched)
        return launched

    def bind(self, handle: StepHandle, late: LateInputs) -> None:
        """Release the sampling half of a launched step. Raises `StepError` if it was bound before."""
        if not isinstance(handle, _Launched):
            raise StepError(f"step {handle.step_id} was not launched on this worker")
        if handle.bound.is_set() and not self._closed:
            raise StepError(f"step {handle.step_id} was bound twice")
        handle.late = late
        handle.bound.set()

    def close(self) -> None:
        """Finish the steps that are bound, fail the others, and give back memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for launched in self._pending:
            launched.bound.set()
        self._queue.put(None)
        self._thread.join()
        self._pending = []
        self._graphs = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _Outcome(NamedTuple):
    """What the thread leaves behind; on a GPU it may still be on its way."""

    readback: Readback
    device_s: Callable[[], float]
    """Known once the readback is done."""


class _Launched:
    """A `StepHandle`. The thread calls `complete` or `fail` exactly once."""

    def __init__(self, step: Step):
        self.step = step
        self.late: LateInputs | None = None
        self.bound = threading.Event()
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._outcome: _Outcome | None = None
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    @property
    def step_id(self) -> int:
        """The step's id."""
        return self.step.step_id

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        is_settled, outcome = self._settled.is_set(), self._outcome  # which another thread's `wait` may drop
        return is_settled and (outcome is None or outcome.readback.done())

    def wait(self) -> StepResult:
        """Block until the step is complete. Raises what the worker raised."""
        self._settled.wait()
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._result is None and self._outcome is not None:
                try:
                    arrays = self._outcome.readback.arrays()
                except Exception as error:
                    self._error = error
                    raise
                self._result = step_result(self.step, arrays, self._outcome.device_s())
                self._outcome = None
        if self._result is None:
            raise AssertionError("a settled step has an outcome or an error")
        return self._result

    def complete(self, outcome: _Outcome) -> None:
        self._outcome = outcome
        self._settled.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._settled.set()


class _Loop:
    """The body of the device thread."""

    def __init__(
        self,
        runner: StepRunner,
        kv: KVStore,
        queue: SimpleQueue[_Launched | None],
        device: torch.device,
        threads: int | None,
    ):
        self._runner = runner
        self._kv = kv
        self._queue = queue
        self._device = device
        self._threads = threads
        self._results_stream: torch.cuda.Stream | None = None
        self._failure: WeftError | None = None

    def run(self) -> None:
        """Carry out steps until None arrives."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if self._device.type == "cuda":
            self._results_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(), self._stream():
            while (launched := self._queue.get()) is not None:
                try:
                    launched.complete(self._carry_out(launched))
                except Exception as error:
                    launched.fail(error)
                    if self._failure is None:
                        self._failure = _stopped(launched.step_id, error)
            self._kv.close()

    def _carry_out(self, launched: _Launched) -> _Outcome:
        if self._failure is not None:
            raise WeftError(str(self._failure)) from self._failure.__cause__
        # Outside of the time of this step: what is left of the previous one's transfers is in that one's.
        self._kv.settle()
        stopwatch = _GpuStopwatch() if self._device.type == "cuda" else _CpuStopwatch()
        step = launched.step
        halfway = self._runner.forward_half(step)
        late = LateInputs()
        if step.sampling is not None:
            stopwatch.pause()
            launched.bound.wait()
            stopwatch.resume()
            if launched.late is None:
                raise StepError(f"step {step.step_id} was not bound before the worker closed")
            late = launched.late
        found = self._runner.sampling_half(step, halfway, late)
        # Before the copy is issued, so that waiting for the copy waits for this mark as well: times are known only of
        # events that have happened. A step without results has no copy, and is waited for all the same.
        stopwatch.pause()
        link_s = self._kv.remaining_s()
        readback = Readback(found, self._device, self._results_stream)
        return _Outcome(readback, lambda: stopwatch.seconds() + link_s)

    def _stream(self) -> torch.cuda.StreamContext | nullcontext[None]:
        if self._device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(self._device))
        return torch.cuda.stream(stream)


def _stopped(step_id: int, error: BaseException) -> WeftError:
    failure = WeftError(f"the worker stopped when step {step_id} failed ({type(error).__name__}: {error}); restart it")
    failure.__cause__ = error
    return failure


class _CpuStopwatch:
    """Time between construction or `resume` and `pause`."""

    def __init__(self) -> None:
        self._total = 0.0
        self._start = time.perf_counter()

    def pause(self) -> None:
        """Stop counting."""
        self._total += time.perf_counter() - self._start

    def resume(self) -> None:
        """Count again."""
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """What was counted."""
        return self._total


class _GpuStopwatch:
    """Like `_CpuStopwatch`, in the time of the current stream."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []
        self.resume()

    def pause(self) -> None:
        """Stop counting."""
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        self._marks.append(mark)

    resume = pause

    def seconds(self) -> float:
        """What was counted; the stream must have passed the last mark."""
        spans = zip(self._marks[::2], self._marks[1::2], strict=True)
        return sum(float(a.elapsed_time(b)) for a, b in spans) / 1000
