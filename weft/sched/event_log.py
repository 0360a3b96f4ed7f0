"""`EventLog`: what has happened during one call of the scheduler: events for clients, counters, traces.

The transitions write into it; `Scheduler` takes the events and returns them to its caller.
"""

from __future__ import annotations

import msgspec

from weft.core.wire import Event, Finished, OpEvent, TraceSpan
from weft.sched.sequence import Sequence


class Events(msgspec.Struct, frozen=True):
    """What became true during a call of the scheduler."""

    messages: list[tuple[int, Event]]
    """(client, event), in order."""
    answered: list[tuple[int, int]]
    """(client, sequence or space) that were given what they asked for and have nothing more under way."""
    is_invalid: bool = False
    """Whether the result that was taken in has numbers that are not finite."""


class SchedulerCounters:
    """Numbers that grow for the engine's life; `EngineStats` is a frozen copy of them."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        self.generated_tokens = 0
        self.space_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.swapped_in_pages = 0
        self.swapped_out_pages = 0
        self.finished: dict[str, int] = {}

    def count_end(self, how: str) -> None:
        """An operation ended in the way `how`, or a command could not be carried out."""
        self.finished[how] = self.finished.get(how, 0) + 1


class EventLog:
    """Collects events until they are taken. The counters go on for the engine's life."""

    def __init__(self, *, traces: bool):
        self.counters = SchedulerCounters()
        self.messages: list[tuple[int, Event]] = []
        """(client, event), in order."""
        self.answered: list[tuple[int, int]] = []
        """As in `Events`."""
        self.is_invalid = False
        """As in `Events`."""
        self.traces = traces

    def send(self, client: int, event: Event) -> None:
        """Add an event for a client, after those before it."""
        self.messages.append((client, event))

    def end(self, client: int, event: OpEvent) -> str:
        """Add and count a terminal event. Returns how it ended: the reason of finishing, `failed` or `cancelled`."""
        how = event.reason if isinstance(event, Finished) else type(event).__name__.lower()
        self.messages.append((client, event))
        self.counters.count_end(how)
        return how

    def trace(self, sequence: Sequence, what: str, now: float, detail: int = 0) -> None:
        """Note a moment of a request's life. Callers see first whether `traces` are on."""
        self.messages.append((sequence.client, TraceSpan(sequence.request_id, what, now, detail)))

    def take(self) -> Events:
        """The events since the last call."""
        taken = Events(self.messages, self.answered, self.is_invalid)
        self.messages, self.answered, self.is_invalid = [], [], False
        return taken
