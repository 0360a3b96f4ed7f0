"""`Expect` and `Release`, said twice, too late, or of sequences that there are not, in every state of a sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sched import test_moving_pages as moving
from tests.sched.stepping import Stepped
from weft.core import wire
from weft.sched.sequence import SequenceState

EXPECT = wire.Expect(seq=1, kind="http", expected_in_s=5.0)


def prefilling(setup: moving.Setup) -> Stepped:
    stepped = Stepped()
    stepped.open(1, list(range(150)))
    stepped.generate(1, 4)
    stepped.turn()
    assert stepped.sequence(1).num_computed < 150
    return stepped


def decoding(setup: moving.Setup) -> Stepped:
    stepped = Stepped()
    stepped.open(1, list(range(20)))
    stepped.generate(1, 40)
    for _ in range(3):
        stepped.turn()
    assert stepped.sequence(1).decoding
    return stepped


def empty(setup: moving.Setup) -> Stepped:
    stepped = Stepped()
    stepped.open(1, [])
    return stepped


def deferred(setup: moving.Setup) -> Stepped:
    stepped = Stepped()
    stepped.open(2, [*range(100), 1])
    stepped.open(1, [*range(100), 2])
    stepped.generate(2, 3)
    stepped.generate(1, 3)
    stepped.turn()
    stepped.turn()
    assert stepped.sequence(1).state is SequenceState.DEFERRED
    return stepped


def pending_fork(setup: moving.Setup) -> Stepped:
    stepped = Stepped()
    stepped.open(2, list(range(150)))
    stepped.generate(2, 3)
    stepped.known[1] = list(range(150))
    stepped.say(wire.Truncate(seq=2, num_tokens=150), wire.Fork(seq=2, child=1))
    stepped.generate(2, 3)
    stepped.turn()
    return stepped


def unborn(setup: moving.Setup) -> Stepped:
    stepped = Stepped()
    stepped.open(2, list(range(50)))
    stepped.generate(2, 3)
    stepped.fork(2, 1)
    assert stepped.sequence(1).unborn
    return stepped


def failed(setup: moving.Setup) -> Stepped:
    stepped = Stepped()
    stepped.open(1, [1, 2, 999_999])
    assert stepped.sequence(1).failure is not None
    return stepped


STATES = [*moving.STATES, empty, prefilling, decoding, deferred, pending_fork, unborn, failed]


def failures(stepped: Stepped) -> list[str]:
    return [event.error.kind for event in stepped.others if isinstance(event, wire.Failed)]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_expect_changes_what_is_told_and_nothing_else(
    state: Callable[[moving.Setup], Stepped], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = state(moving.Setup(monkeypatch, is_masked=False))
    known = failures(stepped)
    sequence = stepped.sequence(1)
    stepped.say(EXPECT, EXPECT)
    stepped.turn()
    stepped.say(EXPECT)
    assert (sequence.wait_kind, sequence.expected_s) == ("http", stepped.now + 5.0)
    if sequence.wait is not None:
        is_idle = sequence.state is SequenceState.IDLE
        assert sequence.wait.kind == ("http" if is_idle else "queue"), "with work to do it waits for the device alone"
    assert failures(stepped) == known
    stepped.finish()


@pytest.mark.parametrize("kind", ["", "chat"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_release_is_heard_once(
    state: Callable[[moving.Setup], Stepped], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = state(moving.Setup(monkeypatch, is_masked=False))
    known = failures(stepped)
    release = wire.Release(seq=1, kind=kind, expected_in_s=2.0 if kind else None)
    stepped.say(release, release)
    stepped.known.pop(1)
    stepped.turn()
    stepped.say(release, wire.Hold(seq=1, ttl_s=3.0))
    assert failures(stepped) == known, "what was released is as its client wishes"
    for late in (EXPECT, wire.Cancel(seq=1), wire.SetPriority(seq=1, priority=2), wire.Fork(seq=1, child=77)):
        stepped.say(late)
    assert failures(stepped)[len(known) :] == ["unknown_handle"] * 4
    waits = [w for tree in stepped.cache.trees().values() for n in tree.nodes() for w in n.waits.values()]
    assert sum(wait.seq == 1 and not wait.is_open for wait in waits) <= 1
    stepped.finish()


def test_sequences_that_there_never_were() -> None:
    stepped = Stepped()
    stepped.say(wire.Release(seq=5), wire.Release(seq=5, kind="chat"), wire.Hold(seq=5, ttl_s=1.0))
    assert not stepped.others
    stepped.say(wire.Expect(seq=5, kind="http"), wire.Expect(seq=-1, kind=""), wire.Cancel(seq=5))
    assert failures(stepped) == ["unknown_handle"] * 3
    stepped.finish()
