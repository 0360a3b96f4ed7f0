"""States in which nothing could go on although something could be done, KV that was kept or lost for good, and work
that never came to its turn."""

from __future__ import annotations

import math
import random

import pytest

from tests.sched.stepping import Stepped
from weft.core import wire
from weft.core.clock import ManualClock
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.core.wire import PromptOutputs
from weft.engine.engine import Engine
from weft.sched import interception
from weft.sched.scheduler import SchedulerConfig
from weft.testing.fake_worker import FakeWorker, fake_spec


@pytest.mark.parametrize("policy", ["lru", "min_waste"])
def test_a_return_takes_what_room_there_is_where_explicit_pages_cannot_move(policy: str) -> None:
    """The host tier is full of the KV that returns: explicit pages have nowhere to go before a part of it is back."""
    s = Stepped(num_pages=20, num_host_pages=15, policy=policy)
    s.open(1, [7] * 120)
    s.generate(1, 1)
    s.run()
    s.now += 1
    program = s.program(1, 10)
    s.run()
    program.feed([1, 2, 3])
    s.run()
    s.open(2, [8] * 79)
    s.generate(2, 2)
    s.run()
    s.release(2)
    s.run()
    program.wait("http")
    assert s.cache.tiers.host.num_free == 0
    returned = s.generate(1, 2)
    s.run()
    assert s.generations[returned].ending is not None


def test_pages_kept_for_shares_of_tenants_do_not_stop_the_only_return() -> None:
    """Giving up pages of one tenant uncovers explicit ones, which are kept for its share too."""
    s = Stepped(num_pages=26, num_host_pages=64, policy="min_waste", space_fraction=0.9)
    s.open(3, [7] * 39, tenant="comes")
    s.generate(3, 2)
    s.run()
    s.program(1, 12)
    s.open(1, [5] * 31, tenant="idle")
    s.generate(1, 2)
    s.run()
    s.open(9, [9] * 8, tenant="")
    s.generate(9, 3)
    s.run()
    s.release(9)
    s.open(2, s.known[1][:32] + [6] * 17, tenant="idle")
    s.generate(2, 2)
    s.run()
    s.release(2)
    s.say(wire.Demote(op=900, seq=3))
    s.run()
    s.program(2, s.cache.tiers.device.num_free - 1)
    returned = s.generate(3, 2)
    while s.generations[returned].ending is None:
        was_idle = not s.in_flight
        step = s.turn()
        assert not (was_idle and step.is_empty)


def test_a_sequence_that_filled_the_device_goes_on_after_it_was_cut_within_a_page() -> None:
    told: list[wire.Event] = []
    spec = fake_spec(page_size=16, num_device_pages=64, num_slots=6, max_context=1024)
    config = SchedulerConfig(max_context=1024, max_running=4, max_step_tokens=256, vocab_size=1000)
    clock = ManualClock()
    engine = Engine(FakeWorker(spec), config, lambda client, envelope: told.extend(envelope.events), clock=clock)

    def run(*commands: wire.Command) -> None:
        engine.submit(1, commands)
        while engine.busy:
            clock.advance(0.01)
            engine.advance()
            engine.step()
        engine.publish(0)

    def generate(op: int) -> wire.Generate:
        return wire.Generate(seq=1, op=op, stop=StopParams(max_tokens=4))

    run(wire.Open(seq=1), wire.Append(seq=1, op=2, tokens=pack_tokens([i % 900 for i in range(1015)])), generate(3))
    assert engine.cache.tiers.device.num_free == 0
    run(wire.Truncate(seq=1, num_tokens=500))
    assert engine.cache.num_available == 32
    run(wire.Append(seq=1, op=4, tokens=pack_tokens([7] * 20)), generate(5))
    assert [event.op for event in told if isinstance(event, wire.Finished)] == [3, 5]


def test_what_has_not_come_back_yet_stays_that_of_a_return_that_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Stepped(num_pages=24, num_host_pages=40, policy="min_waste")
    s.open(1, [1] * 128)
    s.generate(1, 2)
    s.run()
    s.now += 1
    s.say(wire.Demote(op=900, seq=1))
    s.run()
    monkeypatch.setattr(interception, "UNMEASURED_COPIES", 2)
    monkeypatch.setattr(interception, "IDLE_COPIES", 2)
    s.generate(1, 1)
    for _ in range(4):
        s.turn()
    s.say(wire.Cancel(seq=1))
    s.settle()
    s.open(2, [2] * 150, priority=-3)
    s.generate(2, 1)
    for _ in range(3):
        s.turn()
    wait = s.sequence(1).wait
    assert wait is not None
    assert wait.end is not None
    assert wait.end.depth_pages == 17  # what is on the host still, behind the pages that came back


