"""A plan: the order in which a workflow's calls run, and what is known of the run before it begins.

Plans are functions of their arguments: equal in every process and for every order of the nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from weft.workflow.analysis.analyse import AnalysedGraph
from weft.workflow.analysis.objectives import CallObjective, OutputObjective, node_objectives
from weft.workflow.analysis.row_prompts import I64
from weft.workflow.graph import digest
from weft.workflow.planner.arrange import Arrangement, arrange
from weft.workflow.planner.cost import ticks_of
from weft.workflow.planner.groups import Costing, OperatorGroup
from weft.workflow.planner.place import PlanEngine, engines_by_model, place
from weft.workflow.planner.predict import Predicted, Prediction


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan takes beside the workflow and its engines."""

    objective: Mapping[str, OutputObjective] | OutputObjective = "throughput"
    """For all outputs, or by name."""
    passes: Sequence[Mapping[str, Any]] = ()
    """What the optimiser did to the graph; the plan repeats it."""
    digest: str | None = None
    """Of the graph before that; None: of the one that is planned."""


class ScheduledCall(NamedTuple):
    """A call of a schedule. That of a node in a map stands for all items of its row."""

    label: str
    rounds: tuple[int, ...]
    row: int
    engine: int


@dataclass(frozen=True)
class Plan:
    """The plan of some rows of a workflow."""

    digest: str
    """Of the graph, before the optimiser."""
    analysed: AnalysedGraph
    engines: Sequence[PlanEngine]
    objectives: Mapping[str, CallObjective]
    arrangement: Arrangement
    passes: Sequence[Mapping[str, Any]]

    def calls(self) -> list[ScheduledCall]:
        """The calls with the names of their nodes, in the order of the schedule."""
        operators = self.analysed.unrolled.operators
        return [
            ScheduledCall(operators[number].node, operators[number].rounds, row, part.group.engine)
            for part in self.arrangement.parts
            for number, row in part.group.calls()
        ]

    def ranks(self) -> CallRanks:
        """The places of the calls in the schedule."""
        return CallRanks(self)

    @functools.cached_property
    def prediction(self) -> Prediction:
        """What a run is expected to take; made when it is first asked for."""
        _, unrolled, tree, prompts = self.analysed
        return Prediction(unrolled, tree, prompts, self.engines, self.arrangement)

    @property
    def predicted(self) -> Predicted:
        """Expected calls, tokens and time of the whole run, all rows and operators together."""
        return self.prediction.whole()

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values: equal plans are equal JSON, with the keys in the same order."""
        unrolled = self.analysed.unrolled
        operators = unrolled.operators
        return {
            "digest": self.digest,
            "passes": [dict(one) for one in self.passes],
            "tree": self.analysed.tree.to_dict(unrolled),
            "objectives": {
                node: {"objective": each.name, "group": each.group} for node, each in sorted(self.objectives.items())
            },
            "schedule": [
                {
                    "engine": part.group.engine,
                    "group": [operators[number].node for number in part.group.operators],
                    "order": part.group.order,
                    "rows": list(part.group.rows),
                    "start": part.start,
                }
                for part in self.arrangement.parts
            ],
            "pins": [],
            "predicted": self.predicted._asdict(),
            "by_node": {node: each._asdict() for node, each in sorted(self.prediction.by_node().items())},
        }


class CallRanks:
    """Where each call stands in a schedule."""

    def __init__(self, made: Plan):
        operators = made.analysed.unrolled.operators
        num_rows = made.analysed.prompts.num_rows
        self._ranks: list[I64] = [np.zeros(num_rows, np.int64) for _ in operators]
        """[operators][rows]"""
        self._by_label: dict[str, dict[tuple[int, ...], int]] = {}
        for number, operator in enumerate(operators):
            self._by_label.setdefault(operator.node, {})[operator.rounds] = number
        self._planned_rounds = {
            label: tuple(max(each) for each in zip(*numbers, strict=True)) for label, numbers in self._by_label.items()
        }
        at = 0
        for part in made.arrangement.parts:
            group = part.group
            rows = np.arange(group.rows[1] - group.rows[0])
            for place_in_group, member in enumerate(group.operators):
                if group.order == "rows":
                    ranks = at + rows * len(group.operators) + place_in_group
                else:
                    ranks = at + place_in_group * len(rows) + rows
                self._ranks[member][slice(*group.rows)] = ranks
            at += len(rows) * len(group.operators)

    def rank(self, label: str, rounds: tuple[int, ...], row: int) -> int:
        """The place of a call. Rounds of a loop beyond those that were expected have that of the last one."""
        most = self._planned_rounds[label]
        number = self._by_label[label][tuple(map(min, rounds, most))]
        return int(self._ranks[number][row])


def make_plan(analysed: AnalysedGraph, engines: Sequence[PlanEngine], options: PlanOptions | None = None) -> Plan:
    """The plan of an analysed graph. Raises `NoEngine`, and `ValueError` for an objective of an unknown output."""
    options = options or PlanOptions()
    graph, unrolled, tree, prompts = analysed
    operators, num_rows = unrolled.operators, prompts.num_rows
    engines_by_model(operators, engines)
    kv_tokens = [engine.kv_tokens for engine in engines]
    costing = Costing(operators, prompts, kv_tokens, ticks_of(kv_tokens))
    whole = [OperatorGroup((number,), (0, num_rows)) for number in range(len(operators))]
    work = [costing.group(group)[0] if num_rows else 0 for group in whole]
    arrangement = arrange(operators, tree, costing, place(operators, work, tree, engines, num_rows))
    return Plan(
        digest=options.digest or digest(graph),
        analysed=analysed,
        engines=tuple(engines),
        objectives=node_objectives(unrolled, options.objective),
        arrangement=arrangement,
        passes=options.passes,
    )
