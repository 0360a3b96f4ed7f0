"""Figures from the arrival times of tokens. Pure: times are arguments, in seconds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

PERCENTILES = (50, 90, 95, 99)
SLOW_LOOP_S = 0.01
"""99th percentile of the client's lag above which its latencies are not reliable."""
SLOW_LOOP_SHARE = 0.2
"""The same, as a share of the time between two tokens."""
BUSY_SHARE = 0.8
"""Share of one core, the most that an event loop can use, above which the client limits the load."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When the parts of a successful request came, in seconds of one clock."""

    due_s: float
    """When the request was due. Latencies count from here, so a wait in the client counts too."""
    sent_s: float
    came_s: list[float]
    """Arrival of each token, or of each event if a server sends several tokens in one. Not empty."""
    num_output_tokens: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV was cached; None if the server does not report them."""

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.came_s[0] - self.due_s

    @property
    def total_s(self) -> float:
        """Time to the last token."""
        return self.came_s[-1] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive arrivals; empty for an answer in one piece."""
        return [later - earlier for earlier, later in pairwise(self.came_s)]

    @property
    def per_token_s(self) -> float | None:
        """Mean time per token after the first; None if there is no second."""
        if self.num_output_tokens < 2:
            return None
        return (self.came_s[-1] - self.came_s[0]) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no timing: it was refused, broke off or took too long."""

    kind: str
    """Kind of failure, such as `http_429` or `timeout`."""
    message: str


Outcome = Timing | Failure


class Targets(NamedTuple):
    """Latency targets of goodput, in seconds; None: no target."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def kept_by(self, timing: Timing) -> bool:
        """Whether a request met all targets. A request without a second token meets any time per token."""
        pairs = ((self.ttft, timing.first_s), (self.tpot, timing.per_token_s), (self.e2e, timing.total_s))
        return all(target is None or value is None or value <= target for target, value in pairs)


def parse_targets(texts: Iterable[str]) -> Targets:
    """`ttft:500`, `tpot:50`, `e2e:10000`, in milliseconds, each at most once. Raises `ValueError`."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in Targets._fields:
            raise ValueError(
                f"{text!r} is not a target; known latencies are {', '.join(Targets._fields)}, as in ttft:500"
            )
        if name in found:
            raise ValueError(f"{name} is given twice")
        try:
            found[name] = float(value) / 1000
        except ValueError:
            raise ValueError(f"{text!r} needs a number of milliseconds, as in {name}:500") from None
        if not found[name] > 0:
            raise ValueError(f"{text!r} is not a target; give a positive number of milliseconds")
    return Targets(**found)


def latencies(timings: Sequence[Timing]) -> dict[str, float]:
    """Means and percentiles of TTFT, TPOT, ITL and E2E in milliseconds."""
    series = {
        "ttft_ms": [timing.first_s for timing in timings],
        "tpot_ms": [timing.per_token_s for timing in timings if timing.per_token_s is not None],
        "itl_ms": [gap for timing in timings for gap in timing.gaps_s],
        "e2e_ms": [timing.total_s for timing in timings],
    }
    return {name: value for base, values in series.items() for name, value in distribution(base, values).items()}


def distribution(name: str, values_s: Sequence[float]) -> dict[str, float]:
    """`name_mean` and `name_p…` in milliseconds, from seconds; empty without values."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    figures = {f"{name}_mean": 1000 * statistics.fmean(ordered)}
    return figures | {f"{name}_p{percent}": 1000 * _at(ordered, percent) for percent in PERCENTILES}


def load_figures(outcomes: Sequence[Outcome], elapsed_s: float, targets: Targets) -> dict[str, float]:
    """Figures of one run: latencies of successful requests, rates, goodput, and failures by kind.

    `elapsed_s` is the time from the first arrival to the end of the last request. Failed requests count
    only in `failed_…`.
    """
    timings = [outcome for outcome in outcomes if isinstance(outcome, Timing)]
    figures = latencies(timings) | distribution("send_delay_ms", [timing.sent_s - timing.due_s for timing in timings])
    inputs = sum(timing.num_prompt_tokens for timing in timings)
    outputs = sum(timing.num_output_tokens for timing in timings)
    figures |= {
        "seconds": elapsed_s,
        "requests_per_s": len(timings) / elapsed_s,
        "input_tokens_per_s": inputs / elapsed_s,
        "output_tokens_per_s": outputs / elapsed_s,
        "input_tokens": inputs,
        "output_tokens": outputs,
    }
    if (share := cached_share(timings)) is not None:
        figures["cached_share"] = share
    if targets != Targets():
        good = sum(map(targets.kept_by, timings))
        figures |= {"goodput_requests_per_s": good / elapsed_s, "good_share": good / len(outcomes)}
    failed = Counter(outcome.kind for outcome in outcomes if isinstance(outcome, Failure))
    figures |= {"answered_requests": len(timings), "failed_requests": failed.total()}
    return figures | {f"failed_{kind}": count for kind, count in sorted(failed.items())}


def cached_share(timings: Sequence[Timing]) -> float | None:
    """Share of the prompts' tokens whose KV was cached, 0 to 1; None if no request reports it."""
    told = [timing for timing in timings if timing.num_cached_tokens is not None]
    prompts = sum(timing.num_prompt_tokens for timing in told)
    return sum(timing.num_cached_tokens or 0 for timing in told) / prompts if prompts else None


def doubts(figures: Mapping[str, float]) -> list[str]:
    """Reasons in the client's figures (`client_…`) to doubt the others; empty: none."""
    found = []
    lag, gap = figures.get("client_lag_ms_p99", 0.0), figures.get("tpot_ms_p50")
    bound = 1000 * SLOW_LOOP_S if gap is None else min(1000 * SLOW_LOOP_S, SLOW_LOOP_SHARE * gap)
    if lag > max(1.0, bound):
        found.append(
            f"the client notes events up to {lag:.1f} ms late (99th percentile): latencies are longer here than on the "
            "wire; give the client cores of its own, or another machine"
        )
    busy = figures.get("client_busy_share", 0.0)
    if busy > BUSY_SHARE:
        found.append(
            f"the client is busy {busy:.0%} of the time and limits the load: lower the rate or start several clients"
        )
    return found


class Spread(NamedTuple):
    """A figure over several runs: median, minimum and maximum."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """The median in eight columns, and the extremes, with `digits` decimals."""
        return f"{self.median:8.{digits}f}  ({self.low:.{digits}f} to {self.high:.{digits}f})"


def pair_ratios(others: Sequence[float], ours: Sequence[float]) -> list[float]:
    """The ratio of each run of `others` to its neighbour of `ours`; above 1 if `ours` took less time.

    Runs alternate, so a machine whose speed drifts slows both of a pair. Raises `ValueError` for unequal numbers.
    """
    return [other / mine for other, mine in zip(others, ours, strict=True)]


def over_runs(runs: Iterable[Mapping[str, float]]) -> dict[str, Spread]:
    """Each figure's median and extremes over the runs that have it."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.items():
            values.setdefault(name, []).append(value)
    return {name: Spread.of(found) for name, found in values.items()}


def _at(ordered: Sequence[float], percent: float) -> float:
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
