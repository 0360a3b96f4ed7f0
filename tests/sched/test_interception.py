"""Who waits for what since when, what the policy is told of it, and where a return takes its place."""

from __future__ import annotations

import math

import pytest

from tests.sched.stepping import Stepped
from tests.sched.test_decisions import Alone
from weft.cache.manager import KVCache
from weft.cache.nodes import Wait
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.core.waits import COHORT_TOKENS, of_cohort
from weft.sched.policies import make_policy
from weft.sched.policies.heuristic import HeuristicPolicy
from weft.sched.policies.lru import LruPolicy
from weft.sched.scheduler import Scheduler, SchedulerConfig
from weft.sched.sequence import COLD, NEW, WARM, QueuePlace, ReturnOrder, SequenceState


class Noting(LruPolicy):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, float]] = []

    def observe(self, tenant: str, kind: str, wait_s: float, *, ended: bool = True, since_s: float = math.nan) -> None:
        self.told.append((tenant, kind, wait_s))


class Engine(Alone):
    """A scheduler alone, with a policy of choice."""

    def __init__(self, policy: str | LruPolicy = "min_waste", *, num_pages: int = 12, max_context: int = 90):
        super().__init__(num_pages=num_pages)
        made = make_policy(policy) if isinstance(policy, str) else policy
        config = SchedulerConfig(
            max_context=max_context, max_running=4, max_step_tokens=32 if max_context == 90 else 512, vocab_size=100
        )
        self.cache = KVCache(num_pages, page_size=8)
        self.scheduler = Scheduler(config, self.cache, policy=made)

    def run(self) -> None:
        while self.scheduler.has_work:
            self.turn()

    def pages_of(self, num_tokens: int) -> int:
        """Pages that are left of the last finished turn of so many tokens."""
        return max([w.end.depth_pages for w in waits_of(self) if w.num_tokens == num_tokens and w.end], default=0)

    def plain(self, seq: int, tokens: list[int], *, tenant: str = "", kind: str = "chat") -> wire.OperationUsage:
        """A request of a plain client, to its end. Token 5 is generated."""
        self.say(
            wire.Open(seq=seq, tenant=tenant, namespace=tenant),
            wire.Append(seq=seq, op=10 * seq, tokens=pack_tokens(tokens)),
            wire.Generate(seq=seq, op=10 * seq + 1, stop=StopParams(max_tokens=1)),
        )
        self.run()
        [usage] = [e.usage for _, e in self.events if isinstance(e, wire.Finished) and e.op == 10 * seq + 1]
        self.say(wire.Release(seq=seq, kind=kind))
        return usage


@pytest.mark.parametrize(
    ("order", "places"),
    [("fair", [10.0, 25.0, 970.0]), ("arrival", [10.0, 10.0, 10.0]), ("last", [10.0, 30.0, 1000.0])],
)
def test_a_return_counts_as_having_come_when_its_work_began(order: ReturnOrder, places: list[float]) -> None:
    place, found = QueuePlace(10.0), []
    # It worked for 5 s between 10 and 30, and for 970 - 25 s before 1000: an age of 30 s at most.
    for now, intercepted_s in ((10.0, 0.0), (30.0, 15.0), (1000.0, 25.0)):
        place.arrive(now, intercepted_s, order, 30.0)
        found.append(place.since_s)
        assert place.admission == math.inf
    assert found == places


def test_the_policy_learns_how_long_each_kind_of_wait_took() -> None:
    policy = Noting()
    engine = Engine(policy)
    engine.say(
        wire.Open(seq=1, tenant="a"),
        wire.Append(seq=1, op=1, tokens=pack_tokens([1] * 20)),
        wire.Generate(seq=1, op=2, stop=StopParams(max_tokens=2)),
    )
    engine.run()
    idle_s = engine.sequence(1).last_active_s
    engine.say(wire.Expect(seq=1, kind="http"))
    engine.now = idle_s + 7.0
    engine.say(wire.Generate(seq=1, op=3, stop=StopParams(max_tokens=2)))
    engine.run()
    engine.plain(2, [7] * 10, tenant="b", kind="tools")
    engine.now += 3.0
    engine.plain(3, [7] * 10 + [5, 9], tenant="b")
    engine.plain(4, list(range(60)))  # asks the policy: too few pages are free
    assert ("a", "http", 7.0) in policy.told
    assert ("b", "tools", 3.0) in policy.told


