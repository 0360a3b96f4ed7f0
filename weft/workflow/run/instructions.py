"""What a run asks for, and the bounds and counts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from weft.workflow.graph.nodes import ExternalNode, FunctionNode, ProgramNode
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.frames import RowFailure


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


class Settled(NamedTuple):
    """A node of a graph that grows has its value, or will never have one. There is nothing to report."""

    node: str


Notice = RowDone | Settled
"""What asks for nothing."""
Instruction = CallModel | CallFunction | RunProgram | AwaitExternal | Notice


class CallCounts(NamedTuple):
    """What calls of models have done so far: of a run, or of one of its nodes."""

    calls: int = 0
    """Requests that were answered."""
    merged_calls: int = 0
    """Calls that had the answer of an equal one that was in flight."""
    cached_calls: int = 0
    """Calls that had the answer of an equal earlier one, from the prompt cache."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts, those whose KV was there."""
    output_tokens: int = 0

    def plus(self, answer: ModelAnswer) -> CallCounts:
        """With one more answer."""
        used = answer.usage
        return CallCounts(
            self.calls + (not answer.is_cached),
            self.merged_calls,
            self.cached_calls + answer.is_cached,
            self.prompt_tokens + used.prompt_tokens,
            self.cached_tokens + used.cached_tokens,
            self.output_tokens + used.output_tokens,
        )


class RunCounts(NamedTuple):
    """What a run has done so far."""

    rows: int = 0
    failed_rows: int = 0
    calls: CallCounts = CallCounts()
    by_node: Mapping[str, CallCounts] = {}
    """By the label of a node, such as `notes.summary`."""


class RunLimits(NamedTuple):
    """Bounds of a run; None: none. What goes past one fails with `LimitExceeded`, which names it."""

    calls: int | None = None
    tokens: int | None = None
    """Of prompts and outputs together."""
