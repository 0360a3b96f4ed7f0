"""`/metrics`: the counts of engines and front, in Prometheus' text format 0.0.4 or as OpenMetrics 1.0.

Names follow vLLM's, with the prefix `weft:`, so that dashboards need one substitution. Every engine is asked for its
counts during the scrape; one that computes a long step, and answers only behind it, is counted as it was before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client import exposition as text_format
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from weft.abi.errors import WeftError
from weft.core.wire import EngineStats, HistogramSnapshot
from weft.endpoints.models import ActiveModel
from weft.engine.client import EngineClient
from weft.metrics import Histogram, ModelMetrics
from weft.server.state import Service

OPENMETRICS = "application/openmetrics-text"
SCRAPE_TIMEOUT_S = 2.0
"""Longest wait for an engine's counts; without an answer the engine counts as down."""

GAUGES: tuple[tuple[str, str, str], ...] = (
    ("num_requests_running", "num_running", "Operations in the current batch."),
    ("num_requests_waiting", "num_waiting", "Operations waiting for a place in the batch."),
    ("num_sequences", "num_sequences", "Open sequences."),
    ("num_sequences_held", "num_held", "Sequences given up whose KV is kept for a later one."),
    ("kv_pages", "device_pages_total", "KV pages of the device."),
    ("kv_pages_free", "device_pages_free", "KV pages that hold nothing."),
    ("kv_pages_cached", "device_pages_cached", "KV pages that hold a reusable prefix and may be evicted."),
    ("host_kv_pages", "host_pages_total", "KV pages of the host tier."),
    ("host_kv_pages_free", "host_pages_free", "KV pages of the host tier that hold nothing."),
    ("cost_model_factor", "cost_factor", "Factor that corrects predictions of the cost profile."),
    ("saturation_tokens", "saturation_tokens", "Tokens per step above which time grows in proportion."),
)
"""(name, field of `EngineStats`, help text). A field that is None is left out."""

COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of operations that began, cached or not."),
    ("generation_tokens", "generated_tokens", "Tokens generated."),
    ("prefill_tokens", "prefill_tokens", "Prompt tokens that went through a forward pass."),
    ("recomputed_tokens", "recomputed_tokens", "Of those, tokens that had been computed before."),
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix index."),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found there."),
    ("num_preemptions", "preemptions", "Operations interrupted to free pages."),
    ("kv_page_evictions", "evictions", "KV pages evicted from the device."),
    ("kv_pages_swapped_in", "swapped_in_pages", "KV pages copied from the host."),
    ("kv_pages_swapped_out", "swapped_out_pages", "KV pages copied to the host."),
    ("engine_steps", "steps", "Steps of the engine: batches."),
    ("engine_step_device_seconds", "step_device_s", "Time that steps held the device."),
    ("engine_step_host_seconds", "step_host_s", "Time the engine spent scheduling and updating."),
)

HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    ("time_to_first_token_seconds", "time_to_first_token", "From a request's arrival to its first token."),
    (
        "inter_token_latency_seconds",
        "inter_token",
        "Between the tokens of a choice; means of up to 32 where the answer is not streamed.",
    ),
    ("e2e_request_latency_seconds", "e2e", "From a request's arrival to its last token."),
    ("request_queue_time_seconds", "queue_time", "From arrival in the engine to the first step."),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request."),
    ("request_generation_tokens", "request_generation_tokens", "Tokens generated for a request."),
)
"""Name, attribute of `ModelMetrics`, meaning."""
ENGINE_HISTOGRAMS = (
    ("engine_step_time_seconds", "step_time", "Time of a step on the device."),
    ("engine_batch_size", "batch_size", "Sequences in a step."),
    ("engine_batch_tokens", "batch_tokens", "Query tokens in a step."),
    ("cost_model_ratio", "cost_ratio", "Measured to predicted time of a step; 1 is right."),
)
"""Name, attribute of `EngineStats`, meaning."""

CAUSE_COUNTERS = (
    ("kv_waste_token_seconds", "waste", "KV memory x time that did no work."),
    ("kv_retains_ended", "retains_ended", "Retains of KV that ended, by cause."),
)
"""Name, attribute of `EngineStats`, meaning."""
WAIT_COUNTERS = (
    ("wait_returns", "wait_returns", "kv", "Waits that ended, by where the KV was."),
    ("kv_pages_given_up", "pages_given_up", "to", "KV pages given up, by what waited for them."),
)
"""Name, attribute of `EngineStats`, second label, meaning."""


