"""What a run gives: a result for each row, and the whole of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec

from weft.abi.errors import LimitExceeded, Unsupported
from weft.core.wording import plural
from weft.workflow.actuals import RunCounts
from weft.workflow.run.instructions import RowDone
from weft.workflow.run.value_errors import kind_of, message_of

if TYPE_CHECKING:
    from weft.workflow.explain.report import Explanation


class RowMistake(NamedTuple):
    """Why a row has not all outputs."""

    row: int
    """From 0, in the order of the rows."""
    node: str
    """Where it began, such as `notes[3].summary`."""
    message: str
    kind: str
    """The kind of a `WeftError`, the name of another exception's class."""


class RowResult(NamedTuple):
    """What one row gave: its outputs, and the error that ended it."""

    row: int
    outputs: Mapping[str, Any]
    """Without those that failed."""
    error: RowMistake | None = None

    def __getitem__(self, name: Any) -> Any:
        """An output by its name. Raises `KeyError` with the row's error for one that failed, and with the names that
        there are for another."""
        if not isinstance(name, str):
            return tuple.__getitem__(self, name)
        if name in self.outputs:
            return self.outputs[name]
        if self.error is not None:
            raise KeyError(f"{name}: row {self.row} failed at {self.error.node}: {self.error.message}")
        raise KeyError(_no_output(name, self.outputs))

    def to_dict(self) -> dict[str, Any]:
        """As JSON: `{"row", "outputs", "error"}`, the last one only where there is one."""
        error = {} if self.error is None else {"error": {**self.error._asdict()}}
        return {"row": self.row, "outputs": dict(self.outputs), **error}


def _no_output(name: str, names: Collection[str]) -> str:
    return f"there is no output {name!r}; there are {', '.join(names)}"


def result_of(done: RowDone) -> RowResult:
    """The result of a row that ended."""
    if done.failure is None:
        return RowResult(done.row, done.outputs)
    error = done.failure.error
    kind = kind_of(error)
    return RowResult(done.row, done.outputs, RowMistake(done.row, done.failure.node, message_of(error) or kind, kind))


class HeldResults:
    """The results that a run keeps for its end, in so many bytes as JSON."""

    def __init__(self, max_bytes: int):
        self.rows: list[RowResult] = []
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def add(self, result: RowResult) -> bytes:
        """Keep a result. Returns it as JSON. Raises `LimitExceeded` where there is no room; then it is not kept."""
        encoded = msgspec.json.encode(result.to_dict())
        if self._num_bytes + len(encoded) > self._max_bytes:
            raise LimitExceeded(
                f"the results of the run have more than {self._max_bytes:,} bytes (max_run_bytes): raise it, or take "
                "rows one by one with stream()",
                "max_run_bytes",
            )
        self._num_bytes += len(encoded)
        self.rows.append(result)
        return encoded


class RunResults(Sequence[RowResult]):
    """The results of all rows, in their order."""

    def __init__(
        self,
        rows: Sequence[RowResult],
        counts: RunCounts,
        statistics: Mapping[str, Mapping[str, Any]] | None = None,
        explain: Callable[[], Explanation] | None = None,
        *,
        outputs: Collection[str],
    ):
        """`outputs` are the names of those of the graph."""
        self._rows = sorted(rows, key=lambda row: row.row)
        self.counts = counts
        """What the run did."""
        self.statistics = statistics or {}
        """What it measured of its nodes, for the plans of later runs: `flow.run(rows, on, statistics=...)`."""
        self._explain = explain
        self._outputs = outputs

    def explain(self) -> Explanation:
        """What the run was expected to do beside what it did: `print` it, or `.to_dict()`, `.mermaid()`, `.svg()`.
        Raises `Unsupported` where that is not known here."""
        if self._explain is None:
            raise Unsupported("what the run did is not known here")
        return self._explain()

    @property
    def errors(self) -> list[RowMistake]:
        """The error of each row that failed."""
        return [row.error for row in self._rows if row.error is not None]

    @overload
    def __getitem__(self, index: int) -> RowResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RowResult]: ...
    def __getitem__(self, index: int | slice) -> RowResult | Sequence[RowResult]:
        """Results by the number of their row."""
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RowResult]:
        return iter(self._rows)

    def column(self, name: str) -> list[Any]:
        """An output of all rows; None where it failed. Raises `KeyError` for one that the graph does not have."""
        if name not in self._outputs:
            raise KeyError(_no_output(name, self._outputs))
        return [row.outputs.get(name) for row in self._rows]

    def __repr__(self) -> str:
        return f"<results of {plural(len(self), 'row')}, {len(self.errors)} failed>"
