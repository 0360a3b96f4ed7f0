"""What a run asks for, and the bounds and counts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from weft.workflow.actuals import CallCounts, CallTrace
from weft.workflow.graph.nodes import ExternalNode, FunctionNode, ProgramNode
from weft.workflow.run.calls import ModelRequest
from weft.workflow.run.frames import RowFailure
from weft.workflow.run.order import CallSite


class TaskName(NamedTuple):
    """One evaluation of one node. It is the same in every run of a graph over the same rows."""

    row: int
    path: str
    """Such as `notes[3].summary`: the node with the items, rounds and cases that it is in."""

    def __str__(self) -> str:
        return f"{self.row}/{self.path}"


class CallModel(NamedTuple):
    """Send a request; then report `answered` or `failed`."""

    task: TaskName
    request: ModelRequest
    may_be_cached: bool
    site: CallSite
    goes_on: bool = False
    """With a conversation in which the model has answered."""


class FindCost(NamedTuple):
    """Find what a call would cost, before it may be sent: report `answered` where an earlier answer will do, which
    costs nothing; otherwise `counted`, and nothing else."""

    call: CallModel
    counts_tokens: bool
    """Whether `counted` is to have the most tokens that the call may use."""

    @property
    def task(self) -> TaskName:
        """That of the call."""
        return self.call.task


class CallFunction(NamedTuple):
    """Call a function; then report `returned` or `failed`."""

    task: TaskName
    node: FunctionNode
    args: Mapping[str, Any]


class RunProgram(NamedTuple):
    """Run a program; then report `returned` or `failed`."""

    task: TaskName
    node: ProgramNode
    args: Any


class AwaitExternal(NamedTuple):
    """Wait for a value from outside; then report `returned` or `failed`."""

    task: TaskName
    node: ExternalNode


class RowDone(NamedTuple):
    """A row has ended. There is nothing to report."""

    row: int
    outputs: Mapping[str, Any]
    """Without those that failed."""
    failure: RowFailure | None
    calls: tuple[CallTrace, ...] = ()
    """Those that were answered, in that order, while the run keeps them."""
    by_node: Mapping[str, CallCounts] = {}
    """What calls of the row did, by the label of their node."""


class Settled(NamedTuple):
    """A node of a graph that grows has its value, or will never have one. There is nothing to report."""

    node: str


class FeedChanged(NamedTuple):
    """A reader of the run's feed has something to read. There is nothing to report."""


Notice = RowDone | Settled | FeedChanged
"""What asks for nothing."""
Instruction = CallModel | FindCost | CallFunction | RunProgram | AwaitExternal | Notice


class RunLimits(NamedTuple):
    """Bounds of a run; None: none. What would go past one fails with `LimitExceeded`, which names it."""

    calls: int | None = None
    """Of models, each try counted. An answer of the prompt cache is none."""
    tokens: int | None = None
    """Of prompts and outputs together. A call without `max_tokens` counts as one that fills the model's context; where
    that is not known, it takes all that is left, so that no other one runs beside it."""
    seconds: float | None = None
    """That the run is in progress, before and after interruptions. When they have passed, what is in progress is
    cancelled, and each row that has not ended fails."""