def test_deadlines_that_leave_no_time_do_not_stop_throughput_for_good() -> None:
    s = Stepped(num_pages=64, policy="lru", max_running=1, check_every=1000, aging_s=30.0)
    live: dict[int, int] = {}
    s.open(1, [1] * 8, objective="throughput")
    waits = s.generate(1, 3)
    number = 100
    while s.now < 60 and not s.generations[waits].tokens:
        while len(live) < 3:
            number += 1
            s.open(number, [number % 900] * 8, objective="deadline", deadline_s=1.0)
            live[number] = s.generate(number, 3)
        s.turn()
        s.now += 0.1
        for seq, op in list(live.items()):
            if s.generations[op].ending is not None:
                s.release(seq)
                del live[seq]
    assert s.generations[waits].tokens


def test_priorities_that_nothing_waits_at_are_forgotten() -> None:
    s = Stepped(num_pages=64, policy="lru", max_running=1, check_every=10**9, max_context=400)
    for seq, tenant, length in ((1, "a", 300), (2, "b", 2), (3, "c", 2)):
        s.open(seq, [seq] * 8, tenant=tenant)
        s.generate(seq, length)
        s.turn()
    for priority in range(1, 2000):
        s.say(wire.SetPriority(seq=2, priority=priority))
    order = s.scheduler.sequences.queue.order
    order._sweep()
    assert len(order._levels) <= 3


def test_a_pin_keeps_what_comes_back_from_the_host() -> None:
    s = Stepped(num_pages=24, num_host_pages=40, policy="min_waste")
    pinned = pack_tokens([1] * 64)
    s.open(1, [1] * 64)
    s.generate(1, 1)
    s.run()
    s.release(1)
    s.say(wire.Demote(op=900, tokens=pinned))
    s.run()
    s.say(wire.Retain(op=901, tokens=pinned, weight=math.inf, ttl_s=math.inf))
    s.open(2, [1] * 64 + [2] * 3)
    s.generate(2, 1)
    s.run()
    s.release(2)
    assert all(node.on_device and node.locks for node in s.cache.retention.pinned())


def test_a_refused_hold_of_a_context_that_was_cut_ends_once() -> None:
    s = Stepped(num_pages=24, policy="min_waste")
    for seq in (1, 2):
        s.open(seq, [5] * 120, tenant=f"tenant{seq}")
        s.generate(seq, 2)
        s.run()
        s.truncate(seq, 104)
        s.run()
        s.say(wire.Hold(seq=seq, ttl_s=60.0, op=70 + seq))
        s.known.pop(seq)
    assert len(s.events_of(71)) == 1
    s.run()
    s.say(wire.ResetPrefixCache())
    assert not s.cache.trees()


@pytest.mark.parametrize("gap", range(4))
@pytest.mark.parametrize(
    ("keeps", "cached", "first", "second"),
    [("explicit pages", 22, 67, 22), ("explicit pages", 38, 51, 38), ("a pin", 38, 67, 22)],
)
def test_one_that_is_preempted_waits_for_the_one_that_gets_its_pages(
    keeps: str, cached: int, first: int, second: int, gap: int
) -> None:
    """A tenant that holds more than its share fills a context, and another tenant asks for its pages."""
    stepped = Stepped(num_pages=24, policy="min_waste", space_fraction=0.9, check_every=50, saturation_tokens=16)
    if keeps == "explicit pages":
        stepped.program(1, 10)
        stepped.run()
    else:
        prefix = [9] * 72
        stepped.open(8, [*prefix, 1])
        stepped.generate(8, 1)
        stepped.run()
        stepped.say(wire.Retain(op=5, tokens=pack_tokens(prefix), ttl_s=1e9, weight=math.inf))
        stepped.release(8)
        stepped.run()
    stepped.open(1, [1] * cached, tenant="c")
    stepped.generate(1, 2)
    stepped.run()
    stepped.release(1, "chat")
    stepped.run()
    stepped.open(2, [2] * first)
    for _ in range(gap):
        stepped.turn()
    stepped.open(3, [3] * second, tenant="b")
    stepped.generate(3, 2)
    for _ in range(300):
        stepped.turn()
    assert not stepped.scheduler.has_work
    assert stepped.scheduler.stats().preemptions < 10


