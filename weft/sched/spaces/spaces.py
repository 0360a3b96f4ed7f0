"""`Spaces`: commands on explicit pages and embeddings become parts of steps, and their results events.

Owns the spaces of all clients and the order of commands: within a queue they run one after the other, across queues by
rank (priority and arrival). Commands that only concern handles are carried out as soon as they are first in their
queue; the others wait for `fill`, which puts as many into the step being built as do not conflict (Pie, section 5.2:
*horizontal* batching across queues, *vertical* within one). What each does to a step is in `place.py`, what the
others do to handles in `immediate.py`.

Called by the step planner (`fill`), by `update` (`take_in`) and by the command handler (`apply`). Knows no clock
and no device.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from weft.abi.errors import (
    Draining,
    InvalidLogits,
    InvalidRequest,
    OutOfPages,
    Overloaded,
    UnknownHandle,
    Unsupported,
    WeftError,
)
from weft.core.step import INVALID_NUMBERS, StepResult
from weft.core.wire import (
    AnsweredCommand,
    Cancelled,
    CloseQueue,
    CloseSpace,
    Dists,
    ExpectSpace,
    Failed,
    Finished,
    OpenQueue,
    OpenSpace,
    QueueCommand,
    SetQueuePriority,
    SpaceCommand,
    Sync,
)
from weft.sched.batch import StepBuilder
from weft.sched.event_log import EventLog
from weft.sched.in_flight import InFlight
from weft.sched.spaces.conflicts import Conflicts
from weft.sched.spaces.immediate import ImmediateCommands, makes_export, waits_for_export
from weft.sched.spaces.place import NEEDS_STEP, Placement, Placer, outputs_of
from weft.sched.spaces.pool import SpacePool
from weft.sched.spaces.resources import (
    LENT,
    MAX_LISTED,
    PendingCommand,
    Space,
    SpaceQueue,
    known_handles,
    lists_of,
)
from weft.sched.spaces.waits import SpaceWaits

_log = logging.getLogger("weft.engine")

MAX_QUEUES = 1024
MAX_PENDING = 65536
"""Commands of one space that wait."""
MAX_PENDING_BYTES = 64 << 20
"""Their lists and masks."""


class Spaces:
    """The spaces of all clients, their queues, and the commands that wait on them."""

    def __init__(
        self,
        pool: SpacePool,
        placer: Placer,
        waits: SpaceWaits,
        log: EventLog,
        *,
        aging_s: float,
        alloc_wait_s: float,
        refusal: str = "",
    ):
        """`refusal` says why this model has no explicit pages; empty where it has."""
        self._pool = pool
        self.waits = waits
        self._placer = placer
        self._immediate = ImmediateCommands(pool, placer.page_size)
        self._log = log
        self._aging_s = aging_s
        self._alloc_wait_s = alloc_wait_s
        self._refusal = refusal
        self._spaces: dict[tuple[int, int], Space] = {}
        self._ready: dict[tuple[int, int, int], tuple[Space, SpaceQueue]] = {}
        """Queues with commands, by (client, space, queue)."""
        self._syncs: dict[int, list[tuple[int, int]]] = {}
        """Step -> (client, operation) that end with it."""
        self.draining = False

    # What is there

    def __len__(self) -> int:
        """Open spaces."""
        return len(self._spaces)

    @property
    def num_pages(self) -> int:
        """Pages in spaces, reservations and exports, lent ones too."""
        return self._pool.num_pages

    @property
    def has_work(self) -> bool:
        """Whether a step could carry a command now."""
        return any(
            not queue.is_blocked and (space.lent is not None or type(queue.commands[0].command) in NEEDS_STEP)
            for space, queue in self._ready.values()
        )

    @property
    def num_ready(self) -> int:
        """Queues with something for a step."""
        return len(self._ready)

    @property
    def is_waiting(self) -> bool:
        """Whether a command waits for room; `expire` ends what has waited too long."""
        return any(queue.is_blocked for _, queue in self._ready.values())

    def device_pages(self) -> Counter[int]:
        """References on device pages, for integrity checks."""
        found = Counter(self._pool.exported_pages())
        for space in self._spaces.values():
            found.update(space.reserved)
            found.update(page.page for page in space.pages.values() if page.page != LENT)
        return found

    # Commands

    def apply(self, client: int, command: SpaceCommand, now: float) -> None:
        """Take in a command. Raises what is wrong with it."""
        if isinstance(command, OpenSpace):
            self._open(client, command, now)
        elif isinstance(command, CloseSpace):
            self._close(client, command.space, now)
        elif isinstance(command, ExpectSpace):
            self.waits.expect(self.get(client, command.space), command, now)
        elif isinstance(command, QueueCommand):
            self._apply(self.get(client, command.space), command, now)

    def drop_client(self, client: int, now: float) -> None:
        """A client is gone: give up all its spaces."""
        ended = [space for space in self._spaces.values() if space.client == client]
        for space in ended:
            space.is_ending = False  # it ends here, and exports nothing; and not as the end of another makes room
        for space in ended:
            self._end_space(space, now)

    def expire(self, now: float) -> None:
        """Fail what has waited for room as long as it may, and try the others again."""
        for space, queue in list(self._ready.values()):
            if not queue.is_blocked:
                continue
            since = queue.commands[0].blocked_since_s
            if since is not None and now - since >= self._alloc_wait_s:
                pending = _pop(space, queue)
                message = (
                    f"no room after {self._alloc_wait_s:g} s: programs hold {self._pool.num_pages} of at most "
                    f"{self._pool.max_pages} pages; free some, ask for less, or reserve pages at launch"
                )
                self._fail(space, pending.command, OutOfPages(message))
            self._pump(space, queue, now)

    def drop_exports(self, now: float) -> None:
        """Forget everything that was exported."""
        self._pool.drop_exports(now)

    def end_youngest(self, now: float) -> bool:
        """Requests cannot go on otherwise: take everything from the youngest space of the lowest priority whose end
        frees pages, else all exports. Whether there was anything to take."""
        if self.waits.release(now):
            return True
        holders = [s for s in self._spaces.values() if s.has_device_pages or self.waits.is_stuck(s)]
        if not holders:
            return self._pool.drop_exports(now)
        space = max(holders, key=lambda s: (s.priority, s.arrival_s, s.number))
        space.failure = OutOfPages("the engine ran out of pages and took this program's, the youngest; try again later")
        self._empty(space, lambda command: self._fail(space, command, space.failure or OutOfPages("")), now)
        if space.is_ending:
            del self._spaces[space.client, space.number]
        return True

    # Steps

    def end_step(self) -> None:
        """The step being built is complete: what was given up meanwhile, it may name; later ones do not."""
        self._pool.end_step()

    def bring(self, now: float) -> int:
        """Bring pages back that programs have lent and need again, before anything of the step being built is decided.
        Returns how many the first of them lacks: newcomers do not get them."""
        ready = sorted((item for item in self._ready.values() if item[0].lent is not None), key=self._rank)
        if not ready:
            return 0
        if self.waits.bring(dict.fromkeys(space for space, _ in ready), now):
            self._retry(now)
        return self.waits.num_missing

    def fill(
        self, builder: StepBuilder, num_tokens: int, others_wait: bool, now: float, max_rows: int | None = None
    ) -> None:
        """Put commands into the step being built: at most `num_tokens` inputs; of prompts, at most half of those where
        others wait for them too."""
        if not self._ready:
            return
        self._placer.begin(Conflicts(), num_tokens, others_wait)
        for space, queue in sorted(self._ready.values(), key=self._rank):
            if max_rows is not None and builder.num_rows >= max_rows:
                return
            self._fill_from(builder, space, queue, now)

    def take_in(self, flight: InFlight, result: StepResult, now: float) -> None:
        """The step is done: answer what it carried, and go on with what waited for it."""
        scores = sum(scored.num for scored in flight.scored)
        for client, space, op, index in flight.space_samples:
            token = result.tokens[len(flight.sampled) + index]
            self._end(client, _failed(op) if token < 0 else Finished(op=op, tokens=np.int32(token).tobytes()))
            self._log.answered.append((client, space))
        dists = len(flight.distributions)
        for client, space, op, count, k, num_targets in flight.space_dists:
            found = _dists(result, dists, count, k, scores, num_targets, self._log.is_invalid)
            self._end(client, _failed(op) if found is None else Finished(op=op, dists=found))
            self._log.answered.append((client, space))
            dists += count if k else 0
            scores += num_targets
        self._placer.completed = flight.step_id
        for step_id in [step_id for step_id in self._syncs if step_id <= flight.step_id]:
            for client, op in self._syncs.pop(step_id):
                self._end(client, Finished(op=op))
        if self._ready:
            self._retry(now)

    # Inside: life of a space

    def _open(self, client: int, command: OpenSpace, now: float) -> None:
        if self._refusal:
            raise Unsupported(self._refusal, "space")
        if self.draining:
            raise Draining("the server is shutting down and takes no new requests")
        if (client, command.space) in self._spaces:
            raise InvalidRequest(f"space {command.space} is open already: numbers may be used once", "space")
        space = Space(
            client,
            command.space,
            command.tenant,
            command.namespace,
            command.priority,
            command.request_id,
            now,
            command.tenant_pages,
        )
        if command.reserve_pages:
            self._pool.reserve(space, command.reserve_pages, now)
        self._spaces[client, command.space] = space

    def get(self, client: int, number: int) -> Space:
        """An open space. Raises `UnknownHandle`, or why it was taken away."""
        space = self._spaces.get((client, number))
        if space is None:
            message = f"space {number} is not open: it was never opened, was closed, or its client's lease ended"
            raise UnknownHandle(message, "space")
        if space.failure is not None:
            raise space.failure
        return space

    def _close(self, client: int, number: int, now: float) -> None:
        space = self._spaces.get((client, number))
        if space is None:
            return  # closed before: the caller's wish is fulfilled
        space.is_ending = True
        if space.lent is not None:
            for queue in space.queues.values():
                self._drop_commands(space, queue, self._cancel(space), keep=_num_exporting(queue))
        if not space.num_pending or space.lent is None:
            self._end_space(space, now)

    def _end_space(self, space: Space, now: float) -> None:
        del self._spaces[space.client, space.number]
        self._empty(space, self._cancel(space), now)
        self._retry(now)

    def _cancel(self, space: Space) -> Callable[[QueueCommand], None]:
        return lambda command: self._end(space.client, Cancelled(op=command.op))

    def _drop_commands(
        self, space: Space, queue: SpaceQueue, end: Callable[[QueueCommand], None], *, keep: int = 0
    ) -> None:
        """End the commands of a queue past the first `keep`."""
        dropped = list(queue.commands)[keep:]
        for pending in dropped:
            if isinstance(pending.command, AnsweredCommand):
                end(pending.command)
            queue.commands.pop()
            space.pending_bytes -= pending.num_bytes
        space.num_pending -= len(dropped)
        if not queue.commands:
            self._ready.pop((space.client, space.number, queue.number), None)

    def _empty(self, space: Space, end: Callable[[QueueCommand], None], now: float) -> None:
        for queue in space.queues.values():
            self._drop_commands(space, queue, end)
        self.waits.close(space, now)
        pages = [page.page for page in space.pages.values() if page.page != LENT]
        self._pool.drop(space.tenant, pages + self._pool.reserved(space), now)
        self._pool.give_back_embeds([embed.slot for embed in space.embeds.values()])
        space.forget(list(space.pages))
        space.embeds, space.reserved, space.reservation = {}, [], 0

    # Inside: queues

    def _apply(self, space: Space, command: QueueCommand, now: float) -> None:
        if isinstance(command, OpenQueue):
            if command.queue in space.queues:
                raise InvalidRequest(f"queue {command.queue} is open already: numbers may be used once", "queue")
            if len(space.queues) >= MAX_QUEUES:
                raise Overloaded(f"a program may have {MAX_QUEUES} queues open; close some")
            space.queues[command.queue] = SpaceQueue(command.queue, command.priority)
            return
        queue = space.queue(command.queue)
        if isinstance(command, SetQueuePriority):
            queue.priority = command.priority
            return
        if space.num_pending >= MAX_PENDING:
            raise Overloaded(f"{MAX_PENDING} commands of this program wait already; wait for some of them")
        size = 0
        for name in lists_of(type(command)):
            size += len(getattr(command, name))
        if space.pending_bytes + size > MAX_PENDING_BYTES:
            most = f"{MAX_PENDING_BYTES >> 20} MiB"
            raise Overloaded(f"commands of this program that wait list more than {most}; wait for some of them")
        if space.wait is not None:
            self.waits.returned(space, now)
        queue.commands.append(PendingCommand(command, now, size))
        space.num_pending += 1
        space.pending_bytes += size
        if len(queue.commands) == 1 or queue.is_blocked:
            self._ready[space.client, space.number, queue.number] = space, queue
            self._pump(space, queue, now)

    def _rank(self, item: tuple[Space, SpaceQueue]) -> tuple[float, int, int]:
        space, queue = item
        arrival = queue.commands[0].arrival_s
        return (arrival + (space.priority + queue.priority) * self._aging_s, space.number, queue.number)

    def _retry(self, now: float) -> None:
        """Room may have become free."""
        for space, queue in list(self._ready.values()):
            self._pump(space, queue, now)

    def _pump(self, space: Space, queue: SpaceQueue, now: float) -> None:
        """Carry out the commands at the head of a queue that need no step; try again what found no room."""
        queue.is_blocked = False
        if space.lent is not None:
            return
        while queue.commands and type(queue.commands[0].command) not in NEEDS_STEP:
            pending = queue.commands[0]
            try:
                done = self._carry_out(space, queue, pending.command, now)
            except WeftError as error:
                self._fail(space, pending.command, error)
                done = True
            except Exception as error:  # a bug of ours fails one command, as in `CommandHandler.apply`
                _log.exception("%s of client %d could not be carried out", type(pending.command).__name__, space.client)
                message = f"the engine could not carry this out: {type(error).__name__}: {error}"
                self._fail(space, pending.command, WeftError(message))
                done = True
            if not done:
                _block(queue, now)
                return
            if queue.commands:  # closing the space has emptied it
                _pop(space, queue)
        if not queue.commands:
            self._ready.pop((space.client, space.number, queue.number), None)
            if queue.closing:
                space.queues.pop(queue.number, None)
            if space.is_ending and not space.num_pending:
                self._close(space.client, space.number, now)

    def _fill_from(self, builder: StepBuilder, space: Space, queue: SpaceQueue, now: float) -> None:
        while queue.commands and not queue.is_blocked and space.lent is None:
            pending = queue.commands[0]
            try:
                verdict = self._placer.place(builder, space, pending, now)
            except WeftError as error:
                self._fail(space, pending.command, error)
                verdict = Placement.DONE
            else:
                if verdict in (Placement.DONE, Placement.PART):
                    queue.last_step = builder.in_flight.step_id
            if verdict is Placement.BLOCKED:
                _block(queue, now)
            if verdict is not Placement.DONE:
                return
            _pop(space, queue)
            self._pump(space, queue, now)

    def _carry_out(self, space: Space, queue: SpaceQueue, command: QueueCommand, now: float) -> bool:
        """A command that needs no step. False: it has to wait for room."""
        count: int | None = 0
        if isinstance(command, CloseQueue):
            queue.closing = True
        elif isinstance(command, Sync):
            if queue.last_step > self._placer.completed:
                self._syncs.setdefault(queue.last_step, []).append((space.client, command.op))
                return True
        elif waits_for_export(command, self._delayed(space, queue)):
            count = None
        else:
            count = self._immediate.carry_out(space, command, now)
        if count is None:
            return False
        if isinstance(command, AnsweredCommand):
            self._end(space.client, Finished(op=command.op, count=count))
        return True

    def _delayed(self, space: Space, queue: SpaceQueue) -> Iterator[QueueCommand]:
        """Commands of the namespace that came before the first of a queue, and wait for pages that are lent."""
        arrival_s = queue.commands[0].arrival_s
        for other, delayed in self._ready.values():
            if other.lent is not None and other.namespace == space.namespace:
                yield from (pending.command for pending in delayed.commands if pending.arrival_s <= arrival_s)

    # Inside: endings

    def _fail(self, space: Space, command: QueueCommand, error: WeftError) -> None:
        # A reader of what it was to write must not take something older for it.
        outputs = outputs_of(command)
        # A list that is too long is not read: all embeddings count as written by it.
        for number in known_handles(outputs) if len(outputs) <= 4 * MAX_LISTED else list(space.embeds):
            if number in space.embeds:
                space.embeds[number].failure = error
        self._end(space.client, Failed.of(command.op, error))

    def _end(self, client: int, event: Finished | Failed | Cancelled) -> None:
        self._log.send(client, event)
        how = "failed" if isinstance(event, Failed) else "cancelled" if isinstance(event, Cancelled) else "stop"
        if how != "stop":
            self._log.counters.count_end(how)

    def spaces(self) -> Iterator[Space]:
        """The open spaces of all clients, in order of opening."""
        yield from self._spaces.values()


def _pop(space: Space, queue: SpaceQueue) -> PendingCommand:
    pending = queue.commands.popleft()
    space.num_pending -= 1
    space.pending_bytes -= pending.num_bytes
    return pending


def _num_exporting(queue: SpaceQueue) -> int:
    """Commands up to the last export that would have been made when it came, had the space lent nothing."""
    immediate = list(itertools.takewhile(lambda pending: type(pending.command) not in NEEDS_STEP, queue.commands))
    return max((at for at, pending in enumerate(immediate, 1) if makes_export(pending.command)), default=0)


def _block(queue: SpaceQueue, now: float) -> None:
    queue.is_blocked = True
    first = queue.commands[0]
    first.blocked_since_s = now if first.blocked_since_s is None else first.blocked_since_s


def _failed(op: int) -> Failed:
    return Failed.of(op, InvalidLogits(INVALID_NUMBERS))


def _dists(
    result: StepResult, first: int, count: int, k: int, first_score: int, num_targets: int, is_invalid: bool
) -> Dists | None:
    """The distributions of one command; None where some of their numbers are not finite, as some of the step are if
    `is_invalid`."""
    ids = logprobs = targets = b""
    if k and result.dist is not None:
        if is_invalid and np.isnan(result.dist.logprobs[first : first + count, :k]).any():
            return None
        ids = result.dist.ids[first : first + count, :k].tobytes()
        logprobs = result.dist.logprobs[first : first + count, :k].tobytes()
    if num_targets and result.score_logprobs is not None:
        if is_invalid and np.isnan(result.score_logprobs[first_score : first_score + num_targets]).any():
            return None
        targets = result.score_logprobs[first_score : first_score + num_targets].tobytes()
    return Dists(ids, logprobs, targets)
