"""What runs on streams of its own comes after what it needs, and before what needs it.

Streams are stand-ins (see `streams`); tensors lie on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.worker.step_help import forward, ints, step
from tests.worker.streams import Streams, streams
from weft.abi.errors import ConfigError, WeftError
from weft.kernels import dispatch
from weft.models.base import KVSpec, LayerKV
from weft.worker import host_link, kv_store, transfer
from weft.worker.graphs_cuda import MIN_FREE_BYTES, CudaGraphs
from weft.worker.host_link import CudaLink
from weft.worker.kv_store import KVStore

SPEC = KVSpec((LayerKV(1, 4), LayerKV(1, 4)), torch.float32)
PAGE = 8


@pytest.fixture
def device() -> Iterator[Streams]:
    with streams() as found:
        yield found


class Watch(TorchDispatchMode):
    """Notes each copy between tensors, each gathering and each scattering, with the memory it reads and writes."""

    def __init__(self, device: Streams, named: dict[str, torch.Tensor]):
        super().__init__()
        self._device = device
        self._named = named
        self.touched: list[tuple[str, int, str]] = []
        """(name, number, "r" or "w")"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in ("copy_", "cat", "index_select", "index_copy_"):
            number = self._device.note(name)
            writes = kwargs.get("out", args[0]) if name != "index_select" else None
            reads = {"copy_": args[1:2], "cat": tuple(args[0]) if name == "cat" else ()}
            reads |= {"index_select": args[:1], "index_copy_": args[3:4]}
            self._touch(number, "w", (writes,))
            self._touch(number, "r", reads[name])
        return out

    def _touch(self, number: int, how: str, tensors: Any) -> None:
        for tensor in tensors:
            for name, memory in self._named.items():
                if tensor is not None and _address(tensor) == _address(memory):
                    self.touched.append((name, number, how))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("seed", range(3))
def test_pages_cross_in_order(device: Streams, monkeypatch: pytest.MonkeyPatch, seed: int):
    """Whatever touches a buffer after something else that wrote it, or writes what something else read, comes after."""
    monkeypatch.setattr(host_link, "STAGING_BYTES", 2 * SPEC.bytes_per_page(PAGE))
    store, link = on_streams(monkeypatch)
    named = {"host": store._host.pages, "layer 0": store.layers[0], "layer 1": store.layers[1]}
    named |= {f"staging {i}": link._next_staging().buffer for i in range(host_link.NUM_STAGING)}
    rng = np.random.default_rng(seed)
    watch = Watch(device, named)
    with watch:
        for _ in range(6):
            pages_out, pages_in = (int(rng.integers(1, 13)) for _ in range(2))
            outs, ins = (np.stack((rng.permutation(12), rng.permutation(12)), 1) for _ in range(2))
            store.move(step(swap_outs=ints(outs[:pages_out]), swap_ins=ints(ins[:pages_in])))
    assert {where for _, where, _ in device.done} == {"default", "made"}
    crossing = {number for name, number, _ in watch.touched if name == "host"}
    assert {device.done[number][1] for number in crossing} == {"made"}
    for i, (name, number, how) in enumerate(watch.touched):
        for other, earlier, its in watch.touched[:i]:
            if name == other and earlier != number and "w" in (how, its):
                assert earlier in device.done[number][2], f"{device.done[number]} does not wait for {earlier} on {name}"
    # And what goes out holds up nothing: the default stream is not given anything that waits for it.
    with watch:
        store.move(step(swap_outs=ints([[1, 2], [3, 4]])))
    last = len(device.done) - 1
    assert device.done[last][1] == "made"
    assert last not in device.current.past


def on_streams(monkeypatch: pytest.MonkeyPatch) -> tuple[KVStore, CudaLink]:
    """A store whose pages cross as they do on a CUDA device."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    store = KVStore(SPEC, dispatch.select(prefer={"*": "reference"}), PAGE, 12, 12, torch.device("cpu"))
    link = CudaLink([layer.view(12, -1).view(torch.uint8) for layer in store.layers], store._host.pages)
    store._link = link
    return store, link


def test_a_forward_waits_for_the_link_only_where_it_needs_it(device: Streams, monkeypatch: pytest.MonkeyPatch):
    store, _ = on_streams(monkeypatch)
    ins = {"swap_ins": ints([[1, 2], [2, 5]])}
    watch = Watch(device, {f"layer {i}": layer for i, layer in enumerate(store.layers)})

    def arrives(**fields: Any) -> bool:
        """Whether the current stream waits for what the last step brought in."""
        store.move(step(**ins, **fields))
        return len(device.done) - 1 in device.current.past

    with watch:
        assert not arrives(forward=forward([([7], 8, [3, 4])]))
        assert device.done[-1][:2] == ("index_copy_", "made")
        last = len(device.done) - 1
        store.move(step(forward=forward([([7], 8, [2, 5])])))  # the next step
        assert last in device.current.past
        assert arrives(forward=forward([([7], 8, [3, 5])]))  # reads and writes an arriving page
        assert not arrives(forward=forward([([7], 8, [3, 4])]))
        assert arrives(forward=forward([([7], 8, [3, 4])], write_slots=ints([2 * PAGE])))
    # What arrives is spread after the current stream's work, which may read what the page held before.
    before = device.note("earlier work")
    with watch:
        store.move(step(**ins))
    assert before in device.done[-1][2]


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


def test_a_step_without_a_forward_waits_for_what_it_moves_out(device: Streams, monkeypatch: pytest.MonkeyPatch):
    store, _ = on_streams(monkeypatch)
    watch = Watch(device, {"host": store._host.pages})
    with watch:
        store.move(step(swap_outs=ints([[1, 2]])))
        last = len(device.done) - 1
        assert last not in device.current.past
        store.wait_for_link()
    assert last in device.current.past


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
