"""`Sequence`: tokens, the pages computed for them, and the operations still to be done.

Owns the states and the one table of transitions between them. Counters obey, with and without a slot:

    num_written <= num_computed <= total        total == len(tokens) + (sampled tokens still on the device)

`num_computed` counts tokens whose KV some launched step writes, `num_written` those whose step is done. An operation
that needs the logits of the sequence's last token first gives its KV up (`SequenceTable.rewind`), so as to compute it.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal, NamedTuple, Protocol

from weft.cache.nodes import Wait
from weft.cache.page_table import PageTable
from weft.cache.retention import RetainedRun
from weft.core.objectives import Objective
from weft.core.sampling import SamplingParams, StopParams
from weft.core.waits import WaitKind
from weft.core.wire import Dists, PromptOutputs, TokenLogprobs
from weft.sched.masks import Branch, Mask, index_keys
from weft.sched.token_sources import TokenSources


class SequenceState(Enum):
    """What a sequence waits for, or that it runs. `TRANSITIONS` says how it changes."""

    IDLE = "idle"
    """Nothing to compute; keeps its pages while there is room."""
    WAITING = "waiting"
    """Has work, and stands in the queue."""
    DEFERRED = "deferred"
    """Has work, and waits for a prefix that another sequence is computing; then for its turn in the queue."""
    PENDING_FORK = "pending_fork"
    """A fork whose parent is computing the tokens they share."""
    RUNNING = "running"
    """Has a device slot and takes part in steps."""
    CLOSED = "closed"

    __hash__ = object.__hash__
    """Members are single objects; hashing their names, as enums do, is Python."""


TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.IDLE: frozenset({SequenceState.WAITING, SequenceState.PENDING_FORK, SequenceState.CLOSED}),
    SequenceState.WAITING: frozenset(
        {SequenceState.IDLE, SequenceState.DEFERRED, SequenceState.RUNNING, SequenceState.CLOSED}
    ),
    SequenceState.DEFERRED: frozenset({SequenceState.IDLE, SequenceState.WAITING, SequenceState.CLOSED}),
    SequenceState.PENDING_FORK: frozenset(
        {SequenceState.IDLE, SequenceState.WAITING, SequenceState.RUNNING, SequenceState.CLOSED}
    ),
    SequenceState.RUNNING: frozenset({SequenceState.IDLE, SequenceState.WAITING, SequenceState.CLOSED}),
    SequenceState.CLOSED: frozenset(),
}


class StopMonitor(Protocol):
    """Watches the bytes of generated tokens for stop strings."""

    def push(self, token: int, counts: bool) -> StopVerdict:
        """Look at the next token. `counts` is False while stop strings must not end the generation yet."""
        ...


class TokenGuide(Protocol):
    """Follows a grammar through the generated tokens; the masks of what may come next are made outside."""

    def push(self, token: int) -> bool:
        """Take in the next token; True when nothing may follow any more."""
        ...

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further; empty while it can."""
        ...


class StopVerdict(NamedTuple):
    """What a monitor knows after a token."""

    hold_bytes: int = 0
    """How many of the last bytes may belong to a stop string."""
    stop: str | None = None
    """The stop string that is complete now."""
    cut_bytes: int = 0
    """With `stop`: bytes from its start to the end."""


@dataclass(slots=True)
class AppendOp:
    """Known tokens to be added, and what to report of them."""

    op: int
    tokens: array[int]
    arrival_s: float
    outputs: PromptOutputs | None = None
    begun: bool = False
    start: int = 0
    """Where the tokens begin, once they are in the sequence."""
    scores: dict[int, TokenLogprobs] = field(default_factory=dict)
    hidden: list[float] | None = None
    hidden_done: int = 0
    dist: Dists | None = None
    needs_last: bool = field(init=False)
    """Whether the last token has to be computed as well."""
    reads_results: bool = field(init=False)
    """Whether what it reports is computed. Else its KV may be all there already, or be what a step in flight writes for
    another sequence, and no step would end it."""

    def __post_init__(self) -> None:
        outputs = self.outputs
        self.needs_last = outputs is not None and (outputs.hidden is not None or outputs.dist is not None)
        self.reads_results = self.needs_last or (outputs is not None and outputs.logprobs is not None)


