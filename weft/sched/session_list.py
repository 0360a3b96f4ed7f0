"""`list_sessions`: the sequences of a tenant that wait, and where their KV is.

A sequence waits while it is intercepted, open or closed, or while it has work and stands in the queue. Reads the state
of the scheduler, and tells the policy of the waits that have ended, from which it estimates the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from weft.cache.nodes import Node, Wait
from weft.core.ids import TOKEN_BYTES
from weft.core.waits import WaitKind
from weft.core.wire import SessionInfo, SessionState
from weft.sched.sequence import AppendOp, GenerateOp, Sequence, SequenceState
from weft.sched.state import SchedulerState
from weft.sched.wait_log import OngoingWait

_QUEUED = (SequenceState.WAITING, SequenceState.DEFERRED, SequenceState.PENDING_FORK)


class SessionList(NamedTuple):
    """Sessions, and how many there are in all."""

    sessions: list[SessionInfo]
    total: int


def list_sessions(state: SchedulerState, tenant: str, limit: int, now: float) -> SessionList:
    """The `limit` sessions of a tenant that wait longest. Sorts only the numbers and times of the others."""
    waiting: list[tuple[float, int, Sequence | Wait]] = [
        *((_since_s(sequence), sequence.seq, sequence) for sequence in _open(state, tenant)),
        *((wait.since_s, wait.seq, wait) for wait in state.interception.closed.of_tenant(tenant)),
    ]
    first = heapq.nsmallest(limit, waiting, key=lambda entry: entry[:2])
    found = [
        _finished_turn(entry, now) if isinstance(entry, Wait) else _open_sequence(entry, now) for _, _, entry in first
    ]
    waits = {place: wait for place, (_, _, entry) in enumerate(first) if (wait := _wait_of(entry)) is not None}
    expected = state.interception.waits.expected(state.interception.policy, list(waits.values()), now)
    for place, end in zip(waits, expected, strict=True):
        if end is not None:
            found[place] = msgspec.structs.replace(found[place], expected_in_s=end.in_s, expected_by=end.by)
    return SessionList(found, len(waiting))


def _wait_of(entry: Sequence | Wait) -> OngoingWait | None:
    """What is to be estimated; None: it waits for the device alone, or what continues it does."""
    if isinstance(entry, Wait):
        kind = entry.group or entry.kind
        return None if entry.num_returns else OngoingWait(entry.tenant, kind, entry.since_s, entry.expected_s)
    if entry.state is not SequenceState.IDLE:
        return None
    return OngoingWait(entry.tenant, entry.wait_kind, entry.last_active_s, entry.expected_s)


def _open(state: SchedulerState, tenant: str) -> Iterator[Sequence]:
    for sequence in state.sequences:
        if sequence.tenant == tenant and (sequence.state in _QUEUED or _is_intercepted(sequence)):
            yield sequence


def _is_intercepted(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.IDLE and bool(sequence.tokens)


def _since_s(sequence: Sequence) -> float:
    head = sequence.head
    return head.arrival_s if isinstance(head, AppendOp | GenerateOp) else sequence.last_active_s


def _open_sequence(sequence: Sequence, now: float) -> SessionInfo:
    is_idle = sequence.state is SequenceState.IDLE
    had = min(max(sequence.high_water, sequence.num_computed), len(sequence.tokens))
    if sequence.wait is None:
        device, host = min(sequence.num_computed, len(sequence.tokens)), 0
    else:
        device, host = _residency(sequence.wait.end)
    return _info(
        sequence.seq,
        sequence.request_id,
        "intercepted" if is_idle else "queued",
        sequence.wait_kind if is_idle else WaitKind.QUEUE,
        num_tokens=len(sequence.tokens),
        had=had,
        where=(device, host),
        waited_s=now - _since_s(sequence),
    )


def _finished_turn(wait: Wait, now: float) -> SessionInfo:
    return _info(
        wait.seq,
        wait.request_id,
        "finished",
        wait.kind,
        num_tokens=wait.num_tokens,
        had=wait.num_kv,
        where=_residency(wait.end),
        waited_s=now - wait.since_s,
    )


def _info(
    seq: int,
    request_id: str,
    state: SessionState,
    kind: str,
    *,
    num_tokens: int,
    had: int,
    where: tuple[int, int],
    waited_s: float,
) -> SessionInfo:
    device = min(where[0], num_tokens)
    host = min(where[1], num_tokens - device)  # of a sequence that was cut, the index may have more
    return SessionInfo(
        id=seq,
        request_id=request_id,
        state=state,
        kind=kind,
        num_tokens=num_tokens,
        device_tokens=device,
        host_tokens=host,
        gone_tokens=max(0, had - device - host),
        waited_s=max(0.0, waited_s),
    )


def _residency(end: Node | None) -> tuple[int, int]:
    """Tokens up to the end of a run that have KV on the device, and on the host alone."""
    device = host = 0
    node = end
    while node is not None and node.parent is not None:
        count = len(node.tokens) // TOKEN_BYTES
        if node.on_device:
            device += count
        else:
            host += count
        node = node.parent
    return device, host