def test_a_kind_that_is_told_while_there_is_work_holds_for_the_wait_after_it() -> None:
    policy = Noting()
    engine = Engine(policy)
    engine.say(
        wire.Open(seq=1, tenant="a"),
        wire.Append(seq=1, op=1, tokens=pack_tokens([1] * 20)),
        wire.Generate(seq=1, op=2, stop=StopParams(max_tokens=2)),
        wire.Expect(seq=1, kind="message", expected_in_s=9.0),
    )
    engine.run()
    assert engine.sequence(1).wait_kind == "message"
    engine.now += 4.0
    again = wire.Generate(seq=1, op=3, stop=StopParams(max_tokens=2))
    engine.say(again, wire.Expect(seq=1, kind="http"), wire.Append(seq=1, op=4, tokens=pack_tokens([1])))
    engine.run()
    assert engine.sequence(1).wait_kind == "program", "an operation came after it"
    engine.plain(4, list(range(75)))  # asks the policy: too few pages are free
    assert "message" in {kind for _, kind, _ in policy.told}


@pytest.mark.parametrize("seconds", [math.nan, -1.0, math.inf, -math.inf])
def test_a_return_that_is_no_time_from_now_is_refused(seconds: float) -> None:
    engine = Engine()
    engine.say(
        wire.Open(seq=1),
        wire.Expect(seq=1, kind="http", expected_in_s=seconds),
        wire.Expect(seq=1, kind=""),
        wire.Expect(seq=1, kind="prefix"),
        wire.Release(seq=1, kind="chat", expected_in_s=seconds),
        wire.Hold(seq=1, ttl_s=math.nan),
    )
    errors = [event.error for _, event in engine.events if isinstance(event, wire.Failed)]
    assert [(error.kind, error.param) for error in errors] == [
        ("invalid_request", "expected_in_s"),
        ("invalid_request", "kind"),
        ("invalid_request", "kind"),
        ("invalid_request", "expected_in_s"),
        ("invalid_request", "ttl_s"),
    ]
    assert engine.sequence(1).wait_kind == "program"


def test_a_newer_turn_supersedes_the_wait_of_the_older() -> None:
    engine = Engine(num_pages=40)
    engine.plain(1, [7] * 20)
    engine.plain(2, [7] * 20 + [5, 9])
    assert [(wait.seq, wait.kind, wait.num_tokens) for wait in waits_of(engine)] == [(2, "chat", 23)]


def waits_of(engine: Engine) -> list[Wait]:
    """All that wait for KV that is still there."""
    return [w for tree in engine.cache.trees().values() for node in tree.nodes() for w in node.waits.values()]


def kinds_of_candidates(engine: Engine) -> list[str]:
    candidates = engine.cache.tiers.candidates
    return [candidates._kinds.names[candidates._ints[0, node.row]] for node in candidates.nodes()]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_turn_whose_client_has_come_back_waits_for_the_device_alone(is_cancelled: bool) -> None:
    """However long it has to: it is not taken for one that lasts longer than others of its kind."""
    engine = Engine()
    engine.plain(1, [7] * 30)
    [wait] = waits_of(engine)
    assert kinds_of_candidates(engine) == ["chat"]
    engine.request(9, 8)
    engine.turn()
    for seq in (2, 3):  # a retry waits beside the first request
        engine.say(
            wire.Open(seq=seq),
            wire.Append(seq=seq, op=10 * seq, tokens=pack_tokens([*[7] * 30, 5, 9])),
            wire.Generate(seq=seq, op=10 * seq + 1, stop=StopParams(max_tokens=1)),
        )
        assert kinds_of_candidates(engine) == ["queue"]
        assert wait.kind == "chat", "of this kind it was, and so it is counted"
    engine.say(wire.Release(seq=2))
    assert kinds_of_candidates(engine) == ["queue"]
    if is_cancelled:
        engine.say(wire.Cancel(seq=3))
        assert kinds_of_candidates(engine) == ["chat"]
        assert not wait.has_ended
    else:
        engine.run()
        assert wait.has_ended
    assert wait.num_returns == 0


def test_kv_that_goes_while_its_return_waits_is_no_wait_that_lasted_longer() -> None:
    policy = Noting()
    engine = Engine(policy)
    engine.plain(1, [7] * 30, kind="tools")
    [wait] = waits_of(engine)
    engine.request(2, 60, limit=29)
    engine.turn()
    engine.now = 50.0
    engine.say(
        wire.Open(seq=3),
        wire.Append(seq=3, op=30, tokens=pack_tokens([*[7] * 30, 5, 9])),
        wire.Generate(seq=3, op=31, stop=StopParams(max_tokens=1)),
    )
    while not wait.was_cut:
        engine.turn()
    assert engine.sequence(3).state is SequenceState.WAITING
    engine.run()
    engine.plain(4, [9] * 75)
    assert [wait_s for _, kind, wait_s in policy.told if kind == "tools"] == [pytest.approx(47, abs=2)]


