"""`Scheduler`: one state machine. Commands, time and results of steps go in; steps and events come out.

    handle(client, commands, now) -> events          what clients ask for
    schedule(now)                 -> step, flight, events   what the device does next, as data
    update(flight, result, now)   -> events          what became true, one step behind

Owns the state and lets nothing else change it. Knows no device, no socket and no clock, and takes no seed of its own:
the same calls give the same steps and the same events. Not safe for use from several threads. The engine calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from weft.abi.errors import Unsupported
from weft.cache.manager import KVCache
from weft.core.cost.model import CostModel
from weft.core.grammar import Grammar
from weft.core.step import Step, StepResult
from weft.core.wire import Command, EngineStats
from weft.sched.commands import CommandHandler, GuideFactory, MonitorFactory
from weft.sched.config import SchedulerConfig
from weft.sched.event_log import Events
from weft.sched.in_flight import InFlight
from weft.sched.outcome import update
from weft.sched.planner import StepPlanner
from weft.sched.policies import InterceptPolicy, make_policy
from weft.sched.sequence import AppendOp, StopMonitor, TokenGuide
from weft.sched.sequence_table import SequenceTable
from weft.sched.session_list import SessionList, list_sessions
from weft.sched.spaces.spaces import Spaces
from weft.sched.state import SchedulerState

__all__ = ["Scheduled", "Scheduler", "SchedulerConfig"]


class Scheduled(NamedTuple):
    """The next step, and what there is to know about it."""

    step: Step
    """An empty one must not be launched."""
    flight: InFlight
    """What the step's results will mean."""
    events: Events
    """What became true while it was decided."""


def _no_monitor(stop: list[bytes]) -> StopMonitor:
    raise Unsupported("this scheduler has no text of its tokens, so it matches no stop strings")


def _no_guide(grammar: Grammar, tenant: str) -> TokenGuide:
    raise Unsupported("this scheduler has no grammar compiler", "grammar")


class Scheduler:
    """The state of one engine's scheduling, and the only way to change it."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        make_monitor: MonitorFactory = _no_monitor,
        make_guide: GuideFactory = _no_guide,
        policy: InterceptPolicy | None = None,
        costs: CostModel | None = None,
    ):
        """`make_monitor` and `make_guide` make what follows stop strings and grammars through generated tokens.
        `policy` decides whose KV goes, by default `min_waste`; `costs` predict the worker's steps, None: there is no
        profile."""
        policy = policy or make_policy()
        if not policy.keeps_rank:
            config = msgspec.structs.replace(config, return_order="last")
        self._state = SchedulerState(config, cache, policy, costs)
        self._commands = CommandHandler(self._state, make_monitor, make_guide)
        self._planner = StepPlanner(self._state)

    # Commands

    def handle(self, client: int, commands: Iterable[Command], now: float) -> Events:
        """Carry out commands of a client. What is wrong with one becomes its `Failed` event; the others are carried
        out."""
        for command in commands:
            self._commands.apply(client, command, now)
        return self._state.log.take()

    def drop_client(self, client: int, now: float) -> Events:
        """A client is gone: give up all its sequences and spaces. Its own events are among those returned."""
        self._commands.drop_client(client, now)
        return self._state.log.take()

    def expire(self, now: float) -> Events:
        """Fail commands on spaces that have waited for room as long as they may."""
        self._state.spaces.expire(now)
        return self._state.log.take()

    def drain(self) -> None:
        """Take no new sequences and spaces."""
        self._commands.drain()

    # Steps

    def schedule(self, now: float) -> Scheduled:
        """Decide the next step. Nothing is in flight before `launched` says so."""
        step, flight = self._planner.plan(now)
        return Scheduled(step, flight, self._state.log.take())

    def launched(self, step_id: int) -> None:
        """The step returned last is on its way."""
        self._state.last_step_id = step_id
        self._state.cache.tiers.copies.launched = step_id

    def update(self, flight: InFlight, result: StepResult, now: float) -> Events:
        """Take in the result of a step, in launch order."""
        update(self._state, flight, result, now)
        return self._state.log.take()

    # What is there

    @property
    def config(self) -> SchedulerConfig:
        """The configuration that the scheduler was built with."""
        return self._state.config

    @property
    def sequences(self) -> SequenceTable:
        """All open sequences and where they are. To be read only."""
        return self._state.sequences

    @property
    def spaces(self) -> Spaces:
        """All open spaces. To be read only."""
        return self._state.spaces

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something, now or once steps in flight are done."""
        sequences = self._state.sequences
        if sequences.running or len(sequences.queue) > 0 or self._state.spaces.has_work:
            return True
        return bool(self._state.residency.moves)

    @property
    def num_ready(self) -> int:
        """Sequences and queues that a step could serve."""
        sequences = self._state.sequences
        return len(sequences.running) + len(sequences.queue) + self._state.spaces.num_ready

    @property
    def intercepted_tokens(self) -> int:
        """KV tokens on the device of sequences that wait for something other than the device."""
        return self._state.interception.tokens_on_device()

    @property
    def is_turn_based(self) -> bool:
        """Whether all work is turn-based: single commands of programs, which look at the answer before they go on. Then
        nothing is gained by building a step while another runs."""
        sequences = self._state.sequences
        if sequences.num_decoding:
            return False
        return sequences.queue.is_turn_based and all(isinstance(s.head, AppendOp) for s in sequences.running.values())

    def sessions(self, tenant: str, limit: int, now: float) -> SessionList:
        """The `limit` sequences of a tenant that wait longest, and how many wait."""
        return list_sessions(self._state, tenant, limit, now)

    def stats(self) -> EngineStats:
        """Frozen counts of scheduler and cache; the engine adds the times."""
        state = self._state
        waits = state.interception.waits
        waits.tell(state.interception.policy)
        sequences, tiers, counters = state.sequences, state.cache.tiers, state.log.counters
        return EngineStats(
            num_running=len(sequences.running),
            num_waiting=len(sequences.queue),
            num_held=state.cache.retention.num_held,
            num_sequences=len(sequences),
            num_spaces=len(state.spaces),
            space_pages=state.spaces.num_pages,
            device_pages_total=tiers.device.num_pages,
            device_pages_free=tiers.device.num_free + tiers.device.num_fenced,
            device_pages_cached=tiers.num_evictable,
            host_pages_total=tiers.host.num_pages,
            host_pages_free=tiers.host.num_free,
            steps=state.last_step_id,
            prompt_tokens=counters.prompt_tokens,
            prefill_tokens=counters.prefill_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            generated_tokens=counters.generated_tokens,
            space_tokens=counters.space_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            evictions=tiers.num_evicted,
            swapped_in_pages=counters.swapped_in_pages,
            swapped_out_pages=counters.swapped_out_pages,
            finished=dict(counters.finished),
            wait_returns=_nested(waits.returns),
            pages_given_up=_nested(tiers.uses.moved_pages),
            retains_ended=dict(sorted(state.cache.retention.ended.items())),
            wait_ratio={kind: ratios.snapshot() for kind, ratios in sorted(waits.ratios.items())},
        )


def _nested(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (kind, what), count in sorted(counts.items()):
        nested.setdefault(kind, {})[what] = count
    return nested
