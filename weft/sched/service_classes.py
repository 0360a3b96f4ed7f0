"""`ServiceClasses`: the objectives of open sequences, and what their work has got of the steps.

Owns the place of each objective in the order of steps, queue and pages (its *service*), the deadlines whose slack is
not gone yet, the work of the step being built by kind, and the time owed to the background. `StepShare` decides what a
step may take. While all open sequences have objective `latency`, nothing here does anything. Called by the step
planner, and by commands that open and release sequences.

A smaller service comes first at any priority; `priority` orders within one. A sequence of a later service
waits for a place behind all earlier ones, but not for ever: where a service has work and none of it was in a step for
`WINDOW_S`, its first sequence is *promoted* until it has no work: it stands among those of the first service, by
priority and arrival. No more sequences are preempted to start it, and `StepShare` counts it as before.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from weft.core.cost.model import StepShape
from weft.core.objectives import BACKGROUND, Objective
from weft.core.step import I32, Bool
from weft.sched.in_flight import InFlight
from weft.sched.sequence import GenerateOp, Sequence, SequenceState
from weft.sched.sequence_table import SequenceTable
from weft.sched.step_share import EMPTY, WINDOW_S, ShareView, StepShare

FIRST, LATENCY, THROUGHPUT, BATCH = -1, 0, 1, 2
SERVICE: dict[Objective, int] = {
    "ttft": FIRST,
    "latency": LATENCY,
    "deadline": THROUGHPUT,
    "throughput": THROUGHPUT,
    "batch": BATCH,
}
"""Place of an objective in the order; of `deadline`, while it has slack."""


MOST_GONE = 64
"""Deadlines of sequences that are gone, beside as many as there are sequences."""


class ServiceClasses:
    """Follows the sequences of other objectives than `latency`, and the shares of steps."""

    def __init__(self, sequences: SequenceTable, share: StepShare):
        self._sequences = sequences
        self._share = share
        self._others: dict[int, Sequence] = {}
        """Open sequences of another objective than `latency`, by number."""
        self.is_active = False
        """Whether there are sequences of another objective than `latency`. Where there are none, the methods about the
        step being built need not be called."""
        self._deadlines: list[tuple[float, int]] = []
        """A heap of (when to look at the slack, number of a sequence); some of them may be gone."""
        self._idle_since_s: dict[int, float] = {}
        """By service with work that was in no step lately: since when."""
        self._promoted: dict[int, Sequence] = {}
        """By service: the sequence that is promoted, as long as it has work."""
        self._owed_s = 0.0
        self.has_held = False
        """Whether sequences that decode were left out of the step being built."""
        self._foreground = self._background = EMPTY
        """Work of the step being built."""
        self._num_tokens: dict[str, int] = {}
        """Query tokens of the step being built, by objective."""
        self._decoding = EMPTY
        """Foreground that decoded in the last step that had other work too."""

    def add(self, sequence: Sequence) -> None:
        """A sequence was opened, or made by a fork."""
        if sequence.objective == "latency":
            return
        self._others[sequence.seq] = sequence
        self.is_active = True
        sequence.service = SERVICE[sequence.objective]
        sequence.is_background = sequence.objective in BACKGROUND
        if sequence.objective == "deadline":
            heapq.heappush(self._deadlines, (0.0, sequence.seq))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that was released; without any, nothing here acts on steps."""
        if self._others.pop(sequence.seq, None) is None:
            return
        if len(self._deadlines) > 2 * len(self._others) + MOST_GONE:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._others]
            heapq.heapify(self._deadlines)
        if not self._others:
            self.is_active = False
            self.has_held = False
            self._owed_s = 0.0
            self._idle_since_s.clear()
            self._promoted.clear()

    # The step being built

    def begin_step(self, now: float) -> None:
        """Look at deadlines, and promote what has waited too long."""
        self._foreground = self._background = EMPTY
        self._num_tokens.clear()
        self._end_slack(now)
        self._decoding = EMPTY
        self._promote(now)

    def ready_to_decode(self, slots: I32, sequences: list[Sequence], ready: Bool, prompt_tokens: int) -> Bool:
        """[n] which of the decoding sequences compute a token in this step, of those that are `ready` [n]. They are in
        order of rank. Prompts get at most `prompt_tokens` tokens of this step."""
        self.has_held = False
        background = np.fromiter((s.is_background for s in sequences), np.bool_, len(sequences))
        kv = self._sequences.slots.total[slots]
        first = ready & ~background
        decoding = StepShape.decodes(int(np.count_nonzero(first)), int(kv[first].sum()))
        rest = (ready & background).nonzero()[0]
        if len(rest):
            view = ShareView(decoding.plus(self._next_prompt(prompt_tokens)), decoding, EMPTY, self._owed_s)
            count = self._share.num_rows(view, kv[rest].astype(np.int64))
            if count < len(rest):
                self.has_held = True
                ready[rest[count:]] = False
        return ready

    def decodes(self, slots: I32, sequences: list[Sequence]) -> None:
        """These sequences decode in this step, in `slots` [n]."""
        kv = self._sequences.slots.total[slots]
        background = np.fromiter((s.is_background for s in sequences), np.bool_, len(sequences))
        num_background = int(np.count_nonzero(background))
        self._decoding = StepShape.decodes(len(sequences) - num_background, int(kv[~background].sum()))
        self._foreground = self._foreground.plus(self._decoding)
        self._background = self._background.plus(StepShape.decodes(num_background, int(kv[background].sum())))
        for sequence in sequences:
            self._count(sequence, 1)

    def chunk_tokens(self, sequence: Sequence, most: int, page_size: int) -> int:
        """How many tokens of a prompt join this step, of at most `most`; 0: none."""
        if not sequence.is_background or most <= 0:
            return most
        view = self._view()
        return self._share.num_tokens(view, sequence.num_computed, most, page_size)

    def has_room(self, sequence: Sequence, page_size: int) -> bool:
        """Whether a waiting sequence could have tokens of its prompt in this step."""
        return self.chunk_tokens(sequence, sequence.total - sequence.num_computed, page_size) > 0

    def chunk(self, sequence: Sequence, start: int, end: int, num_outputs: int) -> None:
        """Tokens `start` to `end` of a prompt are in this step."""
        shape = StepShape.chunk(end - start, start, num_outputs)
        if sequence.is_background:
            self._background = self._background.plus(shape)
        else:
            self._foreground = self._foreground.plus(shape)
        self._count(sequence, end - start)

    def end_step(self, flight: InFlight) -> None:
        """The step is complete: account for it."""
        flight.objective_tokens = dict(self._num_tokens)
        if self._background.num_tokens or self._has_background():
            self._owed_s = self._share.owed_after(self._view())
        else:
            self._owed_s = 0.0

    # ---- inside

    def _view(self) -> ShareView:
        return ShareView(self._foreground, self._decoding, self._background, self._owed_s)

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        objective = sequence.objective
        self._num_tokens[objective] = self._num_tokens.get(objective, 0) + num_tokens
        self._idle_since_s.pop(_served_as(sequence), None)

    def _next_prompt(self, most: int) -> StepShape:
        """The foreground prompt that this step goes on with, as far as is known before its rows are chosen: at most
        `most` tokens."""
        prompts = [s for s in self._sequences.running.values() if not s.decoding and s.has_work and not s.is_background]
        if not prompts:
            return EMPTY
        first = min(prompts, key=self._sequences.rank)
        return StepShape.chunk(max(1, min(most, first.target - first.num_computed)), first.num_computed)

    def _has_background(self) -> bool:
        """Whether background work waits for a step."""
        queue = self._sequences.queue
        if queue.num_of(THROUGHPUT) or queue.num_of(BATCH):
            return True
        running = self._sequences.running.values()
        return any(s.is_background and s.has_work for s in (*running, *self._promoted.values()))

    def _end_slack(self, now: float) -> None:
        """Sequences whose deadlines leave no more time than they need count as `latency` from now on."""
        again = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            sequence = self._others.get(number)
            if sequence is None:
                continue
            slack_s = sequence.deadline_s - now - self._needed_s(sequence)
            if slack_s > 0:
                # What is needed hardly grows while the sequence waits, so half of the slack may pass unseen.
                again.append((now + slack_s / 2, number))
            else:
                sequence.is_background = False
                self._sequences.set_service(sequence, LATENCY)
        for entry in again:
            heapq.heappush(self._deadlines, entry)

    def _needed_s(self, sequence: Sequence) -> float:
        """Predicted seconds until a sequence has generated all that it may, beside the foreground there is, where each
        step takes as long as `StepShare` allows. Infinity without a profile."""
        costs = self._share.costs
        if costs is None:
            return math.inf
        length = len(sequence.tokens)
        generation = next((op for op in sequence.ops if isinstance(op, GenerateOp)), None)
        num_output = 0 if generation is None else generation.max_tokens - generation.num_output
        prompt = max(0, length - sequence.num_computed)
        needed_s = costs.predict_forward_s(StepShape.chunk(prompt, sequence.num_computed, 1)) if prompt else 0.0
        row = StepShape.decodes(1, length + num_output // 2)
        return self._share.factor * (needed_s + num_output * costs.predict_forward_s(self._decoding.plus(row)))

    def _promote(self, now: float) -> None:
        """Let the first sequence of a service go first that has waited for `WINDOW_S` behind others."""
        table = self._sequences
        for service, last in list(self._promoted.items()):
            if not last.has_work or last.state is SequenceState.CLOSED:
                del self._promoted[service]
                if last.state is not SequenceState.CLOSED:  # its next work stands where that of its service does
                    table.set_service(last, _served_as(last))
        running: dict[int, list[Sequence]] = {}
        for sequence in table.running.values():
            if sequence.has_work:
                running.setdefault(_served_as(sequence), []).append(sequence)
        for service in (LATENCY, THROUGHPUT, BATCH):
            if not running.get(service) and not table.queue.num_of(service):
                self._idle_since_s.pop(service, None)
                continue
            if now - self._idle_since_s.setdefault(service, now) < WINDOW_S:
                continue
            if service in self._promoted:
                continue
            candidates = [s for s in running.get(service, ()) if s.service == service]
            first = min(candidates, key=table.rank, default=table.queue.order.first_of(service))
            if first is not None:
                self._promoted[service] = first
                table.set_service(first, FIRST)


def _served_as(sequence: Sequence) -> int:
    """The service that a sequence takes from others of it. One whose deadline leaves no time is served as `latency`."""
    has_no_time = sequence.objective == "deadline" and not sequence.is_background
    return LATENCY if has_no_time else SERVICE[sequence.objective]
