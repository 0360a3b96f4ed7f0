"""What a Weft server counted during a run, from its `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping

COUNTS: Mapping[str, str] = {
    "weft:recomputed_tokens_total": "server_recomputed_tokens",
    "weft:prefill_tokens_total": "server_prefill_tokens",
    "weft:num_preemptions_total": "server_preemptions",
    "weft:kv_page_evictions_total": "server_page_evictions",
    "weft:kv_pages_swapped_out_total": "server_pages_to_host",
    "weft:kv_pages_swapped_in_total": "server_pages_from_host",
    "weft:engine_steps_total": "server_steps",
    "weft:engine_step_device_seconds_total": "server_device_s",
    "weft:engine_step_host_seconds_total": "server_host_s",
}
"""Name of a sample -> the figure."""
DECISIONS = "server_decisions_"
BY_LABEL: Mapping[str, tuple[str, str]] = {
    "weft:wait_returns_total": ("kv", DECISIONS),
    "weft:kv_pages_given_up_total": ("to", "server_pages_given_up_"),
    "weft:kv_waste_token_seconds_total": ("cause", "server_waste_token_s_"),
}
"""Name of a sample -> the label whose value is the end of the figure's name, and the begin of that name."""


def read_counts(exposition: str) -> dict[str, float]:
    """The figures of `COUNTS` and `BY_LABEL` in Prometheus' text format, summed over models and other labels. Raises
    `ValueError` for other texts."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            figure = COUNTS.get(sample.name)
            if sample.name in BY_LABEL:
                label, begin = BY_LABEL[sample.name]
                figure = begin + sample.labels[label]
            if figure is not None:
                found[figure] = found.get(figure, 0.0) + sample.value
    return found


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was counted between two readings. A count that appeared meanwhile began at 0."""
    return {figure: value - before.get(figure, 0.0) for figure, value in after.items()}
