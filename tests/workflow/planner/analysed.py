"""Workflows with their rows, analysed, and what schedules need of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.testing.word_tokens import WordTokens
from weft.workflow.analysis.analyse import AnalysedGraph, analyse
from weft.workflow.graph import graph_from_dict
from weft.workflow.planner.groups import Costing

KV_TOKENS = 8192


def analysed(
    raw: dict[str, Any], rows: Sequence[Mapping[str, Any]] | int, statistics: Mapping[str, Any] | None = None
) -> AnalysedGraph:
    tokens = WordTokens()
    return analyse(graph_from_dict(raw), rows, "m", statistics or {}, lambda model: tokens)


def costing_of(work: AnalysedGraph, *kv_tokens: int) -> Costing:
    engines = kv_tokens or (KV_TOKENS,)
    return Costing(work.unrolled.operators, work.prompts, engines, max(engines))


def words(count: int, name: str = "w") -> str:
    return " ".join(f"{name}{number}" for number in range(count))
