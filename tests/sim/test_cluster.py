"""Several engines on one virtual clock."""

from __future__ import annotations

import pytest

from tests.sim.small import small_device, small_settings
from weft.abi.errors import LimitExceeded, WeftError
from weft.cache.integrity import check_integrity
from weft.cluster.route_costs import EngineView
from weft.core.ids import pack_tokens
from weft.sim.clock import VirtualClock
from weft.sim.cluster import EngineChoice, LeastQueue, RouterChoice, SimulatedCall, SimulatedCluster, SimulatedTimes
from weft.sim.loop import StepDigest
from weft.sim.run import simulated_engine

VIEW = EngineView(True, 1, 32, 64, 16, None)


def cluster(num_engines: int, choice: EngineChoice | None = None, num_pages: int = 64) -> SimulatedCluster:
    clock = VirtualClock()
    engines = [simulated_engine(small_device(num_pages), small_settings(), clock) for _ in range(num_engines)]
    return SimulatedCluster(engines, clock, choice)


def call(prompt: int, output: int, first: int = 100, session: str = "") -> SimulatedCall:
    """A prompt of tokens from `first` on."""
    return SimulatedCall(pack_tokens(range(first, first + prompt)), pack_tokens([7] * output), session=session)


def play(made: SimulatedCluster, calls: list[tuple[float, SimulatedCall]]) -> list[SimulatedTimes]:
    """Send calls at their times; returns how they went, in this order."""
    done: dict[int, SimulatedTimes] = {}
    for number, (at_s, one) in enumerate(calls):
        made.at(at_s, lambda now, number=number, one=one: made.call(one, lambda times: done.update({number: times})))  # type: ignore[misc]
    made.run()
    for engine in made.engines:
        assert not engine.scheduler.has_work
    return [done[number] for number in range(len(calls))]


def test_a_call_takes_the_time_of_its_steps() -> None:
    [times] = play(cluster(2), [(2.0, call(100, 5))])
    # As in the simulation of one engine: chunks of S = 64 and 36 tokens, then four steps of one token.
    first_s = 2.0 + (0.01 + 0.064) + (0.01 + 0.036)
    assert times.asked_s == 2.0
    assert times.first_s == pytest.approx(first_s)
    assert times.end_s == pytest.approx(first_s + 4 * 0.011)


def test_a_call_during_a_step_is_in_the_step_after_next() -> None:
    times = play(cluster(1), [(0.0, call(10, 50)), (0.025, call(20, 1, 500))])
    # Steps end at 0.020, 0.031 and 0.042; the call comes during the second one, when the third is decided.
    assert times[1].first_s == pytest.approx(0.042 + 0.010 + 0.021)


def test_engines_do_not_wait_for_each_other() -> None:
    calls = [(0.0, call(200, 3)), (0.0, call(40, 40, 500))]
    both = play(cluster(2), calls)
    assert {times.engine for times in both} == {0, 1}
    alone = [play(cluster(1), [one])[0] for one in calls]
    assert [times.end_s for times in both] == pytest.approx([times.end_s for times in alone])


def test_generated_tokens_are_found_by_later_prompts() -> None:
    """The answer is what the call says, so a prompt that goes on from it computes only what is new."""
    made = cluster(1)
    answer = list(range(1000, 1032))
    first = SimulatedCall(pack_tokens(range(100, 132)), pack_tokens(answer))
    then = [*range(100, 132), *answer, *range(50, 60)]
    other = [*range(100, 132), *[7] * 32, *range(50, 60)]
    done = play(made, [(0.0, first), (5.0, SimulatedCall(pack_tokens(then), pack_tokens([7])))])
    assert done[1].usage.num_cached_tokens >= 48
    done = play(cluster(1), [(0.0, first), (5.0, SimulatedCall(pack_tokens(other), pack_tokens([7])))])
    assert done[1].usage.num_cached_tokens == 32


def test_least_queue_knows_nothing_of_prefixes_and_the_router_does() -> None:
    calls = [(0.0, call(64, 4)), (3.0, call(64, 40, 1000)), (3.01, call(64, 4)), (3.02, call(64, 4, 1000))]
    blind = [times.engine for times in play(cluster(2, LeastQueue(2)), calls)]
    knowing = [times.engine for times in play(cluster(2, RouterChoice([VIEW, VIEW])), calls)]
    assert blind == [0, 0, 1, 0]
    assert knowing[2] == knowing[0]
    assert knowing[3] == knowing[1]


def test_what_is_next_stays_for_a_later_run() -> None:
    made = cluster(1)
    ended: list[float] = []
    made.at(1.0, lambda now: ended.append(now))
    made.at(9.0, lambda now: ended.append(now))
    made.run(until_s=5.0)
    assert ended == [1.0]
    made.run()
    assert ended == [1.0, 9.0]


def test_equal_calls_give_equal_steps_and_sound_caches() -> None:
    def digests() -> list[str]:
        clock = VirtualClock()
        watching = [StepDigest() for _ in range(3)]
        engines = [simulated_engine(small_device(40), small_settings(), clock, [each]) for each in watching]
        made = SimulatedCluster(engines, clock, RouterChoice([VIEW] * 3))
        calls = [(0.01 * number, call(30 + number % 50, 5 + number % 9, 100 * (number % 7))) for number in range(60)]
        play(made, calls)
        for engine in engines:
            check_integrity(engine.scheduler._state.cache, [])
        return [each.hexdigest() for each in watching]

    assert digests() == digests()


def test_an_engine_keeps_a_prefix_on_request() -> None:
    """As for runs of `weft serve`: what is there, until the end of the retain; what is refused needs no end."""
    made = cluster(1, num_pages=16)
    told: list[int | WeftError] = []
    play(made, [(0.0, call(64, 4))])
    retains, prefix = made.retains[0], pack_tokens(range(100, 148))
    kept = retains.retain("", "", prefix, 0.25, told.append)
    other = retains.retain("", "", pack_tokens(range(900, 916)), 0.25, told.append)
    with pytest.raises(LimitExceeded):
        retains.retain("", "", prefix, 0.25, told.append)
    assert told == [], "the engine answers later"
    # A sequence that needs 13 of the 16 pages leaves the prefix its three, though it was used before all others.
    play(made, [(made.clock.now(), call(200, 4, 500))])
    assert told[0] == 48
    assert isinstance(told[1], WeftError)
    [times] = play(made, [(made.clock.now(), call(64, 4))])
    assert times.usage.num_cached_tokens == 48
    for each in (kept, other, kept):
        each.end()
    made.run()
    assert retains.num_pages("") == 0
    cache = made.engines[0].scheduler._state.cache
    check_integrity(cache, [])
    assert cache.retention.num_pages == 0
    play(made, [(made.clock.now(), call(220, 4, 700))])
    [times] = play(made, [(made.clock.now(), call(64, 4))])
    assert times.usage.num_cached_tokens < 48


def test_a_plan_has_the_engine_that_it_prefers() -> None:
    made = cluster(2, RouterChoice([VIEW, VIEW]))
    calls = [(0.1 * number, call(64, 4, 100 * number)._replace(replica=number % 2)) for number in range(4)]
    assert [times.engine for times in play(made, calls)] == [0, 1, 0, 1]
