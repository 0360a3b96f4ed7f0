from __future__ import annotations

import pytest

from tests.sim.small import session, small_device, small_settings
from weft.sim.records import KnownTokens, SessionRecord, TurnRecord
from weft.sim.run import simulate


def test_known_tokens_are_recomputed_and_others_are_not() -> None:
    known = KnownTokens()
    assert known.compute(1, 0, 50) == 0
    assert known.compute(1, 30, 80) == 20
    known.expect(2, 100)
    assert (known.compute(2, 64, 90), known.compute(2, 90, 130), known.compute(2, 0, 10)) == (26, 10, 10)
    known.forget(2)
    assert known.compute(2, 0, 10) == 0


def test_latency_counts_neither_tools_nor_prompts() -> None:
    turns = [TurnRecord(10.0, 11.0, 12.0, 100, 0, 20), TurnRecord(20.0, 21.0, 24.0, 150, 119, 30)]
    record = SessionRecord(1, "x", 10.0, turns, tools_s=8.0, end_s=24.0)
    assert record.latency_per_token_s == pytest.approx((14.0 - 8.0) / 50)
    assert SessionRecord(1, "x", 10.0, turns).latency_per_token_s is None


def test_an_intercepted_sequence_wastes_its_pages_while_others_run() -> None:
    # The second session generates while the first one, of 104 tokens in 7 pages, waits for a tool that is still busy.
    scripts = [session(1, (100, 5, 100.0), (10, 1, 0.0)), session(2, (10, 101, 0.0), arrive_s=1.0)]
    summary = simulate(small_device(64), scripts, small_settings()).summary
    others_s = 0.020 + 100 * 0.011
    busy_s = (0.074 + 0.046 + 4 * 0.011) + others_s + (0.010 + 0.011)
    assert summary.waste_shares["preserve"] == pytest.approx(7 * 16 * others_s / (64 * 16 * busy_s))
    assert summary.waste_share == summary.waste_shares["preserve"]
    assert summary.pressed_s == 0.0


def test_computing_again_wastes_what_is_held_meanwhile_and_stalls_others() -> None:
    # 31 tokens of the second turn's prompt were computed before, and what was discarded is not found.
    settings = small_settings(driving="clients", policy="discard")
    scripts = [session(1, (30, 2, 1.0), (5, 1, 0.0))]
    summary = simulate(small_device(64), scripts, settings).summary
    again = 31
    step_s = 0.010 + 0.001 * 37
    busy_s = (0.010 + 0.030) + 0.011 + step_s
    assert summary.recomputed_tokens == again
    assert summary.waste_shares["recompute"] == pytest.approx(37 * step_s / (64 * 16 * busy_s))
    assert summary.waste_shares["stalled"] == 0.0
    both = [*scripts, session(2, (10, 200, 0.0))]
    stalled = simulate(small_device(64), both, settings).summary
    assert stalled.recomputed_tokens == again
    # The other one has as many tokens as steps have passed since it began; the step is 15 ms longer for it.
    seconds = stalled.waste_shares["stalled"] * 64 * 16 * _busy_s(stalled.waste_shares["recompute"], 37, step_s + 0.001)
    assert seconds == pytest.approx(0.001 * again * round(seconds / (0.001 * again)))
    assert 80 < seconds / (0.001 * again) < 120


def _busy_s(share: float, kv: int, step_s: float) -> float:
    """Of a run whose only waste by recomputation is one step."""
    return kv * step_s / (share * 64 * 16)


def test_a_step_is_pressed_while_a_sequence_lacks_pages() -> None:
    # Both need most of the pool: the second waits from when the first has taken 20 of 48 pages, in its fifth chunk.
    scripts = [session(1, (500, 100, 0.0)), session(2, (500, 10, 0.0), arrive_s=0.1)]
    tight = simulate(small_device(48), scripts, small_settings()).summary
    roomy = simulate(small_device(96), scripts, small_settings()).summary
    assert roomy.pressed_s == 0.0
    assert tight.pressed_s == pytest.approx((7 * 0.074 + 0.062 + 99 * 0.011) - 4 * 0.074)
    assert tight.pressed_waste_share == 0.0


@pytest.mark.parametrize("policy", ["preserve", "lru"])
def test_a_step_is_pressed_while_a_newcomer_waits_for_kv_that_is_spared(policy: str) -> None:
    # While the first session is away, the third finds too few pages that nobody waits for beside the second.
    scripts = [session(1, (400, 10, 4.0), (10, 10, 0.0)), session(2, (200, 200, 0.0), arrive_s=1.5)]
    scripts.append(session(3, (200, 10, 0.0), arrive_s=2.0))
    found = simulate(small_device(48), scripts, small_settings(policy=policy)).summary
    assert (found.pressed_s > 0.5) == (found.pressed_waste_share > 0.5) == (policy == "preserve")


def test_swaps_that_lengthen_a_step_stall_it() -> None:
    scripts = [session(number, (200, 20, 5.0), (10, 10, 0.0)) for number in range(1, 9)]
    overlapped = small_settings(host_tokens=16 * 200)
    synchronous = small_settings(host_tokens=16 * 200, synchronous_swaps=True)
    one, other = (simulate(small_device(40), scripts, settings).summary for settings in (overlapped, synchronous))
    assert other.waste_shares["stalled"] > 1.5 * one.waste_shares["stalled"]
    assert min(one.waste_shares["swap"], other.waste_shares["swap"]) > 0
    assert other.simulated_s > one.simulated_s


def test_recomputed_tokens_agree_with_the_scheduler_s_own_count() -> None:
    # One token is generated in each turn, so that all KV is that of prompts, which the scheduler counts.
    turns = ((300, 1, 1.0), (20, 1, 0.3), (50, 1, 0.0))
    scripts = [session(number, *turns, arrive_s=0.2 * number) for number in range(1, 20)]
    found = simulate(small_device(60), scripts, small_settings())
    assert found.summary.recomputed_tokens == found.scheduler_stats.recomputed_tokens > 1000
    assert found.summary.prefill_tokens == found.scheduler_stats.prefill_tokens


def test_tokens_generated_before_a_preemption_count_as_recomputed() -> None:
    # Two sequences grow until one gives up its last pages, a few at a time; these hold what it has generated.
    scripts = [session(1, (200, 300, 0.0)), session(2, (200, 300, 0.0))]
    found = simulate(small_device(40), scripts, small_settings())
    assert found.scheduler_stats.preemptions == 1
    again = found.summary.recomputed_tokens
    assert 0 < again < 40 * 16 / 2
    assert again == found.scheduler_stats.recomputed_tokens
