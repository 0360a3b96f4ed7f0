"""The same optimum as a mixed-integer program, solved by HiGHS.

    x[i, j] = 1   call j follows call i directly; x[., j] also from the start, x[i, .] also to the end
    start[j] >= start[i] + usage[i] - sum over k of saving[k, i] x[k, i] - H (1 - x[i, j])
    start[j] >= start[i] + usage[i] - ... + delay[i]             for j that depends on i
    T >= start[j] + usage[j] - ...,   T >= all usage - all savings taken

Usage is positive, so that the second line leaves no cycles among the x.
"""

from __future__ import annotations

from typing import Any

import highspy

from bench.schedules.exact import Optimum
from weft.workflow.planner.cost import ScheduleProblem

MAX_NODES = 200_000
"""Nodes of HiGHS's search tree; the limit is no time, so that runs repeat."""


def solve(problem: ScheduleProblem, known: tuple[int, ...], max_nodes: int = MAX_NODES) -> Optimum:
    """The optimum of a problem on one engine, of single calls. `known` is any order; it bounds the makespan."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("mip_rel_gap", 0.0)
    model.setOptionValue("mip_abs_gap", 0.0)
    model.setOptionValue("mip_max_nodes", max_nodes)
    scale = problem.ticks  # token steps: what the solver's tolerances are made for
    size = len(problem.groups)
    horizon = problem.timing(known).makespan / scale
    follows, starts, finish = _variables(model, problem, horizon)
    usage = [
        group.usage / scale
        - sum((problem.savings[i][j] / scale * follows[i, j] for i in range(size) if (i, j) in follows), start=0.0)
        for j, group in enumerate(problem.groups)
    ]
    for j, group in enumerate(problem.groups):
        model.addConstr(sum(follows[i, j] for i in range(-1, size) if (i, j) in follows) == 1)
        model.addConstr(sum(follows[j, k] for k in range(size + 1) if (j, k) in follows) == 1)
        model.addConstr(finish >= starts[j] + usage[j])
        for need, delay in group.needs:
            model.addConstr(starts[j] >= starts[need] + usage[need] + delay / scale)
    for (i, j), chosen in follows.items():
        if i >= 0 and j < size:
            model.addConstr(starts[j] >= starts[i] + usage[i] - 2 * horizon * (1 - chosen))
    model.addConstr(sum(follows[-1, j] for j in range(size)) == 1)
    model.addConstr(finish >= sum(usage))
    model.minimize(finish)
    return _optimum(model, problem, starts, known)


def _variables(
    model: Any, problem: ScheduleProblem, horizon: float
) -> tuple[dict[tuple[int, int], Any], list[Any], Any]:
    size = len(problem.groups)
    follows = {
        (i, j): model.addBinary()
        for i in range(-1, size)
        for j in range(size + 1)
        if i != j and (i, j) != (-1, size) and not _before(problem, j, i)
    }
    starts = [model.addVariable(0, horizon) for _ in range(size)]
    return follows, starts, model.addVariable(0, horizon)


def _before(problem: ScheduleProblem, first: int, then: int) -> bool:
    """Whether `then` needs `first`, so that `first` cannot follow it."""
    if not (0 <= then < len(problem.groups) and first < len(problem.groups)):
        return False
    return any(need == first for need, _ in problem.groups[then].needs)


def _optimum(model: Any, problem: ScheduleProblem, starts: list[Any], known: tuple[int, ...]) -> Optimum:
    """The order that the solution means, timed without the solver, and the solver's bound."""
    limit = problem.timing(known).makespan
    info = model.getInfo()
    if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        return Optimum(known, limit, 0)
    values = model.vals(starts)
    order = tuple(sorted(range(len(starts)), key=lambda j: (values[j], j)))
    makespan = problem.timing(order).makespan
    proven = model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Optimum(order, makespan, makespan if proven else int(info.mip_dual_bound * problem.ticks))
