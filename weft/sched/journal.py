"""`Journal`: what the scheduler tells others of what happened: events, counters, traces.

Everything that schedules writes into it; the engine takes the events and makes a picture of the counters.
"""

from __future__ import annotations

from weft.core.wire import Event, TraceSpan
from weft.sched.sequence import Sequence


class Counters:
    """What grows for the engine's life; `EngineStats` is its frozen picture."""

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
        """An operation ended, or a command could not be carried out."""
        self.finished[how] = self.finished.get(how, 0) + 1


class Journal:
    """See the module's docstring."""

    def __init__(self, *, traces: bool):
        self.counters = Counters()
        self.outbox: list[tuple[int, Event]] = []
        """(client, event), in order; the engine takes them."""
        self.answered: list[tuple[int, int]] = []
        """(client, sequence or space) that were given what they asked for and have nothing more under way."""
        self._traces = traces

    def trace(self, sequence: Sequence, what: str, now: float, detail: int = 0) -> None:
        """Note a moment of a request's life, where traces are on."""
        if self._traces:
            self.outbox.append((sequence.client, TraceSpan(sequence.request_id, what, now, detail)))
