"""Pages between device and host: they come back bit for bit, in the order of steps, however slow the link is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.worker.step_help import dist, forward, greedy, ints, run, set_slots, step
from tests.worker.test_executor import PROMPT, logprobs_by_id
from weft.abi.errors import ConfigError
from weft.core.step import LateInputs
from weft.kernels import dispatch
from weft.models.base import KVSpec, LayerKV
from weft.worker import kv_store
from weft.worker.executor import TorchWorker
from weft.worker.host_link import LinkThrottle
from weft.worker.kv_store import KVStore

PAGE, HELD = 8, [3, 4]
SPEC = KVSpec((LayerKV(2, 4), LayerKV(1, 6)), torch.float64)
BYTES_PER_PAGE = SPEC.bytes_per_page(PAGE)


class Clock:
    """Time that passes only where something sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def throttle(self, bytes_per_s: float) -> LinkThrottle:
        return LinkThrottle(bytes_per_s, lambda: self.now_s, self.sleep)


def make_store(throttle: LinkThrottle | None = None) -> KVStore:
    return KVStore(SPEC, dispatch.select("cpu", torch.float64), PAGE, 12, 7, torch.device("cpu"), throttle)


def test_a_link_carries_one_transfer_after_the_other():
    clock = Clock()
    throttle = clock.throttle(10.0)
    throttle.wait()
    assert clock.slept == []
    throttle.carry(20)
    throttle.carry(10)
    assert throttle.remaining_s() == pytest.approx(3.0)
    clock.now_s += 1.0
    throttle.wait()
    assert clock.slept == [pytest.approx(2.0)]
    clock.now_s += 50.0  # an idle link saves nothing up
    throttle.carry(10)
    assert throttle.remaining_s() == pytest.approx(1.0)


def test_the_link_works_beside_a_forward_that_needs_nothing_of_it():
    clock = Clock()
    store = make_store(clock.throttle(BYTES_PER_PAGE))  # one page per second
    beside = forward([([7], 8, HELD)])
    store.move(step(swap_outs=ints([[0, 0], [1, 1]]), swap_ins=ints([[5, 2]]), forward=beside))
    assert clock.slept == []
    assert store.remaining_s() == pytest.approx(3.0)
    clock.now_s += 1.0  # the forward
    store.move(step(forward=beside))
    assert clock.slept == [pytest.approx(2.0)]


@pytest.mark.parametrize("fields", [{}, {"write_slots": ints([2 * PAGE])}], ids=["reads", "writes"])
def test_a_forward_waits_for_what_its_own_step_brings_in(fields: dict[str, np.ndarray]):
    clock = Clock()
    store = make_store(clock.throttle(BYTES_PER_PAGE))
    touching = forward([([7], 8, HELD if fields else [2, 4])], **fields)
    store.move(step(swap_ins=ints([[5, 2]]), forward=touching))
    assert clock.slept == [pytest.approx(1.0)]


def test_a_throttle_is_refused_where_it_means_nothing():
    with pytest.raises(ConfigError, match=r"host_link_gbs .* the device is meta: unset it"):
        KVStore(SPEC, dispatch.select("cpu"), PAGE, 4, 0, torch.device("meta"), Clock().throttle(1.0))


