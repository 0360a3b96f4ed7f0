"""A plan: the order in which a workflow's calls run, and what is known of the run before it begins.

Plans are functions of their arguments: equal in every process and for every order of the nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.config import PINNED_PART
from weft.workflow.analysis.analyse import AnalysedGraph
from weft.workflow.analysis.objectives import CallObjective, WantedOutputs, node_objectives
from weft.workflow.graph import digest
from weft.workflow.planner.arrange import Arrangement, arrange
from weft.workflow.planner.cost import ticks_of
from weft.workflow.planner.groups import Costing, OperatorGroup
from weft.workflow.planner.pins import PrefixPin, prefix_pins
from weft.workflow.planner.place import PlanEngine, engines_by_model, place
from weft.workflow.planner.predict import Predicted, Prediction
from weft.workflow.planner.ranks import CallRanks, DecidedPlan


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan takes beside the workflow and its engines."""

    wanted: WantedOutputs = WantedOutputs()
    passes: Sequence[Mapping[str, Any]] = ()
    """What the optimiser did to the graph; the plan repeats it."""
    digest: str | None = None
    """Of the graph before that; None: of the one that is planned."""
    pinned_part: float = PINNED_PART
    """Part of each engine's pages that pins may hold; 0: nothing is pinned."""
    is_continued: bool = False
    """Whether calls of an earlier plan of the same graph run before these."""


@dataclass(frozen=True)
class Plan:
    """The plan of some rows of a workflow."""

    analysed: AnalysedGraph
    engines: Sequence[PlanEngine]
    objectives: Mapping[str, CallObjective]
    arrangement: Arrangement
    passes: Sequence[Mapping[str, Any]]
    pins: Sequence[PrefixPin] = ()
    source_digest: str | None = None
    """The digest of the graph before the optimiser; None: of the one that is planned."""

    @functools.cached_property
    def digest(self) -> str:
        """Of the graph, before the optimiser."""
        return self.source_digest or digest(self.analysed.graph)

    def ranks(self) -> CallRanks:
        """What a run follows: the places of the calls in the schedule, their engines, and the pins."""
        made = DecidedPlan(self.analysed, self.engines, self.arrangement, self.pins)
        return CallRanks(made, self.objectives)

    @functools.cached_property
    def prediction(self) -> Prediction:
        """What a run is expected to take; made when it is first asked for."""
        _, unrolled, tree, prompts = self.analysed
        return Prediction(unrolled, tree, prompts, self.engines, self.arrangement, self.pins)

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
                node: {"objective": each.name, "group": each.group}
                | ({} if each.seconds is None else {"deadline_s": each.seconds})
                for node, each in sorted(self.objectives.items())
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
            "pins": [
                {
                    "engine": pin.engine,
                    "tokens": len(pin.tokens),
                    "users": list(dict.fromkeys(operators[number].node for number in pin.users)),
                    "from": pin.start,
                    "until": pin.end,
                }
                for pin in self.pins
            ],
            "predicted": self.predicted._asdict(),
            "by_node": {node: each._asdict() for node, each in sorted(self.prediction.by_node().items())},
        }


def make_plan(analysed: AnalysedGraph, engines: Sequence[PlanEngine], options: PlanOptions | None = None) -> Plan:
    """The plan of an analysed graph. Raises `NoEngine`, and `ValueError` for an objective of an unknown output."""
    options = options or PlanOptions()
    _, unrolled, tree, prompts = analysed
    operators, num_rows = unrolled.operators, prompts.num_rows
    engines_by_model(operators, engines)
    kv_tokens = [engine.kv_tokens for engine in engines]
    costing = Costing(operators, prompts, kv_tokens, ticks_of(kv_tokens))
    whole = [OperatorGroup((number,), (0, num_rows)) for number in range(len(operators))]
    work = [costing.group(group)[0] if num_rows else 0 for group in whole]
    arrangement = arrange(operators, tree, costing, place(operators, work, tree, engines, num_rows))
    return Plan(
        analysed=analysed,
        engines=tuple(engines),
        objectives=node_objectives(unrolled, options.wanted),
        arrangement=arrangement,
        passes=options.passes,
        pins=prefix_pins(analysed, arrangement, engines, options.pinned_part, is_continued=options.is_continued),
        source_digest=options.digest,
    )
