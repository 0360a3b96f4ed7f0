"""Workflows with their rows, analysed, and what schedules need of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weft.testing.word_tokens import WordTokens
from weft.workflow.analysis.analyse import AnalysedGraph, analyse
from weft.workflow.graph import graph_from_dict
from weft.workflow.planner.groups import Costing
from weft.workflow.planner.plan import Plan

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


class ScheduledCall(NamedTuple):
    label: str
    rounds: tuple[int, ...]
    row: int
    engine: int


def scheduled(made: Plan) -> list[ScheduledCall]:
    """The calls in the order of the schedule."""
    operators = made.analysed.unrolled.operators
    return [
        ScheduledCall(operators[number].node, operators[number].rounds, row, part.group.engine)
        for part in made.arrangement.parts
        for number, row in part.group.calls()
    ]