@dataclass(slots=True)
class GenerateOp:
    """Sample tokens until a stop condition holds."""

    op: int
    sampling: SamplingParams
    stop: StopParams
    arrival_s: float
    seed: int
    max_tokens: int
    """Resolved: what the caller and the context allow."""
    stop_ids: frozenset[int]
    monitor: StopMonitor | None = None
    guide: TokenGuide | None = None
    """Each token waits for a mask."""
    num_output: int = 0
    """Tokens known to the host; at first, those that were sampled on another engine."""
    num_prompt: int = 0
    num_preemptions: int = 0
    first_launch_s: float | None = None
    first_token_s: float | None = None
    tells_start: bool = False
    """Its client is still to be told of its start."""
    is_plain: bool = field(init=False)
    """Only token ids are needed: no stop strings, no grammar, no log-probabilities."""
    needs_last: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.is_plain = self.monitor is None and self.guide is None and self.sampling.logprobs is None


@dataclass(slots=True)
class ForkInto:
    """The sequence that becomes a copy of this one when it has come this far."""

    child: Sequence
    needs_last: ClassVar[bool] = False


@dataclass(slots=True)
class SetMask:
    """What the tokens to come do not see."""

    op: int
    ranges: bytes
    needs_last: ClassVar[bool] = False


Op = AppendOp | GenerateOp | ForkInto | SetMask

ReturnOrder = Literal["fair", "arrival", "last"]
"""Where a sequence that was intercepted takes its place when it has work again. `fair`: before the newcomers of its
tenant and priority, the oldest session first, but for those that have waited for long (`weft.sched.order`). Among all
others it counts as having come when its first work did, moved forward by all the time for which it was intercepted, and
at most `aging_s` ahead of its return. `arrival`: at the arrival of its first work (APIServe, section 4.3), which an
endless session keeps for ever. `last`: behind all that wait."""

COMING_BACK = 1e15
"""In place of the number of an admission: later than all numbers, earlier than none."""

Rank = tuple[float, float, int]
"""(seconds of arrival, with priority; number of the first admission, or infinity; sequence number)."""


WARM, COLD, NEW = range(3)


