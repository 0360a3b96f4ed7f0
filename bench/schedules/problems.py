"""An instance as the scheduling problem of Helium's section 5, made from the definition and not by the planner."""

from __future__ import annotations

from typing import NamedTuple

from bench.schedules.shapes import Instance
from weft.testing.word_tokens import WordTokens
from weft.workflow.analysis.analyse import AnalysedGraph, analyse
from weft.workflow.analysis.row_prompts import RowPrompts
from weft.workflow.planner.arrange import arrange
from weft.workflow.planner.cost import PlannedCall, ScheduleProblem, call_problem
from weft.workflow.planner.groups import Costing
from weft.workflow.planner.place import PlanEngine, place

MODEL = "model"
KV_TOKENS = 8192


class CallProblem(NamedTuple):
    """Every call of an instance."""

    analysed: AnalysedGraph
    calls: tuple[tuple[int, int], ...]
    """(operator, row)"""
    output_tokens: tuple[int, ...]
    problem: ScheduleProblem

    def numbers(self, calls: list[tuple[int, int]]) -> list[int]:
        """The calls by their numbers in the problem."""
        return [self.calls.index(call) for call in calls]


def problem_of(instance: Instance) -> CallProblem:
    """The prompts' tree over calls: a segment for each piece of a prompt and each value that it has in the rows."""
    tokens = WordTokens()
    work = analyse(instance.graph, instance.rows, MODEL, instance.statistics, lambda model: tokens)
    operators, prompts = work.unrolled.operators, work.prompts
    num_rows = len(instance.rows)
    calls = tuple((operator, row) for operator in range(len(operators)) for row in range(num_rows))
    segments: dict[tuple[int, int], int] = {}
    weights: list[int] = []
    planned = []
    for number, row in calls:
        path = [_segment(prompts, segments, weights, node, row) for node in prompts.paths[number]]
        needs = tuple(need * num_rows + row for need in operators[number].needs)
        planned.append(PlannedCall(tuple(path), operators[number].output_tokens, needs))
    problem = call_problem(weights, planned, KV_TOKENS)
    return CallProblem(work, calls, tuple(call.output_tokens for call in planned), problem)


def _segment(prompts: RowPrompts, segments: dict[tuple[int, int], int], weights: list[int], node: int, row: int) -> int:
    key = (node, int(prompts.classes[node][row]))
    if key not in segments:
        segments[key] = len(weights)
        weights.append(int(prompts.tokens[node][row]))
    return segments[key]


def planned_calls(problem: CallProblem) -> list[tuple[int, int]]:
    """The calls (operator, row) in the order of the plan's schedule."""
    work = problem.analysed
    costing = Costing(work.unrolled.operators, work.prompts, [KV_TOKENS], KV_TOKENS)
    engines = [PlanEngine(MODEL, KV_TOKENS)]
    weights = [1] * len(work.unrolled.operators)
    placement = place(work.unrolled.operators, weights, work.tree, engines, work.prompts.num_rows)
    return arrange(work.unrolled.operators, work.tree, costing, placement).calls()
