"""`Residency`: commands that say where KV is kept: retain, end a retain, demote, prefetch, expect a return.

Owns the retains of clients, by client and operation, and the moves that take several steps. Each command has one
outcome: how many pages it was carried out for, or the error that it was refused with. Called by the command handler,
and by the step planner for what a step moves.
"""

from __future__ import annotations

import itertools

from weft.abi.errors import InvalidRequest, LimitExceeded, OutOfPages, UnknownHandle, Unsupported
from weft.cache.manager import KVCache
from weft.cache.nodes import Node, Wait
from weft.cache.retention import HOLD_WEIGHT, RetainedRun, prefix_wait
from weft.core.ids import TOKEN_BYTES
from weft.core.wire import Demote, EndRetain, Expect, Failed, Finished, Hold, Prefetch, ResidencyCommand, Retain
from weft.sched.event_log import EventLog
from weft.sched.interception import Interception
from weft.sched.sequence import Sequence, SequenceState
from weft.sched.sequence_table import SequenceTable

FIRST_MARK = -(1 << 40)
"""Numbers of the marks of moves go down from here; those of retains go down from 0."""
MAX_RETAINS = 65536
"""Of all clients together."""
MAX_MOVES = 1024
"""Demotes and prefetches under way at once."""


class _Move:
    """A demote or a prefetch that is under way. `mark` points to the end of what it moves."""

    __slots__ = ("client", "count", "is_out", "mark", "most", "op", "refusal")

    def __init__(self, client: int, op: int, mark: Wait, *, is_out: bool):
        self.client = client
        self.op = op
        self.mark = mark
        self.is_out = is_out
        self.count = 0
        """Pages moved so far."""
        self.most = _num_pages(mark.end, on_device=is_out)
        """Pages there were to move: what others move back meanwhile is not moved again, so that every move ends."""
        self.refusal: InvalidRequest | OutOfPages | None = None
        """Why it goes no further, where something is left."""


