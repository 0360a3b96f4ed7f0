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
}
"""Name of a sample -> the figure."""


def read_counts(exposition: str) -> dict[str, float]:
    """The figures of `COUNTS` in Prometheus' text format, summed over models. Raises `ValueError` for other texts."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if (figure := COUNTS.get(sample.name)) is not None:
                found[figure] = found.get(figure, 0.0) + sample.value
    return found


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was counted between two readings. A count that appeared meanwhile began at 0."""
    return {figure: value - before.get(figure, 0.0) for figure, value in after.items()}
