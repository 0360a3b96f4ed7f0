"""What the calls of a run have done: all of them, and those of each row.

A run that was interrupted goes on from the counts of rows that have ended. Answers of other rows come again, from the
journal or from the model, and are counted then; limits count them at once (`weft.workflow.run.allowance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from weft.workflow.actuals import MAX_TRACED_CALLS, CallCounts, CallTrace, RunCounts

_NONE = CallCounts()


class EndedCalls(NamedTuple):
    """The calls of a row that has ended."""

    traces: tuple[CallTrace, ...]
    """Those that are kept."""
    by_node: Mapping[str, CallCounts]


class CallLedger:
    """The counts of a run, by node and by row in progress."""

    def __init__(self, before: RunCounts):
        """`before`: those of the rows that had ended when the run was interrupted."""
        self._rows, self._failed_rows = before.rows, before.failed_rows
        self._calls, self._by_node = before.calls, dict(before.by_node)
        self._open: dict[int, dict[str, CallCounts]] = {}
        """Of rows in progress, by label. A call may end after its row, and then counts for the run alone."""
        self._traces: dict[int, list[CallTrace]] = {}
        self._num_traced = before.calls.calls
        """Calls of rows that have ended, as far as they are kept."""

    @property
    def counts(self) -> RunCounts:
        """Of all calls so far."""
        return RunCounts(self._rows, self._failed_rows, self._calls, dict(self._by_node))

    def begin(self, row: int) -> None:
        """A row begins."""
        self._open[row] = {}

    def note(self, row: int, label: str, change: Callable[[CallCounts], CallCounts]) -> None:
        """Count something that a call of a row did."""
        self._calls = change(self._calls)
        self._by_node[label] = change(self._by_node.get(label, _NONE))
        of_row = self._open.get(row)
        if of_row is not None:
            of_row[label] = change(of_row.get(label, _NONE))

    def trace(self, row: int, call: CallTrace) -> None:
        """Keep a call of a row, unless enough are kept."""
        if row in self._open and self._num_traced < MAX_TRACED_CALLS:
            self._traces.setdefault(row, []).append(call)

    def end(self, row: int, *, failed: bool) -> EndedCalls:
        """Count a row that has ended. Returns what its calls did."""
        self._rows += 1
        self._failed_rows += failed
        by_node = self._open.pop(row, {})
        calls = self._traces.pop(row, [])[: max(MAX_TRACED_CALLS - self._num_traced, 0)]
        self._num_traced += len(calls)
        return EndedCalls(tuple(calls), by_node)


def merged(counts: CallCounts) -> CallCounts:
    """With one more call that had the answer of an equal one."""
    return counts._replace(merged_calls=counts.merged_calls + 1)


def added(one: Mapping[str, CallCounts], other: Mapping[str, CallCounts]) -> dict[str, CallCounts]:
    """The sums of two counts by node."""
    return {**one, **{label: total((one.get(label, _NONE), counts)) for label, counts in other.items()}}


def total(counts: Iterable[CallCounts]) -> CallCounts:
    """The sum of all."""
    return CallCounts(*map(sum, zip(_NONE, *counts, strict=True)))
