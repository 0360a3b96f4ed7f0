"""`StepTimes`: how long the steps of an engine take, and how much is in them, for its statistics."""

from __future__ import annotations

import msgspec

from weft.core.wire import EngineStats
from weft.metrics import BATCH_SIZE_BUCKETS, TOKEN_COUNT_BUCKETS, TOKEN_GAP_BUCKETS_S, Histogram
from weft.sched.in_flight import InFlight


class StepTimes:
    """Counts of the steps that have finished since the engine began."""

    def __init__(self) -> None:
        self.host_s = 0.0
        """Time that the engine's own thread was busy, and did not wait for the device."""
        self._device_s = Histogram(TOKEN_GAP_BUCKETS_S)
        self._rows = Histogram(BATCH_SIZE_BUCKETS)
        self._tokens = Histogram(TOKEN_COUNT_BUCKETS)
        self._objective_s: dict[str, float] = {}
        """Device seconds by objective."""

    def finished(self, flight: InFlight, device_s: float) -> None:
        """Count a step. Its time is divided among objectives by their query tokens."""
        self._device_s.observe(device_s)
        if not flight.num_tokens:
            return
        self._rows.observe(flight.num_rows)
        self._tokens.observe(flight.num_tokens)
        tokens = flight.objective_tokens
        for objective, num_tokens in (("latency", flight.num_tokens - sum(tokens.values())), *tokens.items()):
            if num_tokens:
                seconds = device_s * num_tokens / flight.num_tokens
                self._objective_s[objective] = self._objective_s.get(objective, 0.0) + seconds

    def added_to(self, stats: EngineStats) -> EngineStats:
        """The same statistics with these counts."""
        return msgspec.structs.replace(
            stats,
            step_device_s=self._device_s.total,
            objective_device_s=dict(self._objective_s),
            step_host_s=self.host_s,
            step_time=self._device_s.snapshot(),
            batch_size=self._rows.snapshot(),
            batch_tokens=self._tokens.snapshot(),
        )