@pytest.mark.parametrize("is_same", [True, False])
def test_a_turn_of_which_a_shared_prefix_is_left_is_continued_by_its_own_tokens_alone(is_same: bool) -> None:
    engine, shared = Engine(), [6] * 16
    engine.plain(1, [*shared, *[7] * 24])
    [wait] = waits_of(engine)
    engine.now = 50.0
    engine.plain(2, [*shared, 8], kind="")
    engine.plain(3, [9] * 75, kind="")
    assert wait.end is not None
    assert wait.end.depth_pages == 2, "only the prefix is left"
    engine.now = 100.0
    rest = [*[7] * 24, 5, 3] if is_same else [5] * 40
    usage = engine.plain(4, [*shared, *rest], kind="")
    assert usage.num_cached_tokens == 16
    assert usage.num_continued_tokens == (16 if is_same else 0)
    assert wait.has_ended == is_same
    assert engine.scheduler.stats().wait_returns == ({"chat": {"recomputed": 1}} if is_same else {})


def test_sessions_that_begin_like_those_which_nobody_answers_go_first() -> None:
    engine = Engine(num_pages=120, max_context=400)
    once, agent = [1] * COHORT_TOKENS, [2] * COHORT_TOKENS
    for number in range(60):
        engine.plain(2 * number + 1, [*once, *[number] * 80])  # nobody goes on with it
        engine.now += 20.0
        turn = [*agent, *[number] * 40]
        engine.plain(2 * number + 2, turn)
        engine.now += 20.0
        engine.plain(1000 + number, [*turn, 5, 9], kind="")
    engine.plain(2001, [*agent, *[90] * 60])
    engine.plain(2002, [*once, *[91] * 70])
    groups = {wait.num_tokens: wait.group for wait in waits_of(engine)}
    assert groups[COHORT_TOKENS + 71] == of_cohort("chat", pack_tokens(once))
    kept, lost = COHORT_TOKENS + 61, COHORT_TOKENS + 71
    before = engine.pages_of(kept), engine.pages_of(lost)
    assert all(before)
    engine.plain(3000, [3] * 300)
    assert engine.pages_of(kept) == before[0]
    assert engine.pages_of(lost) < before[1], "although it came later"


GONE = [6] * 10
"""A prompt; its turn has token 5 behind it."""


def engine_without_its_kv() -> tuple[Engine, Noting]:
    """An engine on which a turn with `GONE` ended in the first seconds, whose pages others have taken since."""
    policy = Noting()
    engine = Engine(policy, num_pages=8)
    engine.plain(1, GONE, kind="tools")
    engine.now = 100.0
    for seq in range(2, 6):
        engine.plain(seq, [seq + 50] * 40, tenant="another", kind="")
    assert not waits_of(engine)
    return engine, policy


def test_a_wait_ends_with_its_return_though_its_kv_is_gone() -> None:
    engine, policy = engine_without_its_kv()
    told = len(policy.told)
    engine.now = 200.0
    usage = engine.plain(7, [*GONE, 5, 9])
    assert usage.num_cached_tokens == 0
    engine.plain(8, [31] * 60)  # asks the policy: too few pages are free
    assert [wait_s for _, kind, wait_s in policy.told[told:] if kind == "tools"] == [pytest.approx(200, abs=8)]
    assert engine.scheduler.stats().wait_returns["tools"] == {"recomputed": 1}


@pytest.mark.parametrize("is_return", [True, False])
def test_a_return_whose_kv_is_gone_goes_before_newcomers_like_any_other(is_return: bool) -> None:
    engine, _ = engine_without_its_kv()
    engine.request(10, 8, first=10)
    engine.request(11, 8, first=11)
    tokens = [*GONE, 5, 9] if is_return else [*GONE[:-1], 5, 9]
    engine.say(
        wire.Open(seq=12),
        wire.Append(seq=12, op=120, tokens=pack_tokens(tokens)),
        wire.Generate(seq=12, op=121, stop=StopParams(max_tokens=1)),
    )
    waiting = [engine.sequence(handle) for handle in (10, 11, 12)]
    assert [sequence.place.line for sequence in waiting] == [NEW, NEW, COLD if is_return else NEW]
    assert waiting[2].place.first_s < 100 if is_return else waiting[2].place.first_s >= 100


