"""What a run finds out about its nodes: figures for plans, by label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.workflow.actuals import CallCounts


class RunMeasures:
    """How long lists were, how often loops went round, and which cases switches took."""

    def __init__(self) -> None:
        self._items: dict[str, list[int]] = {}
        """Evaluations of a map, and items of all."""
        self._rounds: dict[str, list[int]] = {}
        self._cases: dict[str, dict[str, int]] = {}

    def map_began(self, label: str, items: int) -> None:
        """A map goes through a list."""
        _add(self._items, label, items)

    def loop_ended(self, label: str, rounds: int) -> None:
        """A loop ended after so many rounds."""
        _add(self._rounds, label, rounds)

    def case_taken(self, label: str, place: str) -> None:
        """A switch took a body."""
        cases = self._cases.setdefault(label, {})
        cases[place] = cases.get(place, 0) + 1

    def statistics(self, calls: Mapping[str, CallCounts]) -> dict[str, dict[str, Any]]:
        """Means of what was seen, as `weft.workflow.plan` takes them; `calls` are the run's by label."""
        found: dict[str, dict[str, Any]] = {}
        for label, counts in calls.items():
            if counts.calls:
                found.setdefault(label, {})["output_tokens"] = counts.output_tokens / counts.calls
        for name, seen in (("items", self._items), ("rounds", self._rounds)):
            for label, (count, total) in seen.items():
                found.setdefault(label, {})[name] = total / count
        for label, cases in self._cases.items():
            total = sum(cases.values())
            found.setdefault(label, {})["shares"] = {place: count / total for place, count in sorted(cases.items())}
        return found


def _add(seen: dict[str, list[int]], label: str, value: int) -> None:
    found = seen.setdefault(label, [0, 0])
    found[0] += 1
    found[1] += value
