"""The link of a CUDA device on streams that are stand-ins (see `streams`): order, lifetimes, how much is launched.

What is launched is done at once, so the tensors hold what they would if the device did everything in the order of
launches. The device may choose any other order that the streams and events leave it. It comes to the same if whatever
two launches touch, and one of them writes, is touched by one before the other in every order: that is what `Watch`
checks, for each host page, page of a buffer, device page and upload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.worker.step_help import forward, ints, step
from tests.worker.streams import Streams, streams
from weft.core.step import ForwardBatch
from weft.kernels import dispatch, reference
from weft.kernels.base import MovePages
from weft.models.base import KVSpec, LayerKV
from weft.worker import host_link
from weft.worker.host_link import CudaLink
from weft.worker.kv_store import KVStore

PAGE, NUM_PAGES = 8, 12
VIEWS = {"slice", "split", "split_with_sizes", "view", "alias", "detach", "lift_fresh", "unbind", "contiguous"}
Cell = tuple[object, int]
"""A piece of memory: of a pool, a page."""


class Watch(TorchDispatchMode):
    """Notes what the device is told to do between pools, and which pages that reads and writes."""

    def __init__(self, device: Streams):
        super().__init__()
        self.device = device
        self.layers: list[Tensor] = []
        self.touched: list[tuple[int, set[Cell], set[Cell]]] = []
        """(number, what it reads, what it writes)"""
        self.kept: list[Tensor] = []
        """All that was uploaded: two at one address would look like one."""
        self.recorded: set[tuple[object, str]] = set()
        """(memory, the stream for which the allocator keeps it)"""

    def note(self, what: str, reads: Iterable[Cell] = (), writes: Iterable[Cell] = ()) -> int:
        number = self.device.note(what)
        self.touched.append((number, set(reads), set(writes)))
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        out = func(*args, **kwargs or {})
        if name == "copy_":
            self.note(name, self.rows(args[1]), self.rows(args[0]))
        elif name == "empty":
            self.note(name, (), self.rows(out))
        elif name == "arange":
            self.note(name, (), [(memory(out), 0)])
        else:
            assert name in VIEWS
        return out

    def rows(self, tensor: Tensor) -> Iterator[Cell]:
        first = tensor.storage_offset() // tensor.stride(0)
        return ((memory(tensor), first + row) for row in range(len(tensor)))

    def pages(self, pool: Sequence[Tensor], pages: Tensor) -> Iterator[Cell]:
        name: object = "device" if memory(pool[0]) == memory(self.layers[0]) else memory(pool[0])
        return ((name, page) for page in pages.tolist())

    def upload(self, array: np.ndarray, device: torch.device, dtype: Any = None) -> Tensor:
        sent = torch.from_numpy(np.array(array, dtype))
        self.kept.append(sent)
        self.note("upload", (), [(memory(sent), 0)])
        return sent

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.recorded.add((memory(tensor), stream.name))

    def prepare_move(self, source: Sequence[Tensor], destination: Sequence[Tensor]) -> MovePages:
        real = reference.prepare_move(source, destination)

        def move(source_pages: Tensor, destination_pages: Tensor) -> None:
            indices = [(memory(pages), 0) for pages in (source_pages, destination_pages)]
            reads, writes = self.pages(source, source_pages), self.pages(destination, destination_pages)
            self.note("move", [*indices, *reads], writes)
            with torch.utils._python_dispatch._disable_current_modes():
                real(source_pages, destination_pages)

        return move

    def copy_pages(self, kv: Tensor, source: Tensor, destination: Tensor) -> None:
        if kv is self.layers[0]:
            pool = [kv]
            self.note("page copies", self.pages(pool, source), self.pages(pool, destination))
        with torch.utils._python_dispatch._disable_current_modes():
            reference.copy_pages(kv, source, destination)

    def forward(self, batch: ForwardBatch, value: float) -> None:
        """Reads what a step's forward reads, and fills the pages it writes with `value`."""
        written = sorted(set((batch.write_slots // PAGE).tolist()))
        cells = [[("device", int(page)) for page in pages] for pages in (batch.kv_page_ids, written)]
        self.note("forward", *cells)
        with torch.utils._python_dispatch._disable_current_modes():
            for layer in self.layers:
                layer[written] = value

    def check(self) -> None:
        """Every two launches that touch the same piece, which one of them writes, have an order."""
        readers: dict[Cell, list[int]] = {}
        writers: dict[Cell, list[int]] = {}
        for number, reads, writes in self.touched:
            what, stream, past = self.device.done[number]
            earlier = [n for cell in reads | writes for n in writers.get(cell, ())]
            earlier += [n for cell in writes for n in readers.get(cell, ())]
            late = [self.device.done[n][:2] for n in earlier if n not in past]
            assert not late, f"{what} on {stream} may come before {late}"
            for cells, kind in ((reads, readers), (writes, writers)):
                for cell in cells:
                    kind.setdefault(cell, []).append(number)
            if stream != "default":
                uploads = {memory(tensor) for tensor in self.kept}
                assert all((name, stream) in self.recorded for name, _ in reads if name in uploads)


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Rig:
    """A store whose pages cross as they do on a CUDA device, and what is noted of it."""

    def __init__(self, patch: pytest.MonkeyPatch, device: Streams, layers: int = 2, part_pages: int = 2):
        spec = KVSpec((LayerKV(1, 4),) * layers, torch.float32)
        patch.setattr(host_link, "STAGING_BYTES", part_pages * spec.bytes_per_page(PAGE))
        self.device, self.watch = device, Watch(device)
        device.is_done = lambda: False
        patch.setattr(host_link, "upload", self.watch.upload)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.watch.record_stream(tensor, stream))
        kernels = dispatch.select(prefer={"*": "reference"})._replace(
            prepare_move=self.watch.prepare_move, copy_pages=self.watch.copy_pages
        )
        self.store = KVStore(spec, kernels, PAGE, NUM_PAGES, NUM_PAGES, torch.device("cpu"))
        self.watch.layers = self.store.layers
        pools = [layer.view(NUM_PAGES, -1).view(torch.uint8) for layer in self.store.layers]
        self.link = CudaLink(pools, self.store._host.pages, kernels.prepare_move)
        self.store._link = self.link

    def move(self, **fields: Any) -> list[int]:
        """Numbers of what a step's movements launch."""
        before = len(self.device.done)
        with self.watch:
            self.store.move(step(**fields))
        return list(range(before, len(self.device.done)))

    def copies(self, numbers: Iterable[int]) -> list[int]:
        """Those of them that cross the link."""
        return [number for number in numbers if self.device.done[number][0] == "copy_"]


@pytest.fixture
def device() -> Iterator[Streams]:
    with streams() as found:
        yield found


@pytest.fixture
def rig(device: Streams, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch, device)


@pytest.mark.parametrize("answers", ["never done", "always done", "either"])
@pytest.mark.parametrize("seed", range(4))
def test_every_order_that_the_streams_allow_comes_to_the_same(rig: Rig, answers: str, seed: int):
    rng = np.random.default_rng(seed)
    rig.device.is_done = {
        "never done": lambda: False,
        "always done": lambda: True,
        "either": lambda: bool(rng.integers(2)),
    }[answers]
    on_device, on_host = np.zeros(NUM_PAGES), np.zeros(NUM_PAGES)
    for number in range(1, 40):
        count = rng.integers(0, NUM_PAGES + 1, 3)
        outs, copies, ins = (np.stack((rng.permutation(12), rng.permutation(12)), 1)[:n] for n in count)
        copies = copies[~np.isin(copies[:, 1], copies[:, 0])]
        pages = rng.permutation(NUM_PAGES)[:3].tolist()
        batch = forward([([7], 2 * PAGE, pages)])
        fields = {"swap_outs": ints(outs), "page_copies": ints(copies), "swap_ins": ints(ins)}
        rig.move(**fields, forward=batch)
        on_host[outs[:, 1]] = on_device[outs[:, 0]]
        on_device[copies[:, 1]] = on_device[copies[:, 0]]
        on_device[ins[:, 1]] = on_host[ins[:, 0]]
        rig.watch.forward(batch, number)
        on_device[pages[2]] = number
    rig.store.wait_for_link()
    assert set(range(len(rig.device.done))) <= rig.device.current.past
    rig.watch.check()
    for layer in rig.store.layers:
        assert (layer.flatten(1).numpy() == on_device[:, None]).all()
    assert (rig.store._host.pages.view(torch.float32).numpy() == on_host[:, None]).all()


def test_both_directions_work_at_a_time(rig: Rig):
    for _ in range(2):
        numbers = rig.move(swap_outs=ints([[1, 2], [3, 3]]), swap_ins=ints([[5, 3], [6, 1]]))
        copies = [rig.device.done[number] for number in rig.copies(numbers)]
        assert len({stream for _, stream, _ in copies}) == 2
        assert not any(past.intersection(rig.copies(numbers)) for _, stream, past in copies)


@pytest.mark.parametrize("is_done", [False, True])
def test_a_host_page_is_brought_in_after_it_has_left(rig: Rig, is_done: bool):
    rig.move(swap_outs=ints([[1, 2]]))
    left = rig.copies(rig.move(swap_outs=ints([[3, 4]])))[-1]
    later = rig.copies(rig.move(swap_outs=ints([[5, 7]])))[-1]
    rig.device.is_done = lambda: is_done
    (back,) = rig.copies(rig.move(swap_ins=ints([[4, 6]])))
    assert left in rig.device.done[back][2]
    assert (later in rig.device.done[back][2]) == is_done  # known to be done, not waited for
    assert len(rig.link._leaving) == (0 if is_done else 3)


def test_what_came_in_can_leave_at_once(rig: Rig):
    """Also where nothing has waited for it: its pages are read, and its host pages written, after it is in place."""
    with rig.watch:
        rig.link.swap_in(ints([1, 2]), ints([3, 4]))
        rig.link.swap_out(ints([3, 4]), ints([2, 1]))
    rig.watch.check()


def test_what_leaves_holds_up_nothing(rig: Rig):
    last = rig.move(swap_outs=ints([[1, 2], [3, 4], [5, 6]]), forward=forward([([7], 8, [3, 5])]))[-1]
    assert rig.device.done[last][1] == rig.link._outward.name
    assert last not in rig.device.current.past


def test_a_forward_waits_for_the_link_only_where_it_needs_it(rig: Rig):
    def arrives(**fields: Any) -> bool:
        """Whether the current stream waits for what a step brings in."""
        return rig.move(swap_ins=ints([[1, 2], [2, 5]]), **fields)[-1] in rig.device.current.past

    assert not arrives(forward=forward([([7], 8, [3, 4])]))
    assert rig.device.done[-1][:2] == ("move", rig.link._inward.name)
    last = len(rig.device.done) - 1
    rig.move(forward=forward([([7], 8, [2, 5])]))  # the next step
    assert last in rig.device.current.past
    assert arrives(forward=forward([([7], 8, [3, 5])]))  # reads and writes an arriving page
    assert not arrives(forward=forward([([7], 8, [3, 4])]))
    assert arrives(forward=forward([([7], 8, [3, 4])], write_slots=ints([2 * PAGE])))


def test_a_step_without_a_forward_waits_for_what_it_moves_out(rig: Rig):
    last = rig.move(swap_outs=ints([[1, 2]]))[-1]
    assert last not in rig.device.current.past
    rig.store.wait_for_link()
    assert last in rig.device.current.past


def test_closing_waits_for_both_directions(rig: Rig):
    numbers = rig.move(swap_outs=ints([[1, 2]]), swap_ins=ints([[3, 4]]))
    assert not rig.device.seen
    rig.link.close()
    assert set(numbers) <= rig.device.seen


@pytest.mark.parametrize("layers", [1, 32])
@pytest.mark.parametrize(
    ("hosts", "copies"),
    [([3, 4, 5, 6, 7, 8], 2), ([8, 7, 6, 5, 4, 3], 2), ([0, 2, 4, 6, 8, 10], 6)],
    ids=["in a run", "in a run, reversed", "scattered"],
)
def test_launches_do_not_grow_with_layers(
    device: Streams, monkeypatch: pytest.MonkeyPatch, hosts: list[int], copies: int, layers: int
):
    """In each direction an upload, a launch for each part, and a copy for each run of host pages in a part."""
    rig = Rig(monkeypatch, device, layers, part_pages=4)
    pairs = np.stack((ints(range(6)), ints(hosts)), 1)
    for fields in ({"swap_outs": pairs}, {"swap_ins": pairs[:, ::-1]}):
        for _ in range(host_link.NUM_STAGING):  # buffers are made at their first use
            rig.move(**fields)
        launched = Counter(device.done[number][0] for number in rig.move(**fields))
        assert launched == {"upload": 1, "move": 2, "copy_": copies}
