"""How far the planner's schedules are from the best ones, on small workflows of Helium's shapes.

    python -m bench.schedule_gap [--instances 100] [--max-calls 12] [--check-calls 12] [--check-nodes 5000]
                                [--json FILE]

The gap is that of Helium's section 7.3: token steps over those of the optimum, less one, on one engine of 8,192 KV
tokens. What is timed is the schedule of the plan, expanded to calls, by the definition of section 5. The optimum is
that of an exact search; instances of at most `--check-calls` calls are given to HiGHS too, which searches
`--check-nodes` nodes. The benchmark fails where its optimum is another one, or where its lower bound lies above that of
the search. Where the search ends without a proof, the gap counts against its lower bound. Beside it: operator-wise,
query-wise, longest prefix first and random orders.

Then the time of the plan of the trading workflow, 88 operators over 100 rows, tokenizing apart: of the schedule, which
runs wait for, and of the predictions, which are made when they are asked for. The median of `REPEATS`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.schedules import milp, orders
from bench.schedules.exact import ExactSearch
from bench.schedules.problems import KV_TOKENS, MODEL, CallProblem, planned_calls, problem_of
from bench.schedules.shapes import instance
from bench.workflows.shapes import workload
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.testing.word_tokens import WordTokens
from weft.workflow.analysis.analyse import analyse
from weft.workflow.planner.place import PlanEngine
from weft.workflow.planner.plan import make_plan

REPEATS = 9
PLAN_ROWS = 100
WANTED_AVERAGE, WANTED_MAXIMUM = 0.9, 3.6
"""Helium's, in percent."""


def schedules_of(problem: CallProblem, seed: int) -> dict[str, list[int]]:
    """Orders by name: the plan's, and those of systems without one."""
    return {
        "plan": problem.numbers(planned_calls(problem)),
        "operator_wise": orders.operator_wise(problem.calls),
        "query_wise": orders.query_wise(problem.calls),
        "longest_prefix_first": orders.longest_prefix_first(problem.problem, problem.output_tokens),
        "random": orders.at_random(problem.problem, seed),
    }


def measure(seed: int, max_calls: int, check_calls: int, check_nodes: int = milp.MAX_NODES) -> dict[str, Any]:
    """One instance."""
    case = instance(seed, max_calls)
    problem = problem_of(case)
    begun = time.perf_counter()
    found = schedules_of(problem, seed)
    planned_s = time.perf_counter() - begun
    known = tuple(found["plan"])
    optimum = ExactSearch(problem.problem).run(known)
    checked = False
    if len(problem.calls) <= check_calls:
        other = milp.solve(problem.problem, known, check_nodes)
        checked = other.is_proven and optimum.is_proven
        if (checked and other.makespan != optimum.makespan) or other.bound > optimum.makespan:
            sys.exit(f"seed {seed}: the search says {optimum.makespan}, HiGHS {other.makespan}, at least {other.bound}")
    steps = {name: problem.problem.token_steps(order) for name, order in found.items()}
    bound = optimum.bound / KV_TOKENS
    return {
        "seed": seed,
        "shape": case.name,
        "operators": len(case.graph.nodes),
        "rows": len(case.rows),
        "proven": optimum.is_proven,
        "proven_by_highs": checked,
        "best_token_steps": round(bound, 3),
        "token_steps": {name: round(value, 3) for name, value in steps.items()},
        "gap_percent": {name: round(100 * (value / bound - 1), 4) for name, value in steps.items()},
        "schedules_ms": round(1000 * planned_s, 1),
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Averages and maxima by name, and what is not proven."""
    names = results[0]["gap_percent"]
    gaps = {name: [result["gap_percent"][name] for result in results] for name in names}
    return {
        "instances": len(results),
        "proven": sum(result["proven"] for result in results),
        "proven_by_highs": sum(result["proven_by_highs"] for result in results),
        "unproven_seeds": [result["seed"] for result in results if not result["proven"]],
        "average_gap_percent": {name: round(statistics.mean(values), 4) for name, values in gaps.items()},
        "maximum_gap_percent": {name: max(values) for name, values in gaps.items()},
    }


def plan_times(repeats: int = REPEATS) -> dict[str, Any]:
    """Milliseconds of the parts of a large plan."""
    trading = workload("trading", 8.0)
    tokens = WordTokens()
    given = trading.rows
    rows = [
        {key: f"{text} {number}" for key, text in given[number % len(given)].items()} for number in range(PLAN_ROWS)
    ]
    work = analyse(trading.graph, rows, MODEL, {}, lambda model: tokens)
    times: dict[str, list[float]] = {"schedule_ms": [], "prediction_ms": []}
    made = None
    for _ in range(repeats):
        begun = time.perf_counter()
        made = make_plan(work, [PlanEngine(MODEL, KV_TOKENS)])
        scheduled = time.perf_counter()
        assert made.predicted.calls == len(work.unrolled.operators) * PLAN_ROWS
        times["schedule_ms"].append(1000 * (scheduled - begun))
        times["prediction_ms"].append(1000 * (time.perf_counter() - scheduled))
    return {
        "operators": len(work.unrolled.operators),
        "rows": PLAN_ROWS,
        **{name: round(statistics.median(values), 1) for name, values in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--max-calls", type=int, default=12)
    parser.add_argument("--check-calls", type=int, default=12, help="calls up to which HiGHS is asked too")
    parser.add_argument("--check-nodes", type=int, default=5000, help="nodes of HiGHS's search tree")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    results = []
    for seed in range(args.instances):
        results.append(measure(seed, args.max_calls, args.check_calls, args.check_nodes))
        print(f"{seed:3} {results[-1]['shape']:18} {results[-1]['gap_percent']}", flush=True)
    whole = summary(results)
    print(f"{'':24}average  maximum gap, %")
    for name, average in whole["average_gap_percent"].items():
        print(f"{name:22} {average:9.3f} {whole['maximum_gap_percent'][name]:9.3f}")
    print(f"proven: {whole['proven']} of {whole['instances']}, by HiGHS too: {whole['proven_by_highs']}")
    times = plan_times()
    print(", ".join(f"{name} {value}" for name, value in times.items()))
    if args.json is not None:
        command = command_line("bench.schedule_gap")
        write_record(
            args.json, {"command": command, **surroundings(), "summary": whole, "plan_times": times, "results": results}
        )
    average, most = whole["average_gap_percent"]["plan"], whole["maximum_gap_percent"]["plan"]
    if average > WANTED_AVERAGE or most > WANTED_MAXIMUM:
        sys.exit(f"wanted at most {WANTED_AVERAGE} % on average and {WANTED_MAXIMUM} % at most")


if __name__ == "__main__":
    main()