class Residency:
    """Carries out the commands of `weft.core.wire.residency`."""

    def __init__(self, cache: KVCache, sequences: SequenceTable, interception: Interception, log: EventLog):
        self._cache = cache
        self._tiers = cache.tiers
        self._sequences = sequences
        self._interception = interception
        self._log = log
        self._retains: dict[tuple[int, int], RetainedRun] = {}
        self.moves: list[_Move] = []
        """Demotes and prefetches under way."""
        self._marks = itertools.count(FIRST_MARK, -1)

    # Commands

    def apply(self, client: int, command: ResidencyCommand | EndRetain, now: float) -> None:
        """Carry a command out, or begin to. Raises the error that it is refused with."""
        match command:
            case Retain():
                self._retain(client, command, now)
            case EndRetain():
                self._end_retain(client, command, now)
            case Demote() | Prefetch():
                self._begin_move(client, command, now)
            case _:
                raise InvalidRequest(f"a scheduler does not handle {type(command).__name__}")

    def expect(self, sequence: Sequence, command: Expect, now: float) -> None:
        """Note what a sequence waits for. Raises `InvalidRequest`."""
        self._interception.expect(sequence, command, now)
        if command.op:
            self._finish(sequence.client, command.op, 0)

    def hold(self, sequence: Sequence, command: Hold, now: float) -> RetainedRun | None:
        """Retain the KV of a sequence that is being closed. None, and the outcome says why, where it cannot be."""
        try:
            self._check_policy("held")
            run = self._add(sequence, HOLD_WEIGHT, now + command.ttl_s, now)
        except (LimitExceeded, Unsupported) as error:
            self._log.end(sequence.client, Failed.of(command.op, error))
            return None
        if command.op:
            self._finish(sequence.client, command.op, run.num_pages)
        return run

    def drop_client(self, client: int, now: float) -> None:
        """A client is gone: end its retains and moves. What it held stays held."""
        for key in [key for key in self._retains if key[0] == client]:
            self._cache.retention.end(self._retains.pop(key), "disconnected", now)
        for move in [move for move in self.moves if move.client == client]:
            self._tiers.end_wait(move.mark)
            self.moves.remove(move)

    def _retain(self, client: int, command: Retain, now: float) -> None:
        if not command.weight > 0:
            raise InvalidRequest(f"the weight of a retain is more than 0, got {command.weight}", "weight")
        if not command.ttl_s >= 0:
            raise InvalidRequest(f"KV is retained for 0 seconds or more, got {command.ttl_s}", "ttl_s")
        if (client, command.op) in self._retains:
            raise InvalidRequest(f"operation {command.op} is a retain already: numbers may be used once", "op")
        self._check_policy("retained")
        self._check_number()
        until_s = now + command.ttl_s
        if command.seq is not None:
            sequence = self._sequences.find(client, command.seq)
            if sequence.retained is not None:
                self._cache.retention.end(sequence.retained, "replaced", now)
            run = sequence.retained = self._add(sequence, command.weight, until_s, now)
            if sequence.wait is not None:
                self._cache.retention.attach(run, sequence.wait)
        else:
            node = self._prefix(command)
            found = self._cache.retention.retain_prefix(node, command.weight, until_s, now)
            if found is None:
                raise self._used_up()
            run = found
        self._retains[client, command.op] = run
        self._finish(client, command.op, run.num_pages)

    def _add(self, sequence: Sequence, weight: float, until_s: float, now: float) -> RetainedRun:
        wait, table = sequence.wait, sequence.table
        end = table.node if wait is None or wait.end is None else wait.end
        num_private = len(table.pages) - table.num_indexed
        run = self._cache.retention.add(end, num_private, weight, until_s, now)
        if run is None:
            raise self._used_up()
        return run

    def _end_retain(self, client: int, command: EndRetain, now: float) -> None:
        run = self._retains.pop((client, command.retain), None)
        if run is None:
            raise UnknownHandle(f"operation {command.retain} of this client retains nothing")
        self._cache.retention.expire(now)
        count = self._num_kept(run)
        self._cache.retention.end(run, "released", now)
        self._finish(client, command.op, count)

    def _num_kept(self, run: RetainedRun) -> int:
        """Pages that a retain keeps now: up to where its KV ends, or those of its sequence that has them."""
        if run.ended:
            return 0
        if run.wait is not None:
            return run.num_left
        return next((len(s.table.pages) for s in self._sequences if s.retained is run), 0)

    def _begin_move(self, client: int, command: Demote | Prefetch, now: float) -> None:
        if not self._tiers.host.num_pages:
            raise Unsupported("this engine has no host tier, so KV stays on the device; set host_pages", "host_pages")
        if len(self.moves) >= MAX_MOVES:
            raise LimitExceeded(f"{MAX_MOVES} demotes and prefetches are under way, which is the limit", "moves")
        is_out = isinstance(command, Demote)
        if command.seq is None:
            end: Node | None = self._prefix(command)
        else:
            sequence = self._sequences.find(client, command.seq)
            if is_out:
                self._check_demotable(sequence)
                if sequence.wait is None:
                    self._interception.park(sequence, now)
            end = None if sequence.wait is None else sequence.wait.end
        if end is None:
            self._finish(client, command.op, 0)  # a sequence with its pages on the device, or without KV
            return
        mark = prefix_wait(next(self._marks), end.owner, now)
        mark.attach(end)
        self.moves.append(_Move(client, command.op, mark, is_out=is_out))

    def _check_demotable(self, sequence: Sequence) -> None:
        if sequence.state is not SequenceState.IDLE:
            raise InvalidRequest(f"sequence {sequence.handle} has work, so its KV stays on the device", "seq")

    def _check_policy(self, what: str) -> None:
        policy = self._interception.policy
        if not policy.uses_index:
            raise Unsupported(
                f"KV cannot be {what}: intercept_policy {policy.name} finds no KV again", "intercept_policy"
            )

    def _prefix(self, command: ResidencyCommand) -> Node:
        if len(command.tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"{len(command.tokens)} bytes are not a whole number of int32 token ids", "tokens")
        match = self._cache.index.find(command.namespace, command.tokens)
        if match is None or not match.num_pages:
            raise InvalidRequest("no KV of these tokens is cached; compute it first", "tokens")
        return self._cache.index.node_for(match)

    def _used_up(self) -> LimitExceeded:
        most = self._cache.retention.max_pages
        return LimitExceeded(f"{most} pages may be retained, and the tenant's share is used up", "retained_pages")

    def _check_number(self) -> None:
        if len(self._retains) >= MAX_RETAINS:
            self._retains = {key: run for key, run in self._retains.items() if not run.ended}
        if len(self._retains) >= MAX_RETAINS:
            raise LimitExceeded(f"{MAX_RETAINS} retains are under way, which is the limit", "retains")

    def _finish(self, client: int, op: int, count: int) -> None:
        self._log.end(client, Finished(op=op, count=count))

    # Steps

    def advance(self, now: float) -> None:
        """Move what clients asked for, as far as the budget of the step being built goes."""
        going: list[_Move] = []
        for move in self.moves:
            is_done = self._demote(move, now) if move.is_out else self._prefetch(move, now)
            if not is_done:
                going.append(move)
                continue
            self._tiers.end_wait(move.mark)
            if move.refusal is not None and not move.count:
                self._log.end(move.client, Failed.of(move.op, move.refusal))
            else:
                self._finish(move.client, move.op, move.count)
        self.moves = going

    def _demote(self, move: _Move, now: float) -> bool:
        """Whether nothing is left to move, or nothing can be."""
        tiers = self._tiers
        while True:
            node = move.mark.end
            while node is not None and not node.on_device:
                node = node.parent
            if node is None or node.parent is None or move.count >= move.most:
                return True
            others_wait = node is not move.mark.end and any(wait is not move.mark for wait in node.waits.values())
            if node.locks or node.device_children or others_wait:
                move.refusal = InvalidRequest("other work needs this KV on the device, or it is pinned")
                return True
            if node.fence > tiers.copies.launched:
                return False  # the step being built brings it
            if not node.copies:
                if tiers.copy_budget <= 0:
                    return False
                if node.num_pages > tiers.copy_budget:
                    self._cache.index.split(node, node.num_pages - tiers.copy_budget)
            if not tiers.demote(node, now):
                move.refusal = OutOfPages("the host tier has no room")
                return True
            move.count += node.num_pages

    def _prefetch(self, move: _Move, now: float) -> bool:
        """Whether nothing is left to bring, or nothing can be."""
        tiers = self._tiers
        while True:
            node: Node | None = None
            above = move.mark.end
            while above is not None and not above.on_device:
                node, above = above, above.parent
            if node is None or move.count >= move.most:
                return True
            if tiers.copy_budget <= 0:
                return False
            tiers.lock(node)
            room = min(tiers.copy_budget, tiers.num_available - len(self._sequences.running))
            part = node if node.num_pages <= room else self._cache.index.split(node, room) if room > 0 else None
            brought = part is not None and tiers.promote(part, now)
            tiers.unlock(node, now)
            if part is None or not brought:
                if room > 0 and tiers.copies.completed < tiers.copies.launched:
                    return False  # pages become free with the steps in flight
                move.refusal = OutOfPages("the device has no room")
                return True
            move.count += part.num_pages
            self._cache.retention.lock_pins()


def _num_pages(end: Node | None, *, on_device: bool) -> int:
    """Pages on the path to `end` that are on the device, or that only the host has."""
    count = 0
    while end is not None:
        count += end.num_pages if end.on_device is on_device else 0
        end = end.parent
    return count
