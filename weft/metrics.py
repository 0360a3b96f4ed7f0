"""Counters and histograms as plain structs, and the metrics of the front.

Owns the arithmetic. `weft.server.metrics_http` renders them as text; engines have their own counters
(`weft.core.wire.EngineStats`). Used from one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from weft.core.wire import HistogramSnapshot

LATENCY_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
"""Bounds of the time to first token."""
TOKEN_GAP_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
)
"""Bounds of the time between two tokens."""
REQUEST_BUCKETS_S = (
    0.01,
    0.03,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
)
"""Bounds of the duration of requests and of their waits in the queue."""
BATCH_SIZE_BUCKETS = tuple(float(2**e) for e in range(11))
"""Sequences in a step: 1, 2, 4 … 1,024."""
TOKEN_COUNT_BUCKETS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
"""Tokens of one request: 1, 2, 5, 10 … 5,000,000."""


RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
"""Bounds of the ratio of measured to predicted times."""


@dataclass(slots=True)
class Counters:
    """Counters that share a name and differ in their label values."""

    values: dict[tuple[str, ...], float] = field(default_factory=dict)

    def add(self, *labels: str, amount: float = 1.0) -> None:
        """Count `amount` more under these label values."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def get(self, *labels: str) -> float:
        """The count under these label values."""
        return self.values.get(labels, 0.0)


class Histogram:
    """Observations counted in buckets with inclusive upper bounds, as in Prometheus."""

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("bucket bounds must increase")
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """[len(bounds) + 1] observations per bucket, not cumulative; the last bucket is unbounded."""
        self.count = 0
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add `times` observations of `value` to its bucket, to the count and to the total."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.total += value * times

    def snapshot(self) -> HistogramSnapshot:
        """A frozen copy, as engines send it."""
        return HistogramSnapshot(self.bounds, list(self.counts), self.total)


class ModelMetrics:
    """Metrics of one served model, measured in the front. Times are in seconds."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(LATENCY_BUCKETS_S)
        """From the arrival of a request to its first token."""
        self.inter_token = Histogram(TOKEN_GAP_BUCKETS_S)
        """Between the tokens of one choice. Tokens that arrive together share the time since the last arrival."""
        self.e2e = Histogram(REQUEST_BUCKETS_S)
        """From the arrival of a request to its last token."""
        self.queue_time = Histogram(REQUEST_BUCKETS_S)
        """From arrival in the engine to the first step; the engine's clock."""
        self.request_prompt_tokens = Histogram(TOKEN_COUNT_BUCKETS)
        self.request_generation_tokens = Histogram(TOKEN_COUNT_BUCKETS)
        self.finished = Counters()
        """Choices by `finish_reason`; `abort` if the choice was cancelled, `error` if it failed."""


class FrontMetrics:
    """Counters and histograms of the front process: per model, per route, and in flight."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = {}
        """By the model's first served name."""
        self.http_requests = Counters()
        """Requests answered, by method, route and status; the route is the pattern, not the path of the request."""
        self.http_in_flight = 0
        self.stream_writes = 0

    def model(self, name: str) -> ModelMetrics:
        """The metrics of a model, created when first asked for."""
        if name not in self.models:
            self.models[name] = ModelMetrics()
        return self.models[name]
