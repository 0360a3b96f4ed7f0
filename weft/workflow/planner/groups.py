"""Scheduling problems of a workflow's rows: groups of operators over ranges of rows, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from weft.workflow.analysis.operators import Operator
from weft.workflow.analysis.row_prompts import I64, RowPrompts
from weft.workflow.planner.cost import CallGroup, ScheduleProblem, decode_usage

Order = Literal["rows", "nodes"]
"""Row by row, in each all operators; or operator by operator, for each all rows."""


class OperatorGroup(NamedTuple):
    """Operators that run next to each other for some rows. None of them depends on another."""

    operators: tuple[int, ...]
    rows: tuple[int, int]
    """From, to (exclusive)."""
    engine: int = 0
    order: Order = "nodes"

    def calls(self) -> list[tuple[int, int]]:
        """(operator, row) of each call, in the order that `order` says."""
        rows = range(*self.rows)
        if self.order == "rows":
            return [(operator, row) for row in rows for operator in self.operators]
        return [(operator, row) for operator in self.operators for row in rows]


class Costing:
    """Token usage of operators over rows (Helium, section 5), in ticks."""

    def __init__(self, operators: Sequence[Operator], prompts: RowPrompts, kv_tokens: Sequence[int], ticks: int):
        """`kv_tokens` [engines]."""
        self.operators = operators
        self.prompts = prompts
        self.kv_tokens = kv_tokens
        """[engines] capacity."""
        self.ticks = ticks
        self.alphas = [ticks // tokens for tokens in kv_tokens]
        """[engines] ticks per token of context and step."""
        self._usages = [self._usage(number) for number in range(len(operators))]

    def _usage(self, number: int) -> I64:
        """[rows] tokens x steps of an operator's calls of a row, which share their prompts' beginning, behind a call
        with which the first shares nothing."""
        operator = self.operators[number]
        prompt = self.prompts.prompt_tokens(number)
        alone = operator.output_tokens * prompt + decode_usage(operator.output_tokens)
        if operator.items == 1:
            return alone
        shared = self.prompts.shared_by_items(number, operator.shared_by_items)
        return alone * operator.items - (operator.items - 1) * operator.output_tokens * shared

    def delay(self, operator: int) -> int:
        """The precedence delay in ticks: alpha x M x output tokens, the same on every engine."""
        return self.ticks * self.operators[operator].output_tokens

    def group(self, group: OperatorGroup) -> tuple[int, int, int]:
        """Usage of all its calls, of those of its first row, and of those of its last, in ticks."""
        usages = [self._usages[operator][slice(*group.rows)] for operator in group.operators]
        alpha = self.alphas[group.engine]
        total = sum(int(usage.sum()) for usage in usages) - self._saved(group)
        if group.order == "rows":
            within = self._within_row(group)
            first = sum(int(usage[0]) for usage in usages) - int(within[0])
            last = sum(int(usage[-1]) for usage in usages) - int(within[-1])
        else:
            first, last = int(usages[0][0]), int(usages[-1][-1])
        return alpha * total, alpha * first, alpha * last

    def best_order(self, group: OperatorGroup) -> OperatorGroup:
        """The group in the order that costs less; `nodes` where both cost the same."""
        orders: tuple[Order, ...] = ("nodes", "rows")
        return min((group._replace(order=order) for order in orders), key=lambda one: -self._saved(one))

    def _saved(self, group: OperatorGroup) -> int:
        """Tokens x steps that calls of the group save behind each other."""
        rows = np.arange(*group.rows)
        if group.order == "rows":
            across = self._between(group.operators[-1], rows[:-1], group.operators[0], rows[1:])
            return int(self._within_row(group).sum()) + int(across.sum())
        saved = 0
        for operator in group.operators:
            saved += int(self._between(operator, rows[:-1], operator, rows[1:]).sum())
        for one, other in zip(group.operators, group.operators[1:], strict=False):
            saved += int(self._between(one, rows[-1:], other, rows[:1]).sum())
        return saved

    def _within_row(self, group: OperatorGroup) -> I64:
        """[rows] tokens x steps that the calls of one row save behind each other."""
        rows = np.arange(*group.rows)
        saved = np.zeros(len(rows), np.int64)
        for one, other in zip(group.operators, group.operators[1:], strict=False):
            saved += self._between(one, rows, other, rows)
        return saved

    def _between(self, one: int, rows: I64, other: int, others: I64) -> I64:
        """[n] tokens x steps that `other` saves in `others` [n] behind `one` in `rows` [n]."""
        nodes = self.prompts.common(one, other)
        return self.operators[other].output_tokens * self.prompts.shared(nodes, others, rows)


def schedule_problem(groups: Sequence[OperatorGroup], costing: Costing) -> ScheduleProblem:
    """The problem of ordering these groups. Where an operator needs another, both are in groups of the same rows."""
    at = {(operator, group.rows): number for number, group in enumerate(groups) for operator in group.operators}
    made = []
    for group in groups:
        usage, first, last = costing.group(group)
        delays: dict[int, int] = {}
        for operator in group.operators:
            for need in costing.operators[operator].needs:
                number = at[need, group.rows]
                delays[number] = max(delays.get(number, 0), costing.delay(need))
        single = len(group.operators) == 1 and group.rows[1] - group.rows[0] == 1
        needs = tuple(sorted(delays.items()))
        num_calls = len(group.operators) * (group.rows[1] - group.rows[0])
        made.append(CallGroup(usage, needs, group.engine, None if single else first, 0 if single else last, num_calls))
    return ScheduleProblem(made, _savings(groups, costing), costing.ticks, len(costing.alphas))


def _savings(groups: Sequence[OperatorGroup], costing: Costing) -> list[list[int]]:
    """[groups, groups] what the second's first call saves behind the first's last."""
    prompts = costing.prompts
    edges = sorted({edge for group in groups for edge in (group.rows[0], group.rows[1] - 1)})
    index = {row: number for number, row in enumerate(edges)}
    matrices = prompts.shared_matrices(np.array(edges, np.int64))
    first = [group.operators[0] for group in groups]
    last = [group.operators[-1] for group in groups]
    before = np.array([index[group.rows[1] - 1] for group in groups])
    after = np.array([index[group.rows[0]] for group in groups])
    # One index for all pairs: a node that no pair has in common is the last of the matrices, which is empty.
    savings = matrices[prompts.last_common[np.ix_(last, first)], after[None, :], before[:, None]]
    factors = [
        costing.alphas[group.engine] * costing.operators[one].output_tokens
        for group, one in zip(groups, first, strict=True)
    ]
    # Python's integers: those of numpy would overflow for engines whose capacities have few common factors.
    return [[saved * factor for saved, factor in zip(row, factors, strict=True)] for row in savings.tolist()]
