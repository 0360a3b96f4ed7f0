"""What runs on streams of its own comes after what it needs, and before what needs it.

Streams are stand-ins (see `streams`); tensors lie on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.worker.streams import Streams, streams
from weft.abi.errors import ConfigError, WeftError
from weft.worker import kv_store, transfer
from weft.worker.graphs_cuda import MIN_FREE_BYTES, CudaGraphs


@pytest.fixture
def device() -> Iterator[Streams]:
    with streams() as found:
        yield found


def test_results_leave_on_a_stream_of_their_own(device: Streams, monkeypatch: pytest.MonkeyPatch):
    host = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: host(*a, **k))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append((tensor, stream)))
    kept: list[Any] = []
    beside = device.make()
    tokens = torch.tensor([5, 7])
    real = torch.cat

    def cat(parts: Any) -> Any:
        device.note("cat")
        return real(parts)

    monkeypatch.setattr(torch, "cat", cat)
    readback = transfer.Readback({"tokens": tokens}, torch.device("cuda"), beside)
    assert readback.done()
    assert readback.arrays()["tokens"].tolist() == [5, 7]
    assert beside.past == {0}  # the copy comes after the results
    assert device.current.past == {0}  # and nothing waits for the copy
    ((_, stream),) = kept
    assert stream is beside


def test_a_step_without_results_is_waited_for(device: Streams):
    beside = device.make()
    device.note("a forward")
    readback = transfer.Readback({}, torch.device("cuda"), beside)
    assert readback._event is not None
    assert readback._event.past == {0}
    assert readback.arrays() == {}


def test_pinned_pages_are_pinned_as_many_as_there_are_and_given_up(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, int]] = []
    register = SimpleNamespace(
        cudaHostRegister=lambda place, size, flags: calls.append(("pin", size)) or result[0],
        cudaHostUnregister=lambda place: calls.append(("unpin", place)) or 0,
    )
    result = [0]

    def check(found: int) -> None:
        if found:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: register)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    pool = kv_store._HostPool(3, 40, pinned=True)
    assert pool.pages.shape == (3, 40)
    assert not pool.pages.any()
    pool.close()
    pool.close()
    assert calls == [("pin", 120), ("unpin", pool.pages.data_ptr())]
    result[0] = 2
    with pytest.raises(ConfigError, match=r"no 0.00 GiB of pinned memory for 3 host pages .out of memory"):
        kv_store._HostPool(3, 40, pinned=True)


class FakeGraph:
    """Notes what it is told."""

    def __init__(self, log: list[str]):
        self._log = log

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self._log.append(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> None:
        self._log.append("end")
        if "broken" in self._log:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self._log.append("replay")


@pytest.fixture
def log(device: Streams, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (MIN_FREE_BYTES, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(said))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("empty cache"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    end = lambda device, pool: said.append(f"end allocation of {pool} on {device}")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    return said


def test_a_capture(log: list[str]):
    graph = CudaGraphs().capture(lambda: log.append("body"))
    graph.replay()
    assert log == ["begin pool thread_local", "body", "end", "replay"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_capture_ends_whatever_its_body_does(log: list[str], broken: bool):
    def body() -> None:
        if broken:
            log.append("broken")
        raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        CudaGraphs().capture(body)
    assert log[-1] == ("end allocation of pool on 3" if broken else "end")


def test_a_capture_that_cannot_end_leaves_the_allocator_as_it_was(log: list[str]):
    with pytest.raises(RuntimeError, match="was invalidated"):
        CudaGraphs().capture(lambda: log.append("broken"))
    assert log[-2:] == ["end", "end allocation of pool on 3"]


def test_memory_that_torch_keeps_is_no_reason_not_to_capture(log: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (MIN_FREE_BYTES if "empty cache" in log else 0, 1))
    CudaGraphs().capture(lambda: log.append("body"))
    assert log == ["empty cache", "begin pool thread_local", "body", "end"]


def test_no_capture_where_memory_is_short(log: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (MIN_FREE_BYTES - 1, 1))
    with pytest.raises(WeftError, match="255 MiB of device memory are free, 256 are needed"):
        CudaGraphs().capture(lambda: log.append("body"))
    assert log == ["empty cache"]