def test_a_host_pool_that_there_is_no_memory_for_names_the_setting(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("not enough memory: you tried to allocate\nand more")

    monkeypatch.setattr(kv_store.huge_pages, "empty", refuse)
    with pytest.raises(ConfigError, match=r"for 7 host pages \(not enough .*\); lower host_kv_bytes, or set it to 0"):
        make_store()


def fill(worker: TorchWorker, tokens: list[int], pages: list[int]) -> None:
    run(worker, step(forward=forward([(tokens, 0, pages)], output_tokens=ints([]))))


def last(worker: TorchWorker, tokens: list[int], pages: list[int], **moves: np.ndarray) -> np.ndarray:
    """The distribution after `tokens`, of which all but the last have their KV in `pages`."""
    batch = forward([(tokens[-1:], len(tokens) - 1, pages)])
    return logprobs_by_id(run(worker, step(forward=batch, sampling=dist([0], worker.spec.vocab_size), **moves)), 0)


TOKENS = PROMPT[:13]
"""One whole page, and a second with five of eight tokens, the last of which is computed from the others' KV."""


@pytest.fixture
def expected(make_worker: Callable[..., TorchWorker]) -> np.ndarray:
    worker = make_worker()
    fill(worker, TOKENS[:-1], [7, 3])
    return last(worker, TOKENS, [7, 3])


def test_pages_that_went_out_come_back_bit_for_bit(worker: TorchWorker, expected: np.ndarray):
    fill(worker, TOKENS[:-1], [7, 3])
    noise = forward([(PROMPT[4:20], 0, [7, 3])], output_tokens=ints([]))
    run(worker, step(swap_outs=ints([[7, 4], [3, 1]]), forward=noise))  # the same step overwrites them
    run(worker, step(swap_ins=ints([[4, 20], [1, 21]]), forward=noise))
    np.testing.assert_array_equal(last(worker, TOKENS, [20, 21]), expected)
    # A host copy stays valid after it was read, and serves a step that reads what it brings in.
    found = last(worker, TOKENS, [30, 31], swap_ins=ints([[4, 30], [1, 31]]))
    np.testing.assert_array_equal(found, expected)


def test_a_page_goes_out_and_comes_back_in_one_step(worker: TorchWorker, expected: np.ndarray):
    fill(worker, TOKENS[:-1], [7, 3])
    fill(worker, PROMPT[:8], [9])
    # Between the two, its place is taken by a copy of another page; then it is as it was.
    moves = {"swap_outs": ints([[3, 5]]), "page_copies": ints([[9, 3]]), "swap_ins": ints([[5, 3]])}
    np.testing.assert_array_equal(last(worker, TOKENS, [7, 3], **moves), expected)


def test_part_of_a_page_that_came_back_is_copied(worker: TorchWorker, expected: np.ndarray):
    fill(worker, TOKENS[:-1], [7, 3])
    run(worker, step(swap_outs=ints([[3, 2]])))
    fill(worker, PROMPT[:8], [3])
    run(worker, step(swap_ins=ints([[2, 12]])))
    copies = ints([[12 * PAGE + i, 22 * PAGE + i] for i in range(4)])
    np.testing.assert_array_equal(last(worker, TOKENS, [7, 22], token_copies=copies), expected)


def generate(worker: TorchWorker, swapped: bool) -> list[int]:
    """Greedy tokens of one sequence, which leaves the device and comes back elsewhere after every third token."""
    pages, tokens, free = [7, 3, 12], list(PROMPT[:9]), [30, 31, 32]
    fill(worker, tokens[:-1], pages)
    run(worker, step(slot_sets=set_slots(0)))
    for index in range(9):
        if swapped and index % 3 == 2:
            out = step(swap_outs=ints([[page, i] for i, page in enumerate(pages)]))
            noise = forward([(PROMPT[:16], 0, pages)], output_tokens=ints([]))
            back = step(swap_ins=ints([[i, page] for i, page in enumerate(free)]), forward=noise)
            handles = [worker.launch(one) for one in (out, back)]  # both in flight
            for handle in handles:
                worker.bind(handle, LateInputs())
            pages, free = free, pages
        batch = forward([(tokens[-1:], len(tokens) - 1, pages)])
        result = run(worker, step(forward=batch, sampling=greedy([0], [0])))
        tokens.append(int(result.tokens[0]))
    return tokens[9:]


def test_a_slow_link_changes_no_token(make_worker: Callable[..., TorchWorker]):
    expected = generate(make_worker(), swapped=False)
    assert generate(make_worker(), swapped=True) == expected
    clock = Clock()
    slow = make_worker(throttle=clock.throttle(1.0))
    assert generate(slow, swapped=True) == expected
    # Each time, three pages out, for which a step without a forward waits; then three in, before the next step.
    per_three = 3.0 * slow.spec.bytes_per_page
    assert clock.slept == [pytest.approx(per_three)] * 6


def test_the_time_of_the_link_is_that_of_the_step_that_moves(make_worker: Callable[..., TorchWorker]):
    clock = Clock()
    worker = make_worker(throttle=clock.throttle(1e-3))
    beside = forward([(PROMPT[:5], 0, [7])], output_tokens=ints([]))
    link_s = worker.spec.bytes_per_page / 1e-3
    first = worker.launch(step(swap_ins=ints([[0, 2]]), forward=beside))
    assert first.wait().device_s > link_s  # of another clock, and far more than a forward takes
    assert clock.slept == []
    assert run(worker, step(forward=beside)).device_s < link_s
    assert clock.slept == [pytest.approx(link_s)]
