"""The order of a run that has plans, what is told of its calls, and when another plan is due. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple, Protocol

from weft.workflow.analysis.objectives import CallObjective, WantedOutputs
from weft.workflow.planner.ranks import NextTurn
from weft.workflow.run.calls import CallAdvice
from weft.workflow.run.objectives import objective_fields
from weft.workflow.run.order import CallHints, CallSite, Order
from weft.workflow.run.settings import PlanSettings

_NO_PLAN = 1 << 62
"""Behind all plans."""
UNPLANNED_PART = 0.25
"""Of the rows in progress: with so many that no plan has, another plan is made."""


class Ranks(Protocol):
    """The places of the calls of some rows in their plan."""

    def rank(self, label: str, rounds: tuple[int, ...], row: int) -> int:
        """Of a call; `row` is the number of its row within the plan."""
        ...

    def engine(self, label: str, rounds: tuple[int, ...], row: int) -> int:
        """The engine of a call, among those of its model."""
        ...

    def next_turn(self, label: str, rounds: tuple[int, ...], row: int) -> NextTurn:
        """What comes after a call in its conversation."""
        ...

    @property
    def objectives(self) -> Mapping[str, CallObjective]:
        """By label."""
        ...


class _PlannedRow(NamedTuple):
    number: int
    """Of the plan."""
    ranks: Ranks
    place: int
    """Of the row within the plan."""


class PlannedOrder:
    """Calls in the order of the plan that has their row: those of earlier plans first, because their rows hold values
    and KV. Rows that no plan has come last, in an order of their own."""

    def __init__(
        self,
        otherwise: Order,
        settings: PlanSettings | None = None,
        wanted: WantedOutputs | None = None,
        elapsed_s: Callable[[], float] = lambda: 0.0,
    ):
        """`settings` say what of plans is followed; all of it, where there are none. `wanted` is what the outputs are
        wanted for. `elapsed_s` gives the seconds since the run began, from which deadlines count."""
        self._otherwise = otherwise
        self._settings = settings or PlanSettings()
        wanted = wanted or WantedOutputs()
        all_for = wanted.objective if isinstance(wanted.objective, str) else "throughput"
        self._unplanned = CallObjective(all_for, None, wanted.deadline_s if all_for == "deadline" else None)
        """Of calls that no plan has."""
        self._elapsed_s = elapsed_s
        self._rows: dict[int, _PlannedRow] = {}
        self._count = 0

    def __call__(self, site: CallSite) -> tuple[Any, ...]:
        """As `Order`."""
        found = self._rows.get(site.row)
        if found is None or not self._settings.order:
            return _NO_PLAN, *self._otherwise(site)
        return found.number, found.ranks.rank(site.label, site.rounds, found.place)

    def hints(self, site: CallSite) -> CallHints:
        """As `Hints`: the objective that the plan gives the call, its engine, and what goes on from it."""
        found = self._rows.get(site.row)
        objective = None if found is None else found.ranks.objectives.get(site.label)
        fields = objective_fields(objective or self._unplanned, self._elapsed_s())
        if found is None:
            return CallHints(fields)
        ranks, at = found.ranks, (site.label, site.rounds, found.place)
        replica = ranks.engine(*at) if self._settings.engines else None
        return CallHints(fields, CallAdvice(replica, ranks.next_turn(*at) if self._settings.turns else None))

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def put(self, rows: Mapping[int, int], ranks: Ranks, in_progress: Set[int]) -> None:
        """A new plan has these rows; `rows` gives the number of each within it. Those of an earlier one move to it, and
        rows that are not in progress are forgotten."""
        self._rows = {row: planned for row, planned in self._rows.items() if row in in_progress}
        for row, index in rows.items():
            self._rows[row] = _PlannedRow(self._count, ranks, index)
        self._count += 1


def is_plan_due(num_unplanned: int, num_rows: int, *, is_open: bool) -> bool:
    """Whether rows that came late are enough for another plan: many of those in progress, or the last ones."""
    return num_unplanned > 0 and (not is_open or num_unplanned >= UNPLANNED_PART * num_rows)
