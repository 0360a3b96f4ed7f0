"""What a run follows of its plan: the place of each call, its engine, what goes on from it, and the pins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.ids import pack_tokens
from weft.core.waits import WaitKind
from weft.workflow.analysis.analyse import AnalysedGraph
from weft.workflow.analysis.bounds import answer_nodes
from weft.workflow.analysis.objectives import CallObjective
from weft.workflow.analysis.row_prompts import I64
from weft.workflow.planner.arrange import Arrangement
from weft.workflow.planner.pins import PrefixPin
from weft.workflow.planner.place import PlanEngine
from weft.workflow.planner.predict import token_step_s

RowRanges = tuple[tuple[int, int], ...]
"""From, to (exclusive)."""


class DecidedPlan(NamedTuple):
    """What a planner decided, and what of."""

    analysed: AnalysedGraph
    engines: Sequence[PlanEngine]
    arrangement: Arrangement
    pins: Sequence[PrefixPin]


class PlannedPin(NamedTuple):
    """A prefix that an engine keeps, and the calls that it keeps it for."""

    tokens: bytes
    """Packed int32, whole pages."""
    model: str
    replica: int
    """Number of the engine among those of the model."""
    salt: str | None
    """The `cache_salt` of the calls."""
    rows: Mapping[str, RowRanges]
    """By label: the rows, by their numbers within the plan, whose calls begin with the prefix on this engine."""


class NextTurn(NamedTuple):
    """Whether other calls of the row go on with a call's prompt and answer, and when the first of them does."""

    comes: bool
    in_s: float | None = None
    """Expected seconds from the end of the call; None: engines have no cost profile."""

    @property
    def wait_kind(self) -> str:
        """What the call's sequence waits for when it has ended, as engines are told; empty: nothing."""
        return WaitKind.WORKFLOW if self.comes else ""


class CallRanks:
    """Where each call stands in a schedule: ranks count up on each engine, so calls of several engines interleave."""

    def __init__(self, made: DecidedPlan, objectives: Mapping[str, CallObjective]):
        operators = made.analysed.unrolled.operators
        num_rows = made.analysed.prompts.num_rows
        self.objectives: Mapping[str, CallObjective] = objectives
        """By label."""
        self.pins = _planned_pins(made)
        self._ranks: list[I64] = [np.zeros(num_rows, np.int64) for _ in operators]
        """[operators][rows]"""
        self._engines: list[I64] = [np.zeros(num_rows, np.int64) for _ in operators]
        """[operators][rows] number among the engines of the model."""
        self._by_label: dict[str, dict[tuple[int, ...], int]] = {}
        for number, operator in enumerate(operators):
            self._by_label.setdefault(operator.node, {})[operator.rounds] = number
        self._planned_rounds = {
            label: tuple(max(each) for each in zip(*numbers, strict=True)) for label, numbers in self._by_label.items()
        }
        starts: list[npt.NDArray[np.float64]] = [np.zeros(num_rows) for _ in operators]
        at = [0] * len(made.engines)
        ends = _ends(made)
        for part, end in zip(made.arrangement.parts, ends, strict=True):
            group = part.group
            rows = np.arange(group.rows[1] - group.rows[0])
            size = len(rows) * len(group.operators)
            for place_in_group, member in enumerate(group.operators):
                if group.order == "rows":
                    places = rows * len(group.operators) + place_in_group
                else:
                    places = place_in_group * len(rows) + rows
                own = slice(*group.rows)
                self._ranks[member][own] = at[group.engine] + places
                self._engines[member][own] = made.engines[group.engine].replica
                starts[member][own] = part.start + (end - part.start) * places / size
            at[group.engine] += size
        self._turns = _next_turns(made, starts)

    def rank(self, label: str, rounds: tuple[int, ...], row: int) -> int:
        """The place of a call. Rounds of a loop beyond those that were expected have that of the last one."""
        return int(self._ranks[self._operator(label, rounds)][row])

    def engine(self, label: str, rounds: tuple[int, ...], row: int) -> int:
        """The engine of a call, among those of its model."""
        return int(self._engines[self._operator(label, rounds)][row])

    def next_turn(self, label: str, rounds: tuple[int, ...], row: int) -> NextTurn:
        """What comes after a call in its conversation. Of a loop, what comes after any of its rounds."""
        number = self._operator(label, rounds)
        if number not in self._turns:
            return NextTurn(any(other in self._turns for other in self._by_label[label].values()))
        in_s = self._turns[number]
        return NextTurn(True, None if in_s is None else float(in_s[row]))

    def _operator(self, label: str, rounds: tuple[int, ...]) -> int:
        return self._by_label[label][tuple(map(min, rounds, self._planned_rounds[label]))]


def _ends(made: DecidedPlan) -> list[float]:
    """[parts] token steps until the next part begins on the engine, or the schedule is over."""
    ends: list[float] = []
    following = [made.arrangement.token_steps] * len(made.engines)
    for part in reversed(made.arrangement.parts):
        ends.append(following[part.group.engine])
        following[part.group.engine] = part.start
    return ends[::-1]


def _next_turns(made: DecidedPlan, starts: list[npt.NDArray[np.float64]]) -> dict[int, npt.NDArray[np.float64] | None]:
    """By operator whose conversation goes on: [rows] expected seconds until it does."""
    unrolled, tree = made.analysed.unrolled, made.analysed.tree
    found: dict[int, npt.NDArray[np.float64] | None] = {}
    for number, node in enumerate(answer_nodes(unrolled, tree)):
        later = [other for other, path in enumerate(tree.paths) if node in path] if node is not None else []
        if not later:
            continue
        operator = unrolled.operators[number]
        engines = [engine for engine in made.engines if engine.model == operator.model]
        step_s = token_step_s(made.analysed, engines)
        if step_s is None:
            found[number] = None
        else:
            # A token step is a step of the device: the call itself takes one for each token of its answer.
            first = np.min([starts[other] for other in later], axis=0)
            found[number] = np.maximum(first - starts[number] - operator.output_tokens, 0.0) * step_s
    return found


def _planned_pins(made: DecidedPlan) -> tuple[PlannedPin, ...]:
    operators = made.analysed.unrolled.operators
    pins = []
    for pin in made.pins:
        engine = made.engines[pin.engine]
        rows: dict[str, dict[tuple[int, int], None]] = {}
        for part in made.arrangement.parts:
            if part.group.engine == pin.engine:
                for number in set(part.group.operators).intersection(pin.users):
                    rows.setdefault(operators[number].node, {})[part.group.rows] = None
        by_label = {label: tuple(ranges) for label, ranges in sorted(rows.items())}
        pins.append(PlannedPin(pack_tokens(pin.tokens), engine.model, engine.replica, pin.salt, by_label))
    return tuple(pins)