def test_a_wait_ends_with_a_return_that_renders_the_answer_differently() -> None:
    engine = Engine()
    engine.say(
        wire.Open(seq=1),
        wire.Append(seq=1, op=10, tokens=pack_tokens([7] * 30)),
        wire.Generate(seq=1, op=11, stop=StopParams(max_tokens=4)),
    )
    engine.run()
    engine.say(wire.Release(seq=1, kind="chat"))
    [wait] = waits_of(engine)
    usage = engine.plain(2, [*[7] * 30, 5, 8, 9], kind="")
    assert usage.num_cached_tokens == usage.first_different_token == 31
    assert wait.has_ended
    assert not waits_of(engine), "nothing waits for the rest of the answer any more"


def test_a_turn_that_another_tenant_of_the_namespace_renders_differently_still_waits() -> None:
    engine = Engine(num_pages=40)
    engine.plain(1, [7] * 20)
    [wait] = waits_of(engine)
    engine.say(
        wire.Open(seq=2, tenant="other", namespace=""),
        wire.Append(seq=2, op=20, tokens=pack_tokens([7] * 20 + [8, 9])),
        wire.Generate(seq=2, op=21, stop=StopParams(max_tokens=1)),
    )
    assert engine.sequence(2).place.line == NEW
    engine.run()
    assert not wait.has_ended
    assert wait.end is not None


def test_equal_turns_wait_at_the_same_last_page() -> None:
    engine = Engine(num_pages=40)
    for seq in (1, 2, 3):
        engine.plain(seq, [7] * 20)
    [end] = {wait.end for wait in waits_of(engine)}
    assert end is not None
    assert (end.is_tail, len(end.waits)) == (True, 3)
    [first, *_] = engine.scheduler.sessions("", 10, engine.now).sessions
    assert (first.num_tokens, first.gone_tokens) == (21, 0)


def test_a_last_page_that_a_full_one_replaces_was_not_given_up() -> None:
    engine = Engine(num_pages=40)
    engine.plain(1, [7] * 20)
    engine.plain(2, [7] * 20 + [5, 9, 9, 9, 9])
    usage = engine.plain(3, [7] * 20)
    assert (usage.num_cached_tokens, usage.num_recomputed_tokens) == (19, 0)
    assert engine.scheduler.stats().evictions == 0


def test_the_turn_of_another_tenant_ends_no_wait() -> None:
    engine = Engine(num_pages=40)
    engine.plain(1, [7] * 20, tenant="a")
    engine.plain(2, [7] * 20 + [5, 9], tenant="b")
    assert sorted(wait.tenant for wait in waits_of(engine)) == ["a", "b"]


def test_a_flood_of_prompts_takes_nothing_from_a_tenant_within_its_share() -> None:
    engine = Engine(num_pages=20)
    engine.plain(1, [7] * 60, tenant="quiet")
    for seq in range(2, 12):
        engine.plain(seq, [seq + 20] * 60, tenant="loud")
    assert engine.plain(20, [7] * 60 + [5, 9], tenant="quiet").num_cached_tokens == 60
    alone = Engine("lru", num_pages=20)
    alone.plain(1, [7] * 60, tenant="quiet")
    for seq in range(2, 12):
        alone.plain(seq, [seq + 20] * 60, tenant="loud")
    assert alone.plain(20, [7] * 60 + [5, 9], tenant="quiet").num_cached_tokens == 0, "by recency alone it is gone"


def test_an_idle_sequence_keeps_its_pages_until_others_need_them() -> None:
    engine = Engine(num_pages=12)
    engine.say(
        wire.Open(seq=1),
        wire.Append(seq=1, op=1, tokens=pack_tokens([1] * 30)),
        wire.Generate(seq=1, op=2, stop=StopParams(max_tokens=2)),
    )
    engine.run()
    sequence = engine.sequence(1)
    assert (sequence.state, len(sequence.table.pages), sequence.wait) == (SequenceState.IDLE, 4, None)
    engine.say(wire.Expect(seq=1, kind="people", expected_in_s=50.0))
    expected_s = engine.now + 50.0
    engine.plain(2, [2] * 80)
    assert sequence.wait is not None
    assert (sequence.wait.kind, sequence.wait.expected_s, sequence.wait.is_open) == ("people", expected_s, True)
    assert len(sequence.table.pages) == 0
    assert engine.cache.tiers.device.num_free < 12, "what was not needed is still found"


