"""Bounds of what the evaluation of graphs may cost a server: nodes evaluated, bytes of values, length of a turn.

Graphs come from strangers: a few nodes that loop, map or double a text would take any time and fill any memory. Owns
the counts of rows in progress. It does not know nodes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

import msgspec

from weft.abi.errors import LimitExceeded
from weft.workflow.graph.templates import parse_template
from weft.workflow.graph.values import AnswerValue

TURN_COST = 300
"""Cost of the nodes that are evaluated before other tasks of the event loop run; the last one is finished."""
BYTES_PER_COST = 4096
"""Bytes of a value that cost as much as a node without any."""
FRAME_BYTES = 2048
"""Of a body that is evaluated, without its values; rounded up."""
ITEM_BYTES = 64
"""Of an item of a list; rounded up."""
MAX_EVALUATIONS = 1_000_000


class EvaluationBudget:
    """The bounds of rows in progress that share them, such as those of a tenant."""

    def __init__(self, max_bytes: int, setting: str, max_evaluations: int | None = MAX_EVALUATIONS):
        """`setting` names `max_bytes` in errors. A row has at most `max_evaluations`, None: any number."""
        self.max_bytes = max_bytes
        self.max_evaluations = max_evaluations
        self.held_bytes = 0
        self._setting = setting

    @property
    def has_room(self) -> bool:
        """Whether a further row may begin: rows in progress may grow to twice of what they have."""
        return self.held_bytes * 2 <= self.max_bytes

    def hold(self, size: int) -> None:
        """Count bytes. Raises `LimitExceeded` where there are too many; then they are not counted."""
        if self.held_bytes + size > self.max_bytes:
            raise LimitExceeded(
                f"values of rows in progress have more than {self.max_bytes:,} bytes ({self._setting})", "values"
            )
        self.held_bytes += size


class RowCosts:
    """What the rows of one run have cost so far. Without a budget nothing is bounded but the length of turns."""

    def __init__(self, budget: EvaluationBudget | None):
        self._budget = budget
        self._evaluations: dict[int, int] = {}
        """Of rows in progress; what is evaluated for a row after its end counts for nothing."""
        self._held: Counter[int] = Counter()
        self._left = TURN_COST

    # ---- turns

    @property
    def is_turn_over(self) -> bool:
        """Whether other tasks of the event loop are to run before anything else is evaluated."""
        return self._left <= 0

    def begin_turn(self) -> None:
        """Start a new turn of the loop."""
        self._left = TURN_COST

    # ---- bounds

    @property
    def has_room(self) -> bool:
        """Whether the budget has room for a further row."""
        return self._budget is None or self._budget.has_room

    def spend(self, cost: int) -> None:
        """Count time of this turn."""
        self._left -= cost

    def begin(self, row: int) -> None:
        """A row begins."""
        self._evaluations[row] = 0

    def evaluate(self, row: int) -> None:
        """Count the evaluation of a node. Raises `LimitExceeded`."""
        self._left -= 1
        if self._budget is not None and row in self._evaluations:
            self._evaluations[row] += 1
            most = self._budget.max_evaluations
            if most is not None and self._evaluations[row] > most:
                raise LimitExceeded(f"a row may evaluate {most:,} nodes, rounds and items counted", "evaluations")

    def read(self, value: Any) -> None:
        """Count the time for reading a value."""
        self._left -= _num_chars(value) // BYTES_PER_COST

    def hold(self, row: int, size: int) -> None:
        """Count bytes of a row. Raises `LimitExceeded`; then they are not counted."""
        if self._budget is not None and row in self._evaluations:
            self._budget.hold(size)
            self._held[row] += size

    def give_back(self, row: int, size: int) -> None:
        """Bytes of a row are free again."""
        if self._budget is not None and row in self._evaluations:
            self._budget.held_bytes -= size
            self._held[row] -= size

    def end(self, row: int) -> None:
        """A row has ended and its outputs were handed on: none of its values is needed."""
        self.give_back(row, self._held[row])
        del self._held[row], self._evaluations[row]

    def close(self) -> None:
        """No row is in progress any longer. Idempotent."""
        for row in list(self._evaluations):
            self.end(row)


def made_bytes(value: Any) -> int:
    """Bytes of a value that a node has made of others; items of a list are those of others."""
    if isinstance(value, AnswerValue):
        value = value.value
    if isinstance(value, str):
        return sys.getsizeof(value)
    return ITEM_BYTES * len(value) if isinstance(value, (list, tuple)) else 0


def copied_bytes(templates: Any, filled: Any) -> int:
    """Bytes of arguments that are new: texts that templates make of others, and the items of lists and objects, which
    are copied. A text that stands there as it is has no copy."""
    if isinstance(filled, (list, dict)):
        inner = filled.values() if isinstance(filled, dict) else filled
        made_of: Iterable[Any] = repeat(None, len(filled))
        if isinstance(templates, (Mapping, list, tuple)):
            made_of = templates.values() if isinstance(templates, Mapping) else templates
        return ITEM_BYTES * len(filled) + sum(map(copied_bytes, made_of, inner))
    if not isinstance(templates, str) or not isinstance(filled, str):
        return 0
    return made_bytes(filled) if len(parse_template(templates).parts) > 1 else 0


def given_bytes(value: Any) -> int:
    """Bytes of a value from outside: a text, or a list or an object as JSON, which is new in all its parts."""
    if isinstance(value, AnswerValue):
        value = value.value
    return len(msgspec.json.encode(value)) if isinstance(value, (list, tuple, Mapping)) else made_bytes(value)


def is_flat(values: Mapping[str, Any]) -> bool:
    """Whether no value has others inside."""
    return not any(isinstance(value, (list, tuple, Mapping)) for value in values.values())


def _num_chars(value: Any) -> int:
    if isinstance(value, AnswerValue):
        value = value.value
    return len(value) if isinstance(value, (str, list, tuple, Mapping)) else 0
