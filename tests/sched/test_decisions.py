"""What a `Scheduler` decides, read from its steps and events. There is no engine and no worker: results are made up."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import weft.sched
from weft.cache.manager import KVCache
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.core.step import Step, StepResult
from weft.sched.reclaim_policy import ByRank, Holder
from weft.sched.scheduler import Scheduled, Scheduler, SchedulerConfig
from weft.sched.sequence import Sequence, SequenceState


class Alone:
    """A scheduler, and steps whose samplers all give token 5."""

    def __init__(self, *, num_pages: int = 64, **changes: object):
        config = {"max_context": 512, "max_running": 4, "max_step_tokens": 32, "vocab_size": 100}
        self.cache = KVCache(num_pages, page_size=8)
        self.scheduler = Scheduler(SchedulerConfig(**{**config, **changes}), self.cache)  # type: ignore[arg-type]
        self.now = 0.0
        self.events: list[tuple[int, wire.Event]] = []

    def say(self, *commands: wire.Command, client: int = 1) -> None:
        self.events += self.scheduler.handle(client, commands, self.now).messages

    def request(self, seq: int, num_tokens: int, limit: int = 100, *, first: int = 7, priority: int = 0) -> None:
        self.say(
            wire.Open(seq=seq, priority=priority),
            wire.Append(seq=seq, op=10 * seq, tokens=pack_tokens([first, *[seq] * (num_tokens - 1)])),
            wire.Generate(seq=seq, op=10 * seq + 1, stop=StopParams(max_tokens=limit)),
        )

    def decide(self) -> Scheduled:
        self.now += 1.0
        scheduled = self.scheduler.schedule(self.now)
        if not scheduled.step.is_empty:
            self.scheduler.launched(scheduled.step.step_id)
        return scheduled

    def complete(self, scheduled: Scheduled) -> None:
        step = scheduled.step
        count = 0 if step.sampling is None else len(step.sampling.rows)
        result = StepResult(step.step_id, tokens=np.full(count, 5, np.int32))
        self.events += self.scheduler.update(scheduled.flight, result, self.now).messages

    def turn(self) -> Step:
        scheduled = self.decide()
        self.complete(scheduled)
        return scheduled.step

    def sequence(self, handle: int) -> Sequence:
        return self.scheduler.sequences.open[1, handle]


def rows(step: Step) -> list[int]:
    """Query tokens of each row."""
    return [] if step.forward is None else np.diff(step.forward.q_indptr).tolist()


def test_a_prompt_is_computed_in_chunks_of_the_budget_then_one_token_a_step() -> None:
    alone = Alone()
    alone.request(1, 70, limit=3)
    assert [rows(alone.turn()) for _ in range(6)] == [[32], [32], [6], [1], [1], []]
    tokens = [event.token for _, event in alone.events if isinstance(event, wire.Token)]
    [end] = [event for _, event in alone.events if isinstance(event, wire.Finished)]
    assert (tokens, end.reason, end.usage.num_prompt_tokens) == ([5, 5, 5], "length", 70)


def test_decodes_come_first_then_chunks_then_admissions_within_the_budget() -> None:
    alone = Alone()
    alone.request(1, 4)
    alone.turn()
    alone.request(2, 40, first=8)
    alone.request(3, 20, first=9)
    assert rows(alone.turn()) == [1, 31]
    assert rows(alone.turn()) == [1, 9, 20]
    assert rows(alone.turn()) == [1, 1, 1]


def test_the_next_step_is_decided_before_the_results_of_the_last() -> None:
    alone = Alone()
    alone.request(1, 10)
    first, second = alone.decide(), alone.decide()
    assert rows(second.step) == [1]
    assert second.step.forward is not None
    assert second.step.forward.token_ids.tolist() == [-1], "the token is on the device"
    alone.say(wire.Cancel(seq=1))
    alone.complete(first)
    alone.complete(second)
    assert not [event for _, event in alone.events if isinstance(event, wire.Token)], "late tokens are dropped"
    assert alone.scheduler.schedule(9.0).step.is_empty


def test_a_row_is_deferred_for_a_prefix_in_flight_and_takes_it_over() -> None:
    alone = Alone(max_step_tokens=64)
    for seq in (1, 2):
        alone.say(
            wire.Open(seq=seq),
            wire.Append(seq=seq, op=seq, tokens=pack_tokens([*range(24), 50 + seq, 9])),
            wire.Generate(seq=seq, op=10 + seq),
        )
    assert rows(alone.turn()) == [26]
    assert alone.sequence(2).state is SequenceState.DEFERRED
    assert rows(alone.turn()) == [1, 2], "three full pages were found"


def test_a_write_preempts_the_running_sequence_of_the_last_rank() -> None:
    alone = Alone(num_pages=8, max_step_tokens=64)
    alone.request(1, 23, first=8)
    alone.turn()
    alone.now += 1
    alone.request(2, 15, first=9)
    alone.turn()
    for _ in range(30):
        alone.turn()
        if alone.sequence(2).slot < 0:
            break
    assert alone.sequence(1).state is SequenceState.RUNNING
    assert alone.sequence(2).state is SequenceState.WAITING
    assert alone.sequence(2).num_computed == 0
    assert alone.scheduler.stats().preemptions == 1


def test_idle_sequences_give_pages_up_before_anything_runs_less() -> None:
    alone = Alone(num_pages=8, max_step_tokens=64)
    alone.request(1, 30, limit=1)
    alone.turn()
    assert alone.sequence(1).state is SequenceState.IDLE
    alone.request(2, 40, limit=1, first=9)
    assert rows(alone.turn()) == [40]
    assert alone.sequence(1).num_computed == 0
    assert alone.scheduler.stats().preemptions == 0


def test_recomputation_takes_what_decoding_sequences_leave_of_the_saturation_point() -> None:
    alone = Alone(num_pages=24, max_step_tokens=64, saturation_tokens=20)
    alone.request(1, 60, limit=1)
    alone.request(2, 180, limit=1, first=8)
    while alone.scheduler.has_work:
        alone.turn()
    alone.say(wire.Release(seq=2), wire.ResetPrefixCache())
    assert alone.sequence(1).num_computed == 0, "it gave its pages up"
    for seq in (3, 4):
        alone.request(seq, 10, first=10 + seq)
        alone.turn()
    before = alone.scheduler.stats().recomputed_tokens
    alone.say(wire.Generate(seq=1, op=19, stop=StopParams(max_tokens=1)))
    assert [rows(alone.turn()) for _ in range(4)] == [[1, 1, 18], [1, 1, 18], [1, 1, 18], [1, 1, 7]]
    assert alone.scheduler.stats().recomputed_tokens - before == 60


def test_prompts_get_a_page_however_many_decode() -> None:
    alone = Alone(max_running=8, max_step_tokens=64, saturation_tokens=6)
    for seq in range(1, 7):
        alone.request(seq, 2, first=20 + seq)
        alone.turn()
    alone.request(7, 30, first=9)
    assert [rows(alone.turn()) for _ in range(4)] == [[*[1] * 6, size] for size in (8, 8, 8, 6)]


def test_a_client_that_is_dropped_leaves_nothing_to_decide() -> None:
    alone = Alone()
    alone.request(1, 40)
    alone.say(wire.Fork(seq=1, child=2))
    flight = alone.decide()
    alone.scheduler.drop_client(1, alone.now)
    alone.complete(flight)
    assert len(alone.scheduler.sequences) == 0
    assert not alone.scheduler.has_work
    tiers = alone.cache.tiers
    assert tiers.device.num_free + tiers.num_evictable == 64


@pytest.mark.parametrize("seed", range(3))
def test_the_same_calls_give_the_same_steps(seed: int) -> None:
    def steps() -> list[object]:
        alone = Alone(num_pages=24)
        random = np.random.default_rng(seed)
        found: list[object] = []
        for seq in range(1, 12):
            alone.request(seq, int(random.integers(1, 60)), int(random.integers(1, 20)), first=int(random.integers(3)))
            step = alone.turn()
            forward = step.forward
            found.append(None if forward is None else (forward.token_ids.tolist(), forward.kv_page_ids.tolist()))
        return found

    assert steps() == steps()


class FakeView:
    """A view of named holders. Tenant `loud` uses 4 pages beyond its share, `near` 1; room is for 2."""

    def __init__(self, purpose: str, missing: int, needy: Holder | None, *holders: Holder, pins: bool = False):
        self.purpose, self.missing, self.needy, self.has_pins = purpose, missing, needy, pins
        self._holders = holders

    @property
    def fits_share(self) -> bool:
        return self.missing <= 2

    def excess(self, tenant: str) -> float:
        return {"loud": 4, "near": 1}.get(tenant, -2)

    def _of(self, kind: str) -> list[Holder]:
        return [holder for holder in self._holders if holder.kind == kind]

    def waiting(self):  # type: ignore[no-untyped-def]
        return iter(self._of("waiting"))

    def running(self):  # type: ignore[no-untyped-def]
        return iter(self._of("running"))


EARLY, LATE = Holder("waiting", 3, 3, (False, 0), (4.0, 1, 3)), Holder("waiting", 4, 3, (False, 0), (5.0, 1, 4))
FIRST = Holder("waiting", 2, 9, (False, 0), (2.0, 1, 2))
NEEDY = Holder("running", 5, 3, (False, 0), (3.0, 1, 5))
OTHER = Holder("running", 8, 3, (False, 0), (7.0, 1, 8), "loud")
LARGER = Holder("running", 9, 5, (False, 0), (9.0, 1, 9), "loud")
URGENT = Holder("running", 10, 3, (False, -1), (9.5, 1, 10), "loud")
NEAR = (
    Holder("running", 11, 3, (False, 0), (7.1, 1, 11), "near"),
    Holder("running", 12, 3, (False, 0), (7.2, 1, 12), "near"),
)
OLDER, NEWER = Holder("running", 6, 3, (False, 0), (1.0, 1, 6)), Holder("running", 7, 3, (False, 2), (8.0, 1, 7))


@pytest.mark.parametrize(
    ("purpose", "missing", "holders", "expected"),
    [
        ("write", 1, (EARLY, LATE, NEWER), LATE),
        ("write", 1, (OLDER, NEEDY, NEWER), NEWER),
        ("write", 1, (OLDER, NEEDY), None),
        ("write", 1, (NEEDY,), Holder("space")),
        ("admit", 3, (EARLY, OLDER), EARLY),
        ("admit", 4, (EARLY, OLDER), None),
        ("admit", 4, (EARLY, NEWER), NEWER),
        ("admit", 0, (EARLY, NEWER), NEWER),
        ("admit", 3, (FIRST, OLDER), None),
        ("admit", 6, (FIRST, EARLY, LATE, OLDER), LATE),
        ("start", 9, (FIRST, EARLY), EARLY),
        ("start", 9, (FIRST,), None),
        ("spaces", 3, (EARLY, NEWER), EARLY),
        ("spaces", 4, (EARLY, NEWER), None),
        ("own", 1, (OTHER, EARLY, NEWER), EARLY),
        ("own", 1, (OTHER, FIRST, NEWER), NEWER),
        ("own", 1, (OTHER, FIRST, OLDER), None),
        ("excess", 2, (EARLY, NEWER, OTHER, LARGER, URGENT), LARGER),
        ("excess", 2, (EARLY, NEWER, OTHER), OTHER),
        ("excess", 2, (EARLY, NEWER, LARGER), None),
        ("excess", 3, (OTHER, LARGER), None),
        ("excess", 1, (*NEAR, OLDER), NEAR[1]),
        ("excess", 2, (*NEAR, OLDER), None),
    ],
)
def test_who_gives_up_pages(purpose: str, missing: int, holders: tuple[Holder, ...], expected: Holder | None) -> None:
    view = FakeView(purpose, missing, None if purpose == "spaces" else NEEDY, *holders)
    assert ByRank().choose(view)[:1] == ([] if expected is None else [expected])  # type: ignore[arg-type]


def test_pins_are_broken_before_spaces_are_ended() -> None:
    assert ByRank().choose(FakeView("write", 1, NEEDY, NEEDY, pins=True)) == [Holder("pin")]  # type: ignore[arg-type]


def test_those_that_wait_give_the_last_first() -> None:
    view = FakeView("admit", 6, NEEDY, EARLY, LATE, FIRST, NEWER)
    assert ByRank().choose(view) == [LATE, EARLY]  # type: ignore[arg-type]


KV_WRITERS = ("adopt_kv", "begin_kv", "finish_kv", "cut_kv", "begin_decodes", "finish_decodes")


def test_four_methods_and_their_forms_for_a_step_alone_change_the_kv_counters() -> None:
    changed = []
    for path in sorted(Path(weft.sched.__file__).parent.rglob("*.py")):
        for function in [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]:
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and node.attr in ("num_computed", "num_written")
                ):
                    changed.append((path.name, function.name))
    assert set(changed) == {("sequence.py", name) for name in KV_WRITERS}


@pytest.mark.parametrize(
    ("packed", "message"), [(b"abc", "3 bytes"), (b"", "no tokens"), (pack_tokens([7, 100]), "100")]
)
def test_what_follows_a_prompt_that_cannot_be_read_fails_as_it_does(packed: bytes, message: str) -> None:
    alone = Alone()
    alone.say(
        wire.Open(seq=1),
        wire.Append(seq=1, op=1, tokens=pack_tokens([7])),
        wire.Append(seq=1, op=2, tokens=packed),
        wire.Generate(seq=1, op=3, stop=StopParams(max_tokens=1)),
    )
    failed = [event for _, event in alone.events if isinstance(event, wire.Failed)]
    assert [event.op for event in failed] == [2, 3]
    assert all(message in event.error.message for event in failed)
    assert not alone.scheduler.has_work


def test_a_sequence_is_not_cut_to_more_tokens_than_it_has() -> None:
    alone = Alone()
    alone.say(wire.Open(seq=1), wire.Truncate(seq=1, num_tokens=9))
    [failed] = [event for _, event in alone.events if isinstance(event, wire.Failed)]
    assert (failed.error.kind, failed.error.param) == ("invalid_request", "num_tokens")