def test_a_sequence_that_is_unknown_cannot_be_expected() -> None:
    engine = Engine()
    engine.say(wire.Expect(seq=9, kind="http"))
    [(_, failed)] = engine.events
    assert isinstance(failed, wire.Failed)
    assert failed.error.kind == "unknown_handle"


@pytest.mark.parametrize("command", [wire.Cancel(seq=1), wire.Truncate(seq=1, num_tokens=30)])
def test_kv_that_was_given_up_is_not_computed_again_before_something_needs_it(command: wire.Command) -> None:
    engine = Engine()
    tokens = [1] * 40
    engine.say(
        wire.Open(seq=1),
        wire.Append(seq=1, op=1, tokens=pack_tokens(tokens)),
        wire.Generate(seq=1, op=2, stop=StopParams(max_tokens=1)),
    )
    engine.run()
    engine.plain(2, list(range(80)))
    sequence = engine.sequence(1)
    assert sequence.num_computed < 30  # most of it was given up for the other one
    engine.say(command)
    assert not engine.scheduler.has_work
    engine.say(wire.Generate(seq=1, op=3, stop=StopParams(max_tokens=1)))
    engine.run()
    [usage] = [e.usage for _, e in engine.events if isinstance(e, wire.Finished) and e.op == 3]
    assert usage.num_prompt_tokens == len(sequence.tokens) - 1
    assert usage.num_recomputed_tokens > 0


@pytest.mark.parametrize(("kind", "is_kept"), [("tts", False), ("shell", True)])
def test_the_kinds_that_the_heuristic_discards_are_its_argument(kind: str, is_kept: bool) -> None:
    engine = Engine(HeuristicPolicy({"tts"}))
    engine.say(
        wire.Open(seq=1),
        wire.Append(seq=1, op=1, tokens=pack_tokens([1] * 40)),
        wire.Generate(seq=1, op=2, stop=StopParams(max_tokens=1)),
        wire.Expect(seq=1, kind=kind),
    )
    engine.run()
    engine.plain(2, [7] * 10)
    assert (engine.sequence(1).num_computed > 0) is is_kept
    engine.say(wire.Generate(seq=1, op=3, stop=StopParams(max_tokens=1)))
    assert engine.sequence(1).place.line == (WARM if is_kept else COLD)


@pytest.mark.parametrize(
    "command",
    [wire.Cancel(seq=1), wire.Truncate(seq=1, num_tokens=30), wire.Generate(seq=1, op=4, num_generated=90)],
    ids=["cancelled", "cut", "failed"],
)
def test_a_parked_sequence_without_an_operation_does_not_wait_for_the_device(command: wire.Command) -> None:
    engine = Engine()
    engine.say(
        wire.Open(seq=1),
        wire.Append(seq=1, op=1, tokens=pack_tokens([1] * 40)),
        wire.Generate(seq=1, op=2, stop=StopParams(max_tokens=1)),
    )
    engine.run()
    engine.plain(2, list(range(60)))
    wait = engine.sequence(1).wait
    assert wait is not None
    assert wait.end is not None
    assert wait.kind == "program"
    engine.now += 5.0
    if not isinstance(command, wire.Generate):
        engine.say(wire.Generate(seq=1, op=3, stop=StopParams(max_tokens=1)))
        assert wait.kind == "queue"
        engine.now += 5.0
    changes = engine.cache.tiers.candidates.num_changes
    engine.say(command)
    assert engine.sequence(1).state is SequenceState.IDLE
    assert engine.sequence(1).wait is wait
    assert (wait.kind, wait.since_s, wait.expected_s) == ("program", engine.now, None)
    assert engine.cache.tiers.candidates.num_changes > changes


def test_a_sequence_whose_last_token_comes_after_its_preemption_does_not_wait_for_the_device() -> None:
    stepped = Stepped(num_pages=12)
    for seq in (1, 2):
        stepped.open(seq, [seq] * 20)
    stepped.generate(1, 20)
    ending = stepped.generate(2, 1)
    stepped.decide()
    reclaimer, victim = stepped.scheduler._state.reclaimer, stepped.sequence(2)
    stepped.now += 1.0
    reclaimer.begin_step(2, stepped.now)
    assert reclaimer._preempt(victim, stepped.sequence(1), stepped.now)
    assert victim.wait is not None
    assert victim.wait.kind == "queue"
    assert victim.wait.since_s == stepped.now, "its last use is its preemption, not its admission"
    stepped.complete()
    assert stepped.generations[ending].ending is not None
    assert victim.state is SequenceState.IDLE
    assert victim.wait.kind == "program"
    stepped.finish()
