"""Waste of steps, worked by hand, and what the engine counts of it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.test_cost import TRUE, cost_model
from tests.engine.driver import Driver
from tests.engine.test_interception import SIZES, Clients, turn
from tests.sched.policies.snapshots import line
from tests.sched.stepping import Stepped
from weft.cache.candidates import FIRST_AWAITED
from weft.core import wire
from weft.core.cost.model import CostModel, StepShape, SwapModel
from weft.core.step import ForwardBatch, Step
from weft.sched.in_flight import InFlight
from weft.sched.policies import make_policy
from weft.sched.scheduler import Scheduler
from weft.sched.sequence import SequenceState
from weft.sched.waste_meter import StepKV, Waste, WasteMeter

PAGE = 16


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def step(num_out: int = 0, num_in: int = 0, shared: int = 0) -> Step:
    """A chunk of 100 tokens of a sequence with 250 then, beside a decoding sequence with 400. Both begin with `shared`
    pages."""
    forward = ForwardBatch(
        token_ids=np.zeros(101, np.int32),
        positions=np.zeros(101, np.int32),
        write_slots=np.zeros(101, np.int32),
        q_indptr=ints(0, 1, 101),
        kv_indptr=ints(0, 25, 41),
        kv_page_ids=np.array([*range(25), *range(shared), *range(25, 41 - shared)], np.int32),
        kv_lens=ints(400, 250),
        output_tokens=ints(0),
    )
    pairs = [np.zeros((count, 2), np.int32) for count in (num_out, num_in)]
    return Step(7, swap_outs=pairs[0], swap_ins=pairs[1], forward=forward)


def count(costs: CostModel | None, done: Step, flight: InFlight, device_s: float = 2.0) -> Waste:
    meter = WasteMeter(costs, PAGE)
    meter.launched(done, flight)
    assert meter.total == Waste()
    meter.finished(7, device_s)
    meter.finished(7, device_s)
    return meter.total


def test_the_four_causes_of_a_step_that_has_all_of_them() -> None:
    assert Waste._fields == ("preserve", "recompute", "swap", "stalled")
    kv = StepKV(intercepted=1000, computing=650, recomputing=250, moved=3 * PAGE)
    # 0.5 s of recomputation stall the 400 tokens of the other sequence, 0.25 s of swaps all 650.
    assert kv.waste(2.0, 0.5, 0.25) == (2000.0, 500.0, 96.0, 0.5 * 400 + 0.25 * 650)
    assert Waste(1, 2, 3, 4).plus(Waste(1, 1, 1, 1)) == (2, 3, 4, 5)


def test_a_step_without_recomputation_swaps_and_want_of_pages_wastes_nothing() -> None:
    flight = InFlight(7, intercepted_tokens=1000)
    assert count(cost_model(), step(), flight) == Waste()


def test_intercepted_kv_counts_while_something_waits_for_pages() -> None:
    flight = InFlight(7, waits_for_pages=True, intercepted_tokens=1000)
    assert count(cost_model(), step(), flight) == (2000.0, 0.0, 0.0, 0.0)


def test_what_recomputation_stalls_is_its_predicted_part_of_the_time() -> None:
    costs = cost_model()
    shape = StepShape.of(step().forward)
    assert (shape.decode_kv, shape.chunk_kv) == (400, 250)
    whole_s = costs.predict_forward_s(shape)
    part = (whole_s - costs.predict_forward_s(shape._replace(num_tokens=41))) / whole_s
    assert 0.2 < part < 0.9
    flight = InFlight(7, recomputed_tokens=60, recomputing_rows=[1])
    assert count(costs, step(), flight) == pytest.approx((0.0, 500.0, 0.0, part * 2.0 * 400))
    of_shared_pages = count(costs, step(shared=5), flight)
    assert of_shared_pages == pytest.approx((0.0, 500.0, 0.0, part * 2.0 * (400 - 5 * PAGE)))
    assert count(None, step(), flight) == (0.0, 500.0, 0.0, 0.0), "without a profile nothing is known of stalls"


def test_pages_that_move_are_waste_and_stall_what_they_lengthen() -> None:
    swap = SwapModel(0.01, 0.05)
    fitted = cost_model(swap)
    costs = CostModel(TRUE, swap, swap, 29, swap, swap)
    shape = StepShape.of(step().forward)
    whole_s, forward_s = costs.predict_step_s(shape, 2, 1), costs.predict_forward_s(shape)
    assert whole_s is not None
    assert whole_s > forward_s
    part = (whole_s - forward_s) / whole_s
    found = count(costs, step(2, 1), InFlight(7))
    assert found == pytest.approx((0.0, 0.0, 3 * PAGE * 2.0, part * 2.0 * 650))
    link_s = fitted.predict_swap_s(2, 1)
    assert link_s is not None
    part = 1 - forward_s / max(forward_s, link_s)
    assert count(fitted, step(2, 1), InFlight(7)).stalled == pytest.approx(part * 2.0 * 650)
    assert count(cost_model(), step(2, 1), InFlight(7)) == (0.0, 0.0, 3 * PAGE * 2.0, 0.0), "swaps were not measured"
    alone = Step(7, swap_outs=np.zeros((2, 2), np.int32))
    assert count(costs, alone, InFlight(7)) == (0.0, 0.0, 2 * PAGE * 2.0, 0.0)


def waste(driver: Driver) -> dict[str, float]:
    return driver.engine.stats().waste


def test_intercepted_kv_is_wasted_while_a_sequence_waits_for_more_pages_than_it_would_free() -> None:
    driver = Driver(num_device_pages=24, page_size=16, max_context=400, device_s=lambda step: 0.5)
    waiting = driver.open(list(range(70)), namespace="a")
    driver.generate(waiting, 4, eos=False)
    driver.run()
    running = driver.open([60] * 200, namespace="b")
    driver.generate(running, 24, eos=False)
    for _ in range(4):
        driver.step()
    assert waste(driver) == dict.fromkeys(Waste._fields, 0.0), "it waits, and nothing else needs its pages"
    # 13 pages run and 5 wait: neither the 6 that are free nor those together with them are enough for 15.
    blocked = driver.open([61] * 230, namespace="c")
    driver.generate(blocked, 1, eos=False)
    for _ in range(10):
        driver.step()
    [preserved, *others] = waste(driver).values()
    assert preserved in (9 * 5 * 16 * 0.5, 10 * 5 * 16 * 0.5)
    assert others == [0.0, 0.0, 0.0]
    driver.finish()


@pytest.mark.parametrize(("num_common", "num_intercepted"), [(160, 30), (0, 10)])
def test_pages_that_intercepted_sequences_share_count_once(num_common: int, num_intercepted: int) -> None:
    """Ten contexts wait, each with a page of its own behind a prompt that all of them have, or behind nothing."""
    stepped = Stepped(num_pages=40, policy="min_waste", max_context=320, costs=line(per_token_s=0.1))
    for seq in range(1, 11):
        stepped.open(seq, [7] * num_common + [seq] * 4)
        stepped.generate(seq, 1)
        stepped.run()
        stepped.say(wire.Expect(seq=seq, kind="tool", expected_in_s=5.0))
    assert stepped.scheduler.intercepted_tokens == num_intercepted * 8, "their tables hold the pages"
    stepped.open(50, list(range(200, 400)))
    stepped.generate(50, 40)
    for _ in range(3):
        stepped.turn()
    stepped.scheduler._state.interception.recomputed.note(1000, stepped.now)
    stepped.open(60, list(range(600, 880)))
    stepped.generate(60, 2)
    counted = set()
    for _ in range(15):
        stepped.turn()
        counted |= {one.flight.intercepted_tokens for one in stepped.in_flight if one.flight.waits_for_pages}
    assert counted, "some steps had too few pages"
    assert max(counted) <= num_intercepted * 8
    assert stepped.scheduler.intercepted_tokens == 8 * len(intercepted_pages(stepped.scheduler))


def test_pages_that_a_running_sequence_uses_too_do_not_count() -> None:
    stepped = Stepped(num_pages=40, max_context=320)
    for seq in (1, 2):
        stepped.open(seq, [7] * 160 + [seq] * 4)
        stepped.run()
    assert stepped.scheduler.intercepted_tokens == 22 * 8
    stepped.append(2, [5])
    stepped.generate(2, 20)
    for parked in (False, True):
        if parked:
            stepped.scheduler._state.interception.park_idle(stepped.now)
        stepped.turn()
        assert stepped.scheduler.intercepted_tokens == 8, "the last page of the one that waits"
    stepped.finish()


def test_a_page_that_one_table_has_in_part_counts_once() -> None:
    stepped = Stepped(num_pages=40, max_context=320)
    for seq in (1, 2):
        stepped.open(seq, [7] * 24)
        stepped.run()
    stepped.truncate(1, 12)
    assert stepped.pages(2) == (2, 0), "the last of its three pages is its own"
    assert stepped.scheduler.intercepted_tokens == 3 * 8
    stepped.finish()


@pytest.mark.parametrize("policy", ["min_waste", "swap"])
@pytest.mark.parametrize("size", sorted(SIZES))
def test_no_more_is_preserved_than_there_is(policy: str, size: str) -> None:
    driver = Driver(
        8,
        page_size=8,
        max_context=256,
        num_slots=6,
        intercept=make_policy(policy),
        device_s=lambda step: 0.5,
        **SIZES[size],
    )
    clients = Clients(driver, len(policy) + len(size))
    scheduler, num_pages = driver.engine.scheduler, driver.engine.cache.tiers.device.num_pages
    most = 0
    for _ in range(200):
        clients.act()
        assert scheduler.intercepted_tokens == 8 * len(intercepted_pages(scheduler))
        most = max(most, scheduler.intercepted_tokens)
        stats = driver.engine.stats()
        assert stats.waste["preserve"] <= num_pages * 8 * 0.5 * stats.steps
    assert 0 < most <= num_pages * 8
    driver.finish()


def intercepted_pages(scheduler: Scheduler) -> set[int]:
    """Device pages of sequences that wait for something other than the device, but for those of other sequences."""
    tiers, pages, others = scheduler._state.cache.tiers, set[int](), set[int]()
    for sequence in scheduler.sequences:
        (pages if sequence.state is SequenceState.IDLE else others).update(sequence.table.pages)
    candidates = tiers.candidates
    for row, node in enumerate(candidates._nodes):
        if node is not None and candidates._ints[0, row] >= FIRST_AWAITED:
            while node is not None and not node.locks:
                pages.update(node.pages)
                node = node.parent
    return pages - others


def test_a_sequence_is_held_while_its_end_is_computed_again() -> None:
    driver = Driver(num_device_pages=24, page_size=16, max_context=400, device_s=lambda step: 0.5)
    tokens, _ = turn(driver, list(range(200)), 4)
    turn(driver, [60] * 300, 1, "pressure")
    before = driver.engine.stats()
    assert before.waste["recompute"] == 0.0
    _, usage = turn(driver, [*tokens, 3], 1)
    after = driver.engine.stats()
    assert 0 < usage.num_recomputed_tokens < 128
    assert after.recomputed_tokens - before.recomputed_tokens == usage.num_recomputed_tokens
    assert after.waste["recompute"] == 205 * 0.5, "its 205 tokens, for the one step"
    driver.finish()


def test_an_engine_with_a_host_tier_counts_the_pages_that_it_moves() -> None:
    driver = Driver(num_device_pages=24, num_host_pages=64, page_size=16, max_context=400, device_s=lambda step: 0.5)
    tokens, _ = turn(driver, list(range(200)), 4)
    turn(driver, [60] * 380, 1, "pressure")
    turn(driver, [*tokens, 3], 1)
    stats = driver.engine.stats()
    moved = stats.swapped_in_pages + stats.swapped_out_pages
    assert moved > 12
    assert stats.waste["swap"] == moved * 16 * 0.5
    driver.finish()
