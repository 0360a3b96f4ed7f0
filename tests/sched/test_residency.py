"""Commands on where KV is kept: what each was carried out for, or the name of what it was refused with."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from tests.sched.test_interception import Engine
from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache
from weft.cache.nodes import MAX_WAITS_PER_NODE
from weft.core import wire
from weft.core.cost.model import MoveBudget
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.sched.policies import make_policy
from weft.sched.scheduler import Scheduled, Scheduler, SchedulerConfig
from weft.sched.sequence import SequenceState


class Resident(Engine):
    """Pages of eight tokens, a host tier, and retains that may take half of the device."""

    def __init__(self, policy: str = "min_waste", *, num_pages: int = 12, host_pages: int = 24, fraction: float = 0.5):
        super().__init__(policy, num_pages=num_pages)
        config = SchedulerConfig(max_context=90, max_running=4, max_step_tokens=32, vocab_size=100)
        self.cache = KVCache(num_pages, host_pages, page_size=8, max_pinned_fraction=fraction)
        self.scheduler = Scheduler(config, self.cache, policy=make_policy(policy))
        self.ops = iter(range(1000, 2000))
        self.last_op = 0
        """Number of the command that was asked last."""

    def decide(self) -> Scheduled:
        scheduled = super().decide()
        self.events += scheduled.events.messages
        return scheduled

    def ask(self, kind: type[wire.CommandBase], /, client: int = 1, **fields: object) -> wire.Finished | wire.Failed:
        """The outcome of a command."""
        op = self.last_op = next(self.ops)
        self.say(kind(op=op, **fields), client=client)
        self.run()
        check_integrity(self.cache, [s.table for s in self.scheduler.sequences.open.values()])
        [ending] = [e for _, e in self.events if isinstance(e, wire.Finished | wire.Failed) and e.op == op]
        return ending

    def count(self, kind: type[wire.CommandBase], /, client: int = 1, **fields: object) -> int:
        ending = self.ask(kind, client, **fields)
        assert isinstance(ending, wire.Finished), ending
        return ending.count

    def refusal(self, kind: type[wire.CommandBase], /, **fields: object) -> tuple[str, str | None]:
        ending = self.ask(kind, **fields)
        assert isinstance(ending, wire.Failed), ending
        return ending.error.kind, ending.error.param

    def idle(self, seq: int, tokens: list[int], tenant: str = "") -> None:
        """An open sequence with these tokens and one that was generated, which has nothing to do."""
        self.say(
            wire.Open(seq=seq, tenant=tenant, namespace=tenant),
            wire.Append(seq=seq, op=10 * seq, tokens=pack_tokens(tokens)),
            wire.Generate(seq=seq, op=10 * seq + 1, stop=StopParams(max_tokens=1)),
        )
        self.run()

    def more(self, seq: int) -> None:
        self.say(wire.Generate(seq=seq, op=next(self.ops), stop=StopParams(max_tokens=1)))
        self.run()

    def on_device(self, tokens: list[int], tenant: str = "") -> int:
        """Pages of a prefix that are on the device."""
        match = self.cache.index.find(tenant, pack_tokens(tokens))
        return 0 if match is None else sum(n.num_pages for n in [*match.path, match.child] if n and n.on_device)


A, B, C = [1] * 32, [2] * 32, [3] * 32


def prefix(tokens: list[int], tenant: str = "") -> dict[str, object]:
    return {"tokens": pack_tokens(tokens), "namespace": tenant}


def test_a_retained_prefix_goes_after_one_that_was_used_later_until_its_time_is_over() -> None:
    engine = Resident(host_pages=0)
    engine.plain(1, A)
    assert engine.count(wire.Retain, **prefix(A), ttl_s=100.0, weight=50.0) == 4
    engine.now += 50.0
    engine.plain(2, B)
    engine.plain(3, [4] * 60)
    assert (engine.on_device(A), engine.on_device(B)) == (4, 0)
    engine.now += 100.0
    engine.plain(4, C)
    engine.plain(5, [5] * 75)
    assert engine.on_device(A) == 0


def test_a_pin_stays_while_newcomers_wait_and_is_broken_only_for_a_sequence_that_runs() -> None:
    engine = Resident(host_pages=0, fraction=1.0)
    engine.plain(1, A)
    engine.plain(2, B[:16])
    assert engine.count(wire.Retain, **prefix(A), ttl_s=1e9, weight=math.inf) == 4
    assert engine.count(wire.Retain, **prefix(B[:16]), ttl_s=1e9, weight=math.inf) == 2
    engine.plain(3, [4] * 40)
    assert (engine.on_device(A), engine.on_device(B[:16])) == (4, 2)
    engine.plain(4, [5] * 55)  # seven pages with what it generates: one more than are free
    assert (engine.on_device(A), engine.on_device(B[:16])) == (4, 0), "the cheapest is broken, and no other"
    assert engine.count(wire.EndRetain, retain=1001) == 0, "it has ended"
    assert engine.count(wire.EndRetain, retain=1000) == 4
    assert engine.scheduler.stats().retains_ended == {"broken": 1, "released": 1}
    engine.plain(5, [6] * 80)
    assert engine.on_device(A) == 0


def test_no_pin_breaks_beside_one_that_is_enough() -> None:
    engine = Resident(host_pages=0, fraction=1.0)
    small = [[3] * 8, [4] * 8]
    for seq, tokens in enumerate([*small, A], 1):
        engine.plain(seq, tokens)
        engine.count(wire.Retain, **prefix(tokens), ttl_s=1e9, weight=math.inf)
    engine.plain(4, [5] * 75)  # ten pages in chunks of four: six are free, the second chunk lacks two, the third two
    assert [engine.on_device(tokens) for tokens in small] == [1, 1]
    assert engine.scheduler.stats().retains_ended == {"broken": 1}


def test_shared_pages_count_once_and_a_tenant_has_a_share() -> None:
    engine = Resident(num_pages=24, host_pages=0, fraction=8 / 24)
    engine.plain(1, A + B[:16], tenant="a")
    engine.plain(2, A + C[:16], tenant="a")
    assert engine.count(wire.Retain, **prefix(A + B[:16], "a"), ttl_s=50.0) == 6
    assert engine.count(wire.Retain, **prefix(A + C[:16], "a"), ttl_s=60.0) == 6, "four of them are shared"
    assert engine.cache.retention.num_pages == 8
    engine.plain(3, [9] * 16, tenant="a")
    assert engine.refusal(wire.Retain, **prefix([9] * 16, "a"), ttl_s=50.0) == ("limit_exceeded", "retained_pages")
    engine.plain(4, [9] * 16, tenant="b")
    assert engine.count(wire.Retain, **prefix([9] * 16, "b"), ttl_s=50.0) == 2
    assert engine.cache.retention.num_pages == 8, "the retain that would end first made room, two pages of its own"
    assert engine.count(wire.EndRetain, retain=1000) == 0
    assert engine.count(wire.EndRetain, retain=1001) == 6


def test_a_retained_sequence_keeps_its_kv_while_it_waits_and_after_its_release() -> None:
    engine = Resident(host_pages=0)
    engine.idle(1, A)
    engine.idle(2, B)
    engine.now += 1.0
    assert engine.count(wire.Retain, seq=1, ttl_s=1e6, weight=1e6) == 4
    engine.plain(3, [4] * 60)
    sequence = engine.sequence(1)
    assert sequence.wait is not None
    assert (sequence.wait.weight, engine.on_device(A)) == (1e6, 4)
    engine.more(1)
    assert sequence.wait is None
    engine.say(wire.Release(seq=1))
    engine.now += 10.0
    engine.plain(6, C)
    engine.plain(4, [5] * 60)
    assert (engine.on_device(A), engine.on_device(C)) == (4, 0), "it goes after what was used later"
    assert engine.count(wire.EndRetain, retain=1000) > 0
    engine.plain(5, [6] * 80)
    assert engine.on_device(A) == 0


def test_a_pinned_sequence_is_locked_while_it_is_parked_and_returns() -> None:
    engine = Resident(host_pages=0)
    engine.idle(1, A)
    assert engine.count(wire.Retain, seq=1, ttl_s=1e6, weight=math.inf) == 4
    engine.plain(2, [4] * 50)
    sequence = engine.sequence(1)
    assert sequence.wait is not None
    assert sequence.wait.end is not None
    assert sequence.wait.end.locks == 1
    before = engine.scheduler.stats().prefill_tokens
    engine.more(1)
    assert engine.scheduler.stats().prefill_tokens - before == 1, "nothing was given up"
    assert engine.cache.retention.pinned() == []
    assert engine.count(wire.Retain, seq=1, ttl_s=1e6, weight=1.0) == 5, "it replaces the pin"
    assert engine.count(wire.EndRetain, retain=1000) == 0


def test_retains_expire_though_nothing_runs() -> None:
    engine = Resident(num_pages=24, host_pages=0, fraction=8 / 24)
    for seq, tokens in enumerate((A, B, C), 1):
        engine.plain(seq, tokens, tenant="a")
    for tokens in (A, B):
        assert engine.count(wire.Retain, **prefix(tokens, "a"), ttl_s=5.0) == 4
    engine.now += 60.0
    assert engine.count(wire.Retain, **prefix(C, "a"), ttl_s=5.0) == 4, "the share is free again"
    engine.now += 60.0
    assert engine.count(wire.EndRetain, retain=engine.last_op) == 0, "it had ended"


def test_retains_that_end_are_counted_by_cause() -> None:
    engine = Resident(num_pages=24, host_pages=0, fraction=8 / 24)
    ended: dict[str, int] = {}

    def ends(cause: str) -> None:
        ended[cause] = ended.get(cause, 0) + 1
        assert engine.scheduler.stats().retains_ended == ended

    def retain(tokens: list[int], tenant: str, *, client: int = 1, ttl_s: float = 1e6) -> int:
        engine.count(wire.Retain, client, **prefix(tokens, tenant), ttl_s=ttl_s)
        return engine.last_op

    engine.plain(1, A, tenant="a")
    engine.count(wire.EndRetain, retain=retain(A, "a"))
    ends("released")
    retain(A, "a", ttl_s=5.0)
    engine.now += 5.0
    engine.plain(2, C, tenant="a")
    ends("expired")
    retain(A, "a", client=2)
    engine.scheduler.drop_client(2, engine.now)
    ends("disconnected")
    retain(A, "a")
    retain(C, "a")
    engine.plain(3, B, tenant="b")
    retain(B, "b")
    ends("displaced")
    engine.say(wire.ResetPrefixCache())
    ended["reset"] = 1
    ends("reset")
    engine.idle(4, A, tenant="a")
    engine.count(wire.Retain, seq=4, ttl_s=1e6)
    engine.count(wire.Retain, seq=4, ttl_s=1e6)
    ends("replaced")
    assert engine.count(wire.EndRetain, retain=engine.last_op - 1) == 0, "it had ended"
    engine.count(wire.EndRetain, retain=engine.last_op - 1)
    ends("released")
    engine.count(wire.Hold, seq=4, ttl_s=1e6)
    engine.plain(5, [*A, 5, 6, 7], tenant="a")
    ends("continued")


def test_the_end_of_a_retain_tells_how_many_of_its_pages_were_still_kept() -> None:
    engine = Resident(host_pages=0)
    engine.plain(1, A + B[:16])
    assert engine.count(wire.Retain, **prefix(A + B[:16]), ttl_s=1e6, weight=1e-6) == 6
    op = engine.last_op
    engine.plain(2, [4] * 70)
    kept = engine.on_device(A + B[:16])
    assert 0 < kept < 6
    assert engine.count(wire.EndRetain, retain=op) == kept
    engine.plain(3, A)
    engine.count(wire.Retain, **prefix(A), ttl_s=1e6, weight=1e-6)
    op = engine.last_op
    engine.plain(4, [5] * 89)
    assert engine.count(wire.EndRetain, retain=op) == 0
    assert engine.scheduler.stats().retains_ended == {"given_up": 1, "released": 1}
    engine = Resident(num_pages=40)
    engine.idle(5, B[:20])
    assert engine.count(wire.Retain, seq=5, ttl_s=1e6) == 3
    op = engine.last_op
    engine.say(wire.Truncate(seq=5, num_tokens=10))
    assert engine.count(wire.EndRetain, retain=op) == 2, "the sequence has its pages"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ttl_s": 1.0, "weight": 0.0}, "weight"),
        ({"ttl_s": 1.0, "weight": math.nan}, "weight"),
        ({"ttl_s": math.nan}, "ttl_s"),
        ({"ttl_s": -1.0}, "ttl_s"),
        ({"ttl_s": 1.0, "tokens": b"abc"}, "tokens"),
        ({"ttl_s": 1.0, "tokens": pack_tokens([8] * 20)}, "tokens"),
        ({"ttl_s": 1.0, "namespace": "unknown"}, "tokens"),
    ],
)
def test_a_retain_that_cannot_be_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    engine = Resident()
    engine.plain(1, A)
    assert engine.refusal(wire.Retain, **{**prefix(A), **fields}) == ("invalid_request", param)
    assert engine.refusal(wire.Retain, seq=7, ttl_s=1.0) == ("unknown_handle", None)
    assert engine.refusal(wire.EndRetain, retain=77) == ("unknown_handle", None)


@pytest.mark.parametrize("policy", ["discard", "improved_discard"])
def test_a_policy_that_finds_nothing_again_refuses_to_keep_anything(policy: str) -> None:
    engine = Resident(policy)
    engine.idle(1, A)
    assert engine.refusal(wire.Retain, seq=1, ttl_s=1.0) == ("unsupported", "intercept_policy")
    assert engine.refusal(wire.Hold, seq=1, ttl_s=1.0) == ("unsupported", "intercept_policy")
    assert not engine.scheduler.sequences.open, "it is released all the same"


def test_a_hold_tells_how_many_pages_it_keeps_or_that_the_share_is_used_up() -> None:
    engine = Resident(num_pages=24, host_pages=0, fraction=6 / 24)
    engine.idle(1, A)
    engine.idle(2, B)
    assert engine.count(wire.Hold, seq=1, ttl_s=9.0) == 4
    assert engine.refusal(wire.Hold, seq=2, ttl_s=9.0) == ("limit_exceeded", "retained_pages")
    assert engine.refusal(wire.Hold, seq=2, ttl_s=9.0) == ("unknown_handle", None)
    assert engine.scheduler.stats().num_held == 1


def test_a_demote_takes_the_budget_of_as_many_steps_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.sched.interception.IDLE_COPIES", 2)
    engine = Resident(num_pages=40)
    engine.idle(1, [1] * 50)
    engine.say(wire.Expect(seq=1, kind="http"))
    op = next(engine.ops)
    engine.say(wire.Demote(op=op, seq=1))
    moved = []
    while engine.scheduler.has_work:
        step = engine.turn()
        moved.append(len(step.swap_outs) if step.swap_outs is not None else 0)
    assert moved == [2, 2, 2, 1]
    [done] = [e for _, e in engine.events if isinstance(e, wire.Finished) and e.op == op]
    assert done.count == 7, "the last page, which is not full, too"
    assert engine.on_device([1] * 50) == 0
    assert engine.cache.tiers.uses.moved_pages["http", "host"] == 7, "counted by what the sequence waits for"
    assert engine.count(wire.Demote, seq=1) == 0, "nothing is left on the device"
    before = engine.scheduler.stats()
    engine.more(1)
    after = engine.scheduler.stats()
    assert after.prefill_tokens - before.prefill_tokens <= 2
    assert after.swapped_in_pages - before.swapped_in_pages == 7


def test_what_has_to_move_does_so_in_every_step_and_copies_are_made_ahead_once_in_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.sched.interception.Interception._move_budget", lambda _: MoveBudget(pages=2, steps=4))
    monkeypatch.setattr("weft.sched.interception.HORIZON_STEPS", 100)
    engine = Resident("lru", num_pages=40)
    for seq in (11, 12, 13):
        engine.plain(seq, [seq] * 23)
    engine.say(wire.Open(seq=2), wire.Append(seq=2, op=next(engine.ops), tokens=pack_tokens([2] * 8)))
    engine.say(wire.Generate(seq=2, op=next(engine.ops), stop=StopParams(max_tokens=20)))
    ahead = [len(engine.turn().swap_outs) for _ in range(18)]
    with_pages = [index for index, count in enumerate(ahead) if count]
    assert len(with_pages) == 2
    assert {after - before for before, after in pairwise(with_pages)} == {4}
    engine.run()
    engine.idle(3, [3] * 50)
    engine.say(wire.Demote(op=next(engine.ops), seq=3))
    moved = []
    while engine.scheduler.has_work:
        moved.append(len(engine.turn().swap_outs))
    assert moved == [2, 2, 2, 1]


def test_a_prefetch_brings_a_prefix_back_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.sched.interception.IDLE_COPIES", 3)
    engine = Resident(num_pages=40)
    engine.plain(1, [1] * 64)
    assert engine.count(wire.Demote, **prefix([1] * 64)) == 8
    assert engine.on_device([1] * 64) == 0
    assert engine.count(wire.Prefetch, **prefix([1] * 64)) == 8
    assert engine.on_device([1] * 64) == 8
    assert engine.count(wire.Prefetch, **prefix([1] * 64)) == 0
    before = engine.scheduler.stats().swapped_in_pages
    assert engine.plain(2, [1] * 64 + [2]).num_cached_tokens == 64
    assert engine.scheduler.stats().swapped_in_pages == before


def test_a_prefetch_brings_what_there_is_room_for_and_pins_what_it_brought() -> None:
    engine = Resident(num_pages=12, fraction=1.5)
    engine.plain(1, [1] * 64)
    assert engine.count(wire.Retain, **prefix([1] * 64), ttl_s=1e9, weight=math.inf) == 8
    assert engine.refusal(wire.Demote, **prefix([1] * 64)) == ("invalid_request", None)
    assert engine.count(wire.EndRetain, retain=1000) == 8
    assert engine.count(wire.Demote, **prefix([1] * 64)) == 8
    assert engine.count(wire.Retain, **prefix([1] * 64), ttl_s=1e9, weight=math.inf) == 8
    assert engine.cache.retention.pinned() == []
    engine.plain(2, [2] * 56)
    assert engine.count(wire.Retain, **prefix([2] * 56), ttl_s=1e9, weight=math.inf) == 7
    assert engine.count(wire.Prefetch, **prefix([1] * 64)) == 5, "twelve, but for seven that are pinned"
    assert engine.on_device([1] * 64) == 5
    assert engine.refusal(wire.Prefetch, **prefix([1] * 64)) == ("out_of_pages", None)
    assert sum(node.depth_pages for node in engine.cache.retention.pinned()) == 12


def test_a_move_that_cannot_be_is_refused_by_name() -> None:
    engine = Resident(host_pages=0)
    engine.idle(1, A)
    assert engine.refusal(wire.Demote, seq=1) == ("unsupported", "host_pages")
    engine = Resident(host_pages=3)
    engine.idle(1, A)
    engine.say(wire.Open(seq=2))
    assert engine.count(wire.Demote, seq=2) == 0, "it has no KV"
    engine.say(
        wire.Append(seq=1, op=5, tokens=pack_tokens([7] * 9)),
        wire.Generate(seq=1, op=6, stop=StopParams(max_tokens=5)),
    )
    engine.turn()
    assert engine.sequence(1).state is SequenceState.RUNNING
    assert engine.refusal(wire.Demote, seq=1) == ("invalid_request", "seq")
    engine.say(wire.Fork(seq=1, child=3))
    engine.more(3)
    assert engine.count(wire.Demote, seq=1) < 6, "the fork shares the rest"


def test_a_client_that_is_gone_retains_and_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.sched.interception.IDLE_COPIES", 1)
    engine = Resident(fraction=1.0)
    engine.plain(1, A)
    assert engine.count(wire.Retain, client=2, **prefix(A), ttl_s=1e9, weight=math.inf) == 4
    engine.plain(2, B)
    engine.say(wire.Demote(op=9, **prefix(B)), client=2)  # type: ignore[arg-type]
    engine.turn()
    engine.scheduler.drop_client(2, engine.now)
    assert not engine.scheduler.has_work
    assert engine.cache.retention.num_pages == 0
    check_integrity(engine.cache, [])


def test_a_return_that_is_announced_with_a_number_is_answered() -> None:
    engine = Resident()
    engine.idle(1, A)
    assert engine.count(wire.Expect, seq=1, kind="http", expected_in_s=3.0) == 0
    assert engine.refusal(wire.Expect, seq=1, kind="http", expected_in_s=-3.0) == ("invalid_request", "expected_in_s")


def test_the_part_of_a_pin_on_the_host_stays_there() -> None:
    engine = Resident(host_pages=8)
    engine.plain(1, A)
    assert engine.count(wire.Demote, **prefix(A)) == 4
    assert engine.count(wire.Retain, **prefix(A), ttl_s=1e9, weight=math.inf) == 4
    for seq in range(2, 8):
        engine.plain(seq, [seq] * 70)
    match = engine.cache.index.find("", pack_tokens(A))
    assert match is not None
    assert match.num_pages == 4


def test_a_demote_does_not_take_the_room_of_a_pin_on_the_host() -> None:
    engine = Resident(host_pages=4)
    engine.plain(1, A)
    assert engine.count(wire.Demote, **prefix(A)) == 4
    assert engine.count(wire.Retain, **prefix(A), ttl_s=1e9, weight=math.inf) == 4
    engine.plain(2, B)
    assert engine.refusal(wire.Demote, **prefix(B)) == ("out_of_pages", None)


def test_a_second_copy_goes_before_what_only_the_host_has_and_is_retained() -> None:
    engine = Resident(host_pages=8)
    engine.plain(1, A)
    assert engine.count(wire.Demote, **prefix(A)) == 4
    assert engine.count(wire.Retain, **prefix(A), ttl_s=1e9, weight=1.0) == 4
    engine.plain(2, B)
    assert engine.count(wire.Demote, **prefix(B)) == 4
    assert engine.count(wire.Prefetch, **prefix(B)) == 4
    engine.plain(3, C)
    assert engine.count(wire.Demote, **prefix(C)) == 4
    for tokens in (A, B, C):
        match = engine.cache.index.find("", pack_tokens(tokens))
        assert match is not None
        assert match.num_pages == 4


def test_every_hold_of_the_same_tokens_keeps_them() -> None:
    engine = Resident(num_pages=40)
    for seq in range(1, MAX_WAITS_PER_NODE + 3):
        engine.idle(seq, A)
        engine.count(wire.Hold, seq=seq, ttl_s=1e6)
    assert engine.cache.retention.num_held == MAX_WAITS_PER_NODE + 2