@pytest.mark.parametrize("policy", ["lru", "min_waste", "swap"])
@pytest.mark.parametrize("num_forks", [1, 2])
@pytest.mark.parametrize("num_tokens", [113, 118, 124])
@pytest.mark.parametrize("is_computed", [False, True])
def test_forks_of_a_context_that_fills_the_device_end(
    policy: str, num_forks: int, num_tokens: int, is_computed: bool
) -> None:
    """The pool has the pages of one context: none is left to copy the last page to, which all of the forks have."""
    s = Stepped(num_pages=8, page_size=16, policy=policy)
    s.open(1, list(range(num_tokens)))
    if is_computed:
        s.generate(1, 1)
        s.run()
    seqs = [1 + number for number in range(1 + num_forks)]
    for child in seqs[1:]:
        s.fork(1, child)
    for seq in seqs:
        s.generate(seq, 128 - len(s.known[seq]))
    s.finish()


@pytest.mark.parametrize("asked", [[1], [2], [2, 1], [2, 3]])
def test_any_fork_of_an_idle_context_that_fills_the_device_goes_on(asked: list[int]) -> None:
    s = Stepped(num_pages=8, page_size=16, policy="min_waste")
    s.open(1, list(range(120)))
    s.generate(1, 1)
    s.run()
    s.fork(1, 2)
    s.fork(1, 3)
    for seq in asked:
        s.generate(seq, 7)
    s.finish()


def test_a_context_that_fills_the_device_goes_on_after_its_last_page_was_cut() -> None:
    s = Stepped(num_pages=8, page_size=16)
    s.open(1, list(range(100)))
    last = list(range(100, 128))
    s.known[1] += last
    s.say(wire.Append(seq=1, op=5, tokens=pack_tokens(last), outputs=PromptOutputs(hidden="last")))
    s.run()
    assert s.sequence(1).num_computed == 128
    s.truncate(1, 124)
    generated = s.generate(1, 4)
    s.run()
    assert s.generations[generated].ending is not None
    assert s.scheduler.stats().recomputed_tokens <= 12
    s.finish()


def contexts_that_fill_the_device(seed: int, num_acts: int) -> None:
    """Forks, truncations and prompts up to the last token of a context, in a pool that has its pages alone."""
    source = random.Random(seed)
    page_size, num_pages = source.choice([4, 8, 16]), source.choice([3, 4, 8])
    s = Stepped(
        num_pages=num_pages,
        page_size=page_size,
        num_host_pages=source.choice([0, 0, 4, 20]),
        policy=source.choice(["lru", "min_waste", "discard", "swap", "preserve"]),
        max_running=source.choice([2, 4]),
        prefix_cache=source.random() < 0.8,
    )
    most = num_pages * page_size
    s.open(1, list(range(source.choice([most - 1, most - page_size // 2, most - page_size, most // 2]))))
    begun, names = [1], iter(range(2, 1000))
    for _ in range(num_acts):
        seq, act = source.choice(begun), source.randrange(8)
        length, busy = len(s.known[seq]), s.sequence(seq).ops
        if busy:
            pass
        elif act < 2 and len(begun) < 5:
            begun.append(next(names))
            s.fork(seq, begun[-1])
        elif act == 2 and len(begun) > 1:
            begun.remove(seq)
            s.release(seq)
        elif act == 3:
            s.truncate(seq, max(1, source.choice([length - 1, source.randrange(length)])))
        elif act == 4 and length < most:
            tokens = [source.randrange(3)] * source.choice([1, most - length])
            s.known[seq] += tokens
            outputs = PromptOutputs(hidden="last")
            s.say(wire.Append(seq=seq, op=s.number(), tokens=pack_tokens(tokens), outputs=outputs))
        elif length < most:
            s.generate(seq, source.choice([1, most - length]))
        for _ in range(source.choice([0, 0, 1, 3])):
            s.turn()
    s.finish()


@pytest.mark.parametrize("seed", range(12))
def test_contexts_that_fill_the_device_at_random(seed: int) -> None:
    contexts_that_fill_the_device(seed, 40)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_contexts_that_fill_the_device_at_random(seed: int) -> None:
    contexts_that_fill_the_device(seed, 60)
