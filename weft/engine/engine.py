"""`Engine`: the loop that joins scheduler and worker. One engine serves one model.

Owns the order of things: commands in, a step launched, its masks bound, the step before it understood, events out.
Knows nothing of sockets or processes; `inline.py` and `process.py` run it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from weft.abi.errors import UnknownHandle, WeftError
from weft.cache.manager import KVCache
from weft.core.clock import Clock, SystemClock
from weft.core.cost.model import CostModel
from weft.core.protocols import Worker
from weft.core.step import LateInputs, Step, StepHandle
from weft.core.wire import (
    LEASE_ENDED,
    Cancelled,
    Command,
    EngineInfo,
    EngineStats,
    Envelope,
    Event,
    Failed,
    ListSessions,
    Sessions,
)
from weft.engine.costs import StepCosts
from weft.engine.gather import Adaptive, Gather, Policy
from weft.engine.grammar import Compiling, Encode, Grammars
from weft.engine.grammar_text import MAX_JSON_STRING_CHARS
from weft.engine.step_times import StepTimes
from weft.engine.stop import StopMatcher
from weft.sched.event_log import Events
from weft.sched.in_flight import InFlight
from weft.sched.policies import InterceptPolicy
from weft.sched.scheduler import Scheduler, SchedulerConfig
from weft.sched.step_share import held_factor
from weft.sched.waste_meter import WasteMeter

_log = logging.getLogger("weft.engine")

Publish = Callable[[int, Envelope], None]
"""Called with (client, what became true for it)."""


_UNMASKED = LateInputs()


class _Launched(msgspec.Struct, frozen=True):
    """A step on the device."""

    step: Step
    handle: StepHandle
    flight: InFlight
    is_guided: bool
    """Its samplers wait for masks."""


class Engine:
    """Joins one scheduler and one worker. Used from one thread."""

    def __init__(
        self,
        worker: Worker,
        config: SchedulerConfig,
        publish: Publish,
        *,
        model: str = "",
        token_bytes: list[bytes] | None = None,
        special_ids: Iterable[int] = (),
        encode: Encode | None = None,
        overlap: bool = True,
        clock: Clock | None = None,
        cost_model: CostModel | None = None,
        policy: Policy | None = None,
        intercept: InterceptPolicy | None = None,
        max_string_chars: int | None = MAX_JSON_STRING_CHARS,
    ):
        """`cost_model` predicts the worker's steps; it is corrected by what they take. `policy` says when a step of
        programs' commands begins, `intercept` whose KV goes. `token_bytes` has an entry for every row of the
        vocabulary, and `encode` makes tokens of a text; without them there are no stop strings and no grammars.
        `max_string_chars` limits strings whose JSON schema does not."""
        spec = worker.spec
        config = msgspec.structs.replace(
            config, num_device_slots=spec.num_slots, num_embeds=spec.num_embed_slots, has_windows=spec.has_windows
        )
        self.worker = worker
        self.clock = clock or SystemClock()
        self.cache = KVCache(spec.num_device_pages, spec.num_host_pages, spec.page_size)
        self._grammars = Grammars(
            token_bytes or [], special_ids, config.eos_token_ids, encode, max_string_chars=max_string_chars
        )
        self.scheduler = Scheduler(
            config,
            self.cache,
            lambda stop: StopMatcher(stop, token_bytes or []),
            self._grammars.guide,
            intercept,
            cost_model,
        )
        self._compiling = Compiling(self._grammars, self._carry_out, self.scheduler.sequences.tenant_of)
        self.costs = StepCosts(cost_model)
        self._waste = WasteMeter(cost_model, spec.page_size)
        self._publish = publish
        self._overlap = overlap
        self._gather = Gather(policy or Adaptive())
        self._messages: list[tuple[int, Event]] = []
        """(client, event), to be published."""
        self._previous: _Launched | None = None
        """The step on the device, when no step is being built."""
        self._waited_s = 0.0
        """Of the turn under way, how long it waited for the device."""
        self._times = StepTimes()
        self.info = EngineInfo(
            model=model,
            vocab_size=config.vocab_size,
            hidden_size=spec.hidden_size,
            page_size=spec.page_size,
            num_device_pages=spec.num_device_pages,
            num_host_pages=spec.num_host_pages,
            max_context=config.max_context,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            eos_token_ids=config.eos_token_ids,
            device=spec.device,
            dtype=spec.dtype,
            bytes_per_page=spec.bytes_per_page,
            pid=os.getpid(),
            explicit_pages=not spec.has_windows and spec.num_embed_slots > 0,
            num_embeds=spec.num_embed_slots,
            max_space_pages=int(spec.num_device_pages * config.space_fraction),
            forward=None if cost_model is None else cost_model.forward,
            held_factor=1.0 if cost_model is None else held_factor(config.latency_factor, config.min_share),
        )

    def submit(self, client: int, commands: Iterable[Command]) -> None:
        """Take in commands, between steps. Nothing is computed yet."""
        commands = list(commands)
        self._gather.returned(client, commands, self.clock.now())
        self._compiling.take(client, commands)

    def drop_client(self, client: int) -> None:
        """Release everything a client holds, because its lease ended. Its operations fail with `UnknownHandle`: a
        client that was only stopped for a while still waits for them."""
        ended = UnknownHandle(
            "the engine heard nothing from this client for as long as its lease (`lease_s`) and released what it held",
            LEASE_ENDED,
        )
        for op in self._compiling.drop_client(client):
            self._messages.append((client, Failed.of(op, ended)))
        self._gather.gone(client)
        events = self.scheduler.drop_client(client, self.clock.now())
        for index, (to, event) in enumerate(events.messages):
            if to == client and isinstance(event, Cancelled):
                events.messages[index] = client, Failed.of(event.op, ended, event.usage)
        self._note(events)

    def drain(self) -> None:
        """Take no new sequences and spaces."""
        self.scheduler.drain()

    @property
    def compiling(self) -> bool:
        """Whether commands wait for a grammar; `advance` looks whether they still have to."""
        return bool(self._compiling)

    @property
    def waiting_for_room(self) -> bool:
        """Whether commands wait for pages or embeddings; `advance` looks whether they still may."""
        return self.scheduler.spaces.is_waiting

    @property
    def is_empty(self) -> bool:
        """Whether no client holds a sequence or a space."""
        return len(self.scheduler.sequences) == 0 and len(self.scheduler.spaces) == 0

    def advance(self) -> None:
        """Carry out commands whose grammar is ready now, and fail those that have waited for room too long."""
        self._compiling.advance()
        if self.waiting_for_room:
            self._note(self.scheduler.expire(self.clock.now()))

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return self._previous is not None or self.scheduler.has_work

    def gather_s(self) -> float:
        """How many seconds to listen for more commands before the next step; 0: it may begin."""
        if self._previous is not None or not self.scheduler.is_turn_based:
            return 0.0
        num_ready = self.scheduler.num_ready
        return self._gather.wait_s(num_ready, self.clock.now(), self.costs.turn_s(num_ready))

    def step(self) -> bool:
        """One turn of the loop: launch the next step, then take in the one before. False when there was nothing to do.

        Raises what the worker raised; the engine cannot be used afterwards.
        """
        began, self._waited_s = time.perf_counter(), 0.0
        previous, self._previous = self._previous, None
        if previous is not None and self.scheduler.is_turn_based:
            self._update(previous)
            step_id, did_something = previous.flight.step_id, True
        else:
            step, flight, events = self.scheduler.schedule(self.clock.now())
            self._note(events)
            launched = None if step.is_empty else self._launch(step, flight)
            if previous is not None:
                self._update(previous)
            elif launched is None and self.scheduler.has_work:
                raise WeftError("the scheduler has work and no way to do it: a bug in Weft")
            if launched is not None:
                self._bind_late(launched)
            if self._overlap:
                self._previous = launched
            elif launched is not None:
                self._update(launched)
            step_id = step.step_id
            did_something = launched is not None or previous is not None
        self.publish(step_id)
        self._times.host_s += time.perf_counter() - began - self._waited_s
        return did_something

    def publish(self, step_id: int) -> None:
        """Send what became true, one message for each client."""
        messages, self._messages = self._messages, []
        if not messages:
            return
        by_client: dict[int, list[Event]] = {client: [] for client, _ in messages}
        if len(by_client) == 1:
            by_client[messages[0][0]] = [event for _, event in messages]
        else:
            for client, event in messages:
                by_client[client].append(event)
        for client, events in by_client.items():
            self._publish(client, Envelope(step_id, events))

    def stats(self) -> EngineStats:
        """A frozen snapshot of the engine."""
        model = self.costs.model
        return msgspec.structs.replace(
            self._times.added_to(self.scheduler.stats()),
            waste=self._waste.total._asdict(),
            cost_ratio=None if model is None else self.costs.ratios.snapshot(),
            cost_factor=None if model is None else model.factor,
            saturation_tokens=None if model is None else model.saturation_tokens,
        )

    def sessions(self, command: ListSessions) -> Sessions:
        """The sequences of a tenant that wait."""
        found = self.scheduler.sessions(command.tenant, command.limit, self.clock.now())
        return Sessions(query=command.query, sessions=found.sessions, total=found.total)

    def close(self) -> None:
        """Finish what was launched, stop compiling grammars and give back the device's memory."""
        self._grammars.close()
        self.worker.close()

    def _carry_out(self, client: int, commands: list[Command]) -> None:
        self._note(self.scheduler.handle(client, commands, self.clock.now()))

    def _note(self, events: Events) -> None:
        """Keep events for the next message to their clients."""
        self._messages += events.messages
        if events.answered:
            now = self.clock.now()
            for who in events.answered:
                self._gather.answered(who, now)

    def _launch(self, step: Step, flight: InFlight) -> _Launched:
        """Begin a step. It is bound at once unless it waits for masks, which follow from tokens of the step before and
        may still be on the device."""
        handle = self.worker.launch(step)
        self.scheduler.launched(step.step_id)
        is_guided = step.sampling is not None and bool(np.count_nonzero(step.sampling.late_mask))
        if not is_guided:
            self.worker.bind(handle, _UNMASKED)
        self.costs.launched(step)
        self._waste.launched(step, flight)
        return _Launched(step, handle, flight, is_guided)

    def _bind_late(self, launched: _Launched) -> None:
        """Give a guided step its masks, while its forward runs."""
        if launched.is_guided:
            self.worker.bind(launched.handle, self._grammars.masks(launched.step, launched.flight))

    def _update(self, launched: _Launched) -> None:
        """Wait for a step and take in its result."""
        began = time.perf_counter()
        result = launched.handle.wait()
        self._waited_s += time.perf_counter() - began
        self._times.finished(launched.flight, result.device_s)
        self._gather.stepped(result.device_s)
        self.costs.finished(result)
        self._waste.finished(result.step_id, result.device_s)
        events = self.scheduler.update(launched.flight, result, self.clock.now())
        if events.is_invalid:
            _log.error(
                "step %d of %s computed numbers that are NaN or infinite; the requests they belong to fail. Check the "
                "checkpoint, or serve it with dtype float32",
                result.step_id,
                self.info.model or "the model",
            )
        self._note(events)
