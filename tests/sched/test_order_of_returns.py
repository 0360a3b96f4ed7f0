"""Sessions that have begun come before newcomers, and sessions without end keep nobody waiting forever."""

from __future__ import annotations

import math

import pytest

from tests.sched.stepping import Stepped
from tests.sched.test_queue import make
from tests.sched.test_returns_in_rank import waiting_on_host
from weft.sched.order import FairOrder
from weft.sched.queue import WaitingQueue
from weft.sched.sequence import Sequence, SequenceState

AGING_S = 10.0
MAX_CONTEXT = 100


class Line:
    """A queue on a clock. Every sequence that is admitted runs for no time, and waits for something else then."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(FairOrder(AGING_S, MAX_CONTEXT))
        self.now = 0.0

    def arrive(self, seq: int, priority: int = 0, tenant: str = "") -> Sequence:
        """The first work of a sequence."""
        sequence = make(seq, self.now, priority, tenant)
        self._push(sequence, 0.0)
        return sequence

    def come_back(
        self, sequence: Sequence, *, intercepted_s: float = 0.0, new_tokens: int = 5, has_kv: bool = True
    ) -> None:
        """More work for a sequence that has been admitted, whose KV is there or not."""
        sequence.place.num_known = sequence.total
        sequence.total += new_tokens
        self._push(sequence, intercepted_s, has_kv=has_kv)

    def admit(self) -> Sequence:
        """The sequence that is next."""
        sequence = self.queue.pop()
        assert sequence is not None
        sequence.move_to(SequenceState.RUNNING)
        self.queue.order.admitted(sequence, 5, self.now)
        sequence.move_to(SequenceState.IDLE)
        return sequence

    def _push(self, sequence: Sequence, intercepted_s: float, *, has_kv: bool = True) -> None:
        sequence.place.arrive(self.now, intercepted_s, "fair", AGING_S, has_kv=has_kv)
        self.queue.push(sequence)


def begun(line: Line, *sequences: int) -> list[Sequence]:
    """Sequences that were admitted at once, a second apart."""
    found = []
    for seq in sequences:
        line.arrive(seq)
        found.append(line.admit())
        line.now += 1.0
    return found


def test_a_return_comes_before_newcomers_that_have_waited_for_longer() -> None:
    """Otherwise more and more sessions are begun in overload, and none is finished."""
    line = Line()
    [session] = begun(line, 1)
    for seq in range(2, 40):
        line.arrive(seq)
        line.now += 1.0
    line.admit()
    line.come_back(session, intercepted_s=30.0)
    assert line.admit() is session
    assert line.admit().seq == 3


def test_returns_come_in_the_order_in_which_their_sessions_began() -> None:
    """Where they are more than memory holds, the oldest end first."""
    line = Line()
    sessions = begun(line, 1, 2, 3)
    for session in reversed(sessions):
        line.come_back(session)
        line.now += AGING_S / 4
    assert [line.admit() for _ in range(3)] == sessions


def test_a_return_whose_kv_is_gone_comes_after_those_whose_kv_is_there_and_before_newcomers() -> None:
    """It takes the KV of others, as a newcomer does; but its session has begun."""
    line = Line()
    first, second, third, fourth = begun(line, 1, 2, 3, 4)
    line.arrive(10)
    line.now += 3 * AGING_S
    for session, has_kv in ((third, False), (first, False), (fourth, True), (second, True)):
        line.come_back(session, intercepted_s=line.now - 5, has_kv=has_kv)
    line.arrive(11)
    line.admit()  # the first newcomer, which has waited for long
    assert [line.admit().seq for _ in range(5)] == [2, 4, 1, 3, 11]


def endless(line: Line, count: int, *, has_kv: bool = True) -> list[Sequence]:
    """So many sessions that come back as soon as they have been admitted."""
    sessions = begun(line, *range(1, count + 1))
    for session in sessions:
        line.come_back(session, has_kv=has_kv)
    return sessions


def admissions_until(
    line: Line, wanted: Sequence, others: list[Sequence], *, every_s: float = 1.0, has_kv: bool = True
) -> int:
    """How many are admitted before one, while others have no end."""
    for count in range(10_000):
        line.now += every_s
        sequence = line.admit()
        if sequence is wanted:
            return count
        if sequence in others:
            line.come_back(sequence, has_kv=has_kv)
    raise AssertionError("it waits forever")


def test_sessions_without_end_let_a_return_pass_whose_kv_is_gone() -> None:
    line = Line()
    *sessions, cold = endless(line, 6)
    while line.admit() is not cold:
        pass
    for session in sessions:
        line.come_back(session)
    line.come_back(cold, has_kv=False)
    assert admissions_until(line, cold, sessions) <= AGING_S + len(sessions)


@pytest.mark.parametrize("every_s", [1.0, AGING_S])
def test_sessions_whose_kv_is_always_gone_let_newcomers_pass(every_s: float) -> None:
    line = Line()
    sessions = endless(line, 6, has_kv=False)
    newcomers = [line.arrive(seq) for seq in range(10, 14)]
    waits = [admissions_until(line, one, sessions, every_s=every_s, has_kv=False) for one in newcomers]
    assert all(wait <= 2 * MAX_CONTEXT / 5 + AGING_S / every_s + len(sessions) for wait in waits)


def test_sessions_without_end_let_a_newcomer_pass_that_was_the_first_for_long_enough() -> None:
    line = Line()
    sessions = endless(line, 6)
    # Those pass that came back within `AGING_S` of its arrival, and those that waited then.
    assert admissions_until(line, line.arrive(10), sessions) <= AGING_S + len(sessions)


def test_between_two_that_pass_sessions_get_as_many_tokens_as_one_may_have() -> None:
    """So newcomers that pass are no more than sessions would end, if they had an end."""
    line = Line()
    sessions = endless(line, 6)
    newcomers = [line.arrive(seq) for seq in range(10, 14)]
    waits = [admissions_until(line, newcomer, sessions, every_s=AGING_S) for newcomer in newcomers]
    assert waits[0] <= 1 + len(sessions)
    # The sessions that are not the oldest one pass it too, in turn with newcomers.
    assert all(MAX_CONTEXT / 5 <= wait <= 2 * MAX_CONTEXT / 5 + 1 for wait in waits[1:])


def test_sessions_without_end_let_the_return_of_a_younger_one_pass() -> None:
    line = Line()
    sessions = endless(line, 6)
    line.arrive(10)
    while (younger := line.admit()).seq != 10:
        line.now += 1.0
        line.come_back(younger)
    line.come_back(younger)
    # All but the oldest wait for such a turn, and come to it in the order of their return.
    assert admissions_until(line, younger, sessions) <= (len(sessions) + 1) * (AGING_S + MAX_CONTEXT / 5)


def test_an_old_session_passes_no_request_of_a_more_urgent_priority() -> None:
    line = Line()
    line.arrive(1, priority=1)
    session = line.admit()
    line.now = 100.0
    urgent = line.arrive(2, priority=0)
    line.now += AGING_S / 2
    line.come_back(session, intercepted_s=1.0)
    assert line.admit() is urgent


def test_sessions_without_end_take_no_turns_of_another_tenant() -> None:
    line = Line()
    sessions = endless(line, 6)
    others = [line.arrive(seq, tenant="other") for seq in range(10, 20)]
    admitted = []
    for _ in range(20):
        admitted.append(line.admit())
        if admitted[-1] in sessions:
            line.come_back(admitted[-1])
    assert sum(sequence in others for sequence in admitted) >= 9


def test_deferred_returns_keep_their_place_before_newcomers() -> None:
    line = Line()
    sessions = begun(line, 1, 2)
    for seq in range(3, 30):
        line.arrive(seq)
        line.now += 1.0
    line.admit()
    for session in sessions:
        line.come_back(session)
        assert line.queue.pop() is session
        line.queue.defer(session, leader=99, num_pages=1, until_step=50)
    assert line.admit().seq == 4
    line.queue.progressed(99, 1)
    assert [line.admit() for _ in range(2)] == sessions
    assert line.admit().seq == 5


def coming_back(monkeypatch: pytest.MonkeyPatch) -> Stepped:
    """A newcomer has waited for a slot for longer than the return counts as old, and needs pages that the return gets
    back first."""
    stepped = waiting_on_host(monkeypatch, 128, max_running=2, aging_s=1.0)
    stepped.open(10, [10] * 8)
    stepped.generate(10, 60)
    for seq, length in ((11, 8), (12, 8), (13, 60)):
        stepped.open(seq, [seq] * length)
        stepped.generate(seq, 6)
    stepped.now += 50.0
    while stepped.sequence(12).state is not SequenceState.RUNNING:
        stepped.turn()
    stepped.generate(1, 2)
    return stepped


def test_a_newcomer_takes_no_pages_from_a_return_that_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = coming_back(monkeypatch)
    session, newcomer, held = stepped.sequence(1), stepped.sequence(13), 0
    while session.state is not SequenceState.RUNNING:
        stepped.turn()
        assert len(session.table.pages) >= held
        held = len(session.table.pages)
        assert newcomer.place.admission == math.inf
    stepped.finish()