@dataclass(slots=True)
class QueuePlace:
    """A sequence's place among those that wait. Owned by `WaitingQueue` and its order, but for the last two fields,
    which the scheduler sets when it defers."""

    since_s: float
    """When the operation under way arrived, or counts as having arrived (`arrive`); at the first admission, no later
    than the arrival of the oldest sequence that was overtaken."""
    first_s: float = math.nan
    """When the first work of the sequence arrived; nan: there was none yet."""
    active_s: float = math.nan
    """The same, moved forward by all the time for which the sequence was intercepted, and at most `aging_s` ahead of
    its last return."""
    line: int = NEW
    """`NEW`, unless the operation under way found the sequence intercepted and its place is that of `fair`: then `WARM`
    if most of its KV was there, else `COLD`."""
    num_known: int = 0
    """Of its tokens, those whose KV was computed before the operation under way: others are new."""
    admission: float = math.inf
    """Number of the first admission for the operation under way; `COMING_BACK` while pages come back before that;
    infinity where it has none."""
    ticket: int = 0
    """Names the one valid entry in the queue's heaps; 0: not in the queue."""
    rank: Rank = (0.0, math.inf, 0)
    """With a ticket: the rank with which it entered the queue."""
    is_turn_based: bool = False
    """How the queue has counted it."""
    service: int = 0
    """As which the queue has counted it."""
    deferred_pages: int = 0
    """Pages of its prefix that were indexed when it was last deferred."""
    held_since_s: float = math.inf
    """Since when one that is not warm waits for KV that is worth more than its admission; infinity: it does not."""
    defer_until_step: int = -1
    """It is not deferred any more from this step on, unless more of its prefix has been indexed; -1: never deferred."""

    @property
    def was_admitted(self) -> bool:
        """Whether it has run, and been charged, for the operation under way."""
        return self.admission < COMING_BACK

    def arrive(
        self, now: float, intercepted_s: float, order: ReturnOrder, aging_s: float, *, has_kv: bool = True
    ) -> None:
        """A sequence that had nothing to do for `intercepted_s` got an operation. `has_kv`: most of its KV is there."""
        self.admission = self.held_since_s = math.inf
        if math.isnan(self.first_s):
            self.first_s = self.active_s = now
        elif order == "fair":
            self.line = WARM if has_kv else COLD
            self.active_s = max(self.active_s + intercepted_s, now - aging_s)
        self.since_s = {"fair": self.active_s, "arrival": self.first_s, "last": now}[order]


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, pages, operations, and the counters that join them. Fields are grouped by their owner."""

    # Who it is: set at creation.
    seq: int
    client: int
    handle: int
    tenant: str
    namespace: str
    request_id: str
    priority: int
    # Where it waits: the queue and its order.
    place: QueuePlace
    # Its KV: the cache owns the table, `adopt_kv` and the methods beside it the counters.
    table: PageTable
    # What it is to be fast at: set at creation, the last two fields by `ServiceClasses`.
    objective: Objective = "latency"
    deadline_s: float = math.inf
    """When it should be done, with objective `deadline`."""
    service: int = 0
    """Those of a smaller one come before it, at any priority."""
    is_background: bool = False
    """It leaves steps to others, as `StepShare` says."""
    state: SequenceState = SequenceState.IDLE
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """Known on the host."""
    total: int = 0
    """`tokens`, and sampled ones that are still on the device."""
    num_computed: int = 0
    num_written: int = 0
    kv_epoch: int = 0
    """Grows when KV in flight becomes void: pages given back, tokens cut off."""
    high_water: int = 0
    """Tokens whose KV existed at some time, of this sequence or of another one with the same tokens: computing them is
    recomputation."""
    sources: TokenSources = field(default_factory=TokenSources)
    """Where the KV of its tokens came from."""
    first_different: int | None = None
    """The first token that differs from the finished turn that it continues up to there."""
    returning: bool = False
    """Its pages are the beginning of what it had; the host has more, which comes with the next steps."""
    has_partial: bool = False
    """While it returns: the page that only begins with its tokens was on the host and is back."""
    wait: Wait | None = None
    """It has given its pages to the prefix index, where this marks the end of its KV."""
    continues: Wait | None = None
    """The wait of the closed sequence that it continues, until it is admitted."""
    retained: RetainedRun | None = None
    """Keeps its KV while it has nothing to do, and after its release."""
    wait_kind: str = WaitKind.PROGRAM
    """What it waits for while it has nothing to do, or will once its work is done."""
    expected_s: float | None = None
    """When it is announced to have something to do again."""
    returned_kind: str = ""
    """What it waited for, from its return until it is admitted, if its KV was in the index meanwhile."""
    reuse_limit: int | None = None
    """Tokens that may come from the index; None: any."""
    num_prompt: int = 0
    """Tokens before those that its last generation added; 0: there was none."""
    # What it has to do: the operations.
    ops: deque[Op] = field(default_factory=deque)
    epoch: int = 0
    """Grows when tokens in flight become void: truncation, cancellation, the end of an operation."""
    failure: tuple[str, str] | None = None
    """(kind, message) of an append that could not be carried out: nothing may be generated on half a prompt."""
    masks: list[Mask] = field(default_factory=list)
    """By where they begin to hold."""
    branches: list[Branch] = field(default_factory=list)
    """From the first mask on, by start."""
    # Where it comes from: forks.
    parent: Sequence | None = None
    unborn: bool = False
    """The fork that creates it still waits among its parent's operations."""
    fork_point: int = 0
    """Tokens shared with `parent`."""
    pending_forks: list[Sequence] = field(default_factory=list)
    """Forks that wait for this sequence to compute the tokens they share."""
    # Where it runs: the sequence table and the step planner.
    slot: int = -1
    decoding: bool = False
    last_step: int = 0
    """The last step, launched or being built, that computes something for it."""
    last_active_s: float = 0.0

    @property
    def level(self) -> tuple[int, int]:
        """(service, priority): sequences of a smaller level come earlier."""
        return self.service, self.priority

    def move_to(self, state: SequenceState) -> None:
        """Change state, along the table of transitions."""
        if state is not self.state:
            if state not in TRANSITIONS[self.state]:
                raise ValueError(f"sequence {self.seq} cannot go from {self.state.value} to {state.value}")
            self.state = state

    # KV counters. These four methods alone change them, and their forms for a whole step, `begin_decodes` and
    # `finish_decodes`: a call for each of hundreds of sequences would be a tenth of what the host does in a step.

    def adopt_kv(self, num_computed: int, num_written: int) -> None:
        """Take over KV that the prefix index or a parent has."""
        assert num_written <= num_computed
        self.num_computed, self.num_written = num_computed, num_written

    def begin_kv(self, end: int) -> None:
        """The step being built computes the KV of tokens `num_computed` to `end`."""
        self.num_computed = end

    def finish_kv(self, end: int) -> None:
        """A step is done that wrote the KV of tokens up to `end`."""
        if end > self.num_written:
            self.num_written = end

    def cut_kv(self, num_tokens: int) -> None:
        """Give up the KV past the first `num_tokens` tokens. What steps in flight write of it is void."""
        if num_tokens < self.num_computed:
            self.kv_epoch += 1
            self.high_water = max(self.high_water, self.num_computed)
            self.num_computed = num_tokens
            self.num_written = min(self.num_written, num_tokens)

    @property
    def head(self) -> Op | None:
        """The operation under way; None: there is nothing to do."""
        return self.ops[0] if self.ops else None

    def begin_branch(self, number: int) -> None:
        """Give the tokens to come keys of their own, if there are masks."""
        length = len(self.tokens)
        kept = [branch for branch in self.branches if branch.start < length]
        self.branches = [*kept, Branch(length, number)] if self.masks else []

    @property
    def index_keys(self) -> array[int]:
        """[tokens] by what the prefix index knows them. Not to be changed."""
        return index_keys(self.tokens, self.branches)

    @property
    def num_plain(self) -> int:
        """Tokens that saw everything before them: other sequences may find the KV of these alone."""
        return self.branches[0].start if self.branches else len(self.tokens)

    @property
    def target(self) -> int:
        """How many tokens should have KV by now, given the operation under way."""
        if self.ops and self.ops[0].needs_last:
            return self.total
        return max(self.total - 1, 0)

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something for it."""
        last = 0 if self.ops and self.ops[0].needs_last else 1
        return self.total - self.num_computed > last

    @property
    def num_pending(self) -> int:
        """Sampled tokens that the host does not know yet."""
        return self.total - len(self.tokens)


def begin_decodes(sequences: Iterable[Sequence], step_id: int) -> list[tuple[Sequence, int, int]]:
    """`begin_kv` for sequences that each compute one token in step `step_id`, and will have one more then. Returns
    (sequence, its `kv_epoch`, how many tokens have KV once the step is done)."""
    decoded = []
    for sequence in sequences:
        end = sequence.total
        decoded.append((sequence, sequence.kv_epoch, end))
        sequence.num_computed = end
        sequence.total = end + 1
        sequence.last_step = step_id
    return decoded


def finish_decodes(decoded: Iterable[tuple[Sequence, int, int]], page_size: int) -> list[tuple[Sequence, int]]:
    """`finish_kv` for what `begin_decodes` returned, unless the KV is void by now. Returns (sequence, tokens with KV)
    where that fills a page or the sequence decodes no longer: few in most steps."""
    noted = []
    for sequence, epoch, end in decoded:
        if sequence.kv_epoch != epoch:
            continue
        if end > sequence.num_written:
            sequence.num_written = end
        if end // page_size > sequence.table.num_indexed or not sequence.decoding:
            noted.append((sequence, end))
    return noted