async def exposition(service: Service, accept: str) -> tuple[bytes, str]:
    """The metrics, and their content type: OpenMetrics where `accept`, the request's header, names it."""
    engines = [(model, index) for model in service.models for index in range(len(model.engine.engines))]
    stats = await asyncio.gather(*(_stats(model.engine.engines[index]) for model, index in engines))
    registry = CollectorRegistry()
    registry.register(_Families(service, dict(zip(engines, stats, strict=True))))
    ProcessCollector(registry=registry)
    # All names are valid in both formats as they are: the libraries' default escaping would turn `weft:` into `weft_`.
    unescaped = openmetrics.ALLOWUTF8
    if any(entry.partition(";")[0].strip().lower() == OPENMETRICS for entry in accept.split(",")):
        return openmetrics.generate_latest(registry, unescaped), openmetrics.CONTENT_TYPE_LATEST
    return text_format.generate_latest(registry, unescaped), text_format.CONTENT_TYPE_PLAIN_0_0_4


async def _stats(engine: EngineClient) -> EngineStats | None:
    """Of this moment, or the latest ones of an engine that answers after its step, which may be long."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            return await engine.stats()
    except (WeftError, TimeoutError):
        return engine.latest_stats


class _Families:
    """A Prometheus collector over one snapshot of all counts."""

    def __init__(self, service: Service, stats: dict[tuple[ActiveModel, int], EngineStats | None]):
        """`stats`: by model and number of its engine. Metrics of engines have the label `engine` where a model has
        several."""
        self._service = service
        several = any(index for _, index in stats)
        self._labels = ["model_name", "engine"] if several else ["model_name"]
        found = {
            (model.names[0], str(index)) if several else (model.names[0],): snapshot
            for (model, index), snapshot in stats.items()
        }
        self._engines_of = dict(zip(found, (model.engine.engines[index] for model, index in stats), strict=True))
        self._stats = {labels: snapshot for labels, snapshot in found.items() if snapshot is not None}

    def collect(self) -> Iterator[Metric]:
        """All metric families of the server."""
        yield from self._engines()
        yield from self._models(self._service.metrics.models)
        yield from self._front()

    def _engines(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("weft:engine_up", "Whether the engine serves requests.", labels=self._labels)
        restarts = CounterMetricFamily(
            "weft:engine_restarts", "Times that a dead engine was replaced.", labels=self._labels
        )
        for labels, engine in self._engines_of.items():
            up.add_metric(labels, float(engine.ready))
            restarts.add_metric(labels, engine.num_restarts)
        yield up
        yield restarts
        for metric, field, meaning in GAUGES:
            gauge = GaugeMetricFamily(f"weft:{metric}", meaning, labels=self._labels)
            for labels, stats in self._stats.items():
                value: float | None = getattr(stats, field)
                if value is not None:
                    gauge.add_metric(labels, value)
            yield gauge
        usage = GaugeMetricFamily(
            "weft:kv_cache_usage_perc", "Part of the device's KV pages in use, 0 to 1.", labels=self._labels
        )
        for labels, stats in self._stats.items():
            usage.add_metric(labels, _kv_usage(stats))
        yield usage
        for metric, field, meaning in COUNTERS:
            counter = CounterMetricFamily(f"weft:{metric}", meaning, labels=self._labels)
            for labels, stats in self._stats.items():
                counter.add_metric(labels, getattr(stats, field))
            yield counter
        for metric, field, meaning in ENGINE_HISTOGRAMS:
            family = HistogramMetricFamily(f"weft:{metric}", meaning, labels=self._labels)
            for labels, stats in self._stats.items():
                snapshot: HistogramSnapshot | None = getattr(stats, field)
                if snapshot is not None:
                    family.add_metric(labels, _buckets(snapshot.bounds, snapshot.counts), snapshot.total)
            yield family
        shares = CounterMetricFamily(
            "weft:engine_objective_device_seconds",
            "Time that steps held the device, divided among the objectives of their query tokens.",
            labels=[*self._labels, "objective"],
        )
        for labels, stats in self._stats.items():
            for objective, seconds in sorted(stats.objective_device_s.items()):
                shares.add_metric([*labels, objective], seconds)
        yield shares
        yield from self._waits()
        ended = CounterMetricFamily("weft:engine_operations", "Operations by their end.", labels=[*self._labels, "end"])
        for labels, stats in self._stats.items():
            for end, count in sorted(stats.finished.items()):
                ended.add_metric([*labels, end], count)
        yield ended

    def _waits(self) -> Iterator[Metric]:
        for metric, field, meaning in CAUSE_COUNTERS:
            by_cause = CounterMetricFamily(f"weft:{metric}", meaning, labels=[*self._labels, "cause"])
            for labels, stats in self._stats.items():
                causes: dict[str, float] = getattr(stats, field)
                for cause, amount in causes.items():
                    by_cause.add_metric([*labels, cause], amount)
            yield by_cause
        for metric, field, label, meaning in WAIT_COUNTERS:
            family = CounterMetricFamily(f"weft:{metric}", meaning, labels=[*self._labels, "kind", label])
            for labels, stats in self._stats.items():
                kinds: dict[str, dict[str, int]] = getattr(stats, field)
                for kind, counts in kinds.items():
                    for value, count in counts.items():
                        family.add_metric([*labels, kind, value], count)
            yield family
        ratio = HistogramMetricFamily(
            "weft:wait_ratio", "Time that waits took to the time expected.", labels=[*self._labels, "kind"]
        )
        for labels, stats in self._stats.items():
            for kind, snapshot in stats.wait_ratio.items():
                ratio.add_metric([*labels, kind], _buckets(snapshot.bounds, snapshot.counts), snapshot.total)
        yield ratio

    def _models(self, models: dict[str, ModelMetrics]) -> Iterator[Metric]:
        for metric, field, meaning in HISTOGRAMS:
            family = HistogramMetricFamily(f"weft:{metric}", meaning, labels=["model_name"])
            for name, model in models.items():
                histogram: Histogram = getattr(model, field)
                family.add_metric([name], _buckets(histogram.bounds, histogram.counts), histogram.total)
            yield family
        finished = CounterMetricFamily(
            "weft:request_success", "Choices by how they ended.", labels=["model_name", "finished_reason"]
        )
        for name, model in models.items():
            for (reason,), count in sorted(model.finished.values.items()):
                finished.add_metric([name, reason], count)
        yield finished

    def _front(self) -> Iterator[Metric]:
        metrics = self._service.metrics
        requests = CounterMetricFamily("weft:http_requests", "Requests answered.", labels=["method", "route", "status"])
        for labels, count in sorted(metrics.http_requests.values.items()):
            requests.add_metric(list(labels), count)
        yield requests
        yield GaugeMetricFamily("weft:http_requests_in_flight", "Requests being answered.", metrics.http_in_flight)
        yield CounterMetricFamily("weft:http_stream_writes", "Writes of streams.", metrics.stream_writes)
        yield from self._programs()
        yield from self._workflows()

    def _programs(self) -> Iterator[Metric]:
        programs = self._service.programs
        states = [run.status for run in programs.history.active()]
        yield GaugeMetricFamily("weft:program_runs_running", "Programs that run.", states.count("running"))
        yield GaugeMetricFamily("weft:program_runs_waiting", "Runs that wait for a place.", states.count("queued"))
        endings = CounterMetricFamily("weft:program_runs", "Runs of programs by how they ended.", labels=["status"])
        for status, count in sorted(programs.history.endings.items()):
            endings.add_metric([status], count)
        yield endings
        restarts = "Times that the process that runs programs was started again."
        yield CounterMetricFamily("weft:program_host_restarts", restarts, programs.num_restarts)

    def _workflows(self) -> Iterator[Metric]:
        runs = self._service.workflows.runs
        totals = runs.totals
        yield GaugeMetricFamily("weft:workflow_runs_running", "Runs of workflows in progress.", runs.num_running)
        waiting = "Runs of workflows that wait for their turn."
        yield GaugeMetricFamily("weft:workflow_runs_waiting", waiting, runs.num_waiting)
        for metric, counters, label, meaning in (
            ("workflow_runs", totals.runs, "status", "Runs of workflows by how they ended."),
            ("workflow_rows", totals.rows, "status", "Rows of workflows by how they ended."),
            ("workflow_calls", totals.calls, "answer", "Calls of models by workflows, by what answered."),
            ("workflow_tokens", totals.tokens, "kind", "Tokens of these calls."),
        ):
            family = CounterMetricFamily(f"weft:{metric}", meaning, labels=[label])
            for (value,), count in sorted(counters.values.items()):
                family.add_metric([value], count)
            yield family
        for metric, histogram, meaning in (
            ("workflow_call_queue_seconds", totals.queue_time, "From a call's sending to the model's beginning."),
            ("workflow_call_run_seconds", totals.run_time, "From there to the call's answer."),
        ):
            buckets = _buckets(histogram.bounds, histogram.counts)
            yield HistogramMetricFamily(f"weft:{metric}", meaning, buckets=buckets, sum_value=histogram.total)


def _kv_usage(stats: EngineStats) -> float:
    if not stats.device_pages_total:
        return 0.0
    return 1 - (stats.device_pages_free + stats.device_pages_cached) / stats.device_pages_total


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    labels = [*(str(bound) for bound in bounds), "+Inf"]
    return list(zip(labels, map(float, accumulate(counts)), strict=True))
