"""Plays a run against fakes, in a random order of events, without an event loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.workflow.naive import fake_text
from weft.workflow.actuals import CallUsage
from weft.workflow.graph import WorkflowGraph
from weft.workflow.graph.values import split_ranges
from weft.workflow.run.allowance import bound_of
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.instructions import (
    AwaitExternal,
    CallFunction,
    CallModel,
    FindCost,
    Instruction,
    RowDone,
    RunLimits,
    RunProgram,
    TaskName,
)
from weft.workflow.run.order import CallSite, Order
from weft.workflow.run.state import RunState


def fake_answer(request: ModelRequest) -> ModelAnswer:
    """The answer of a model that answers equal requests alike."""
    text = fake_text({**request.body, "schema": None})
    return ModelAnswer(text, "stop", (), CallUsage(len(str(request.body)), 0, len(text)))


class Player:
    """One run. `answer` may raise; `seed` draws which event comes next."""

    def __init__(
        self,
        graph: WorkflowGraph,
        rows: Sequence[Mapping[str, Any]],
        *,
        seed: int = 0,
        order: Order | None = None,
        limits: RunLimits | None = None,
        answer: Callable[[ModelRequest], ModelAnswer] = fake_answer,
        function: Callable[[CallFunction], Any] | None = None,
        max_calls: int = 4,
    ):
        self.state = RunState(graph, order, limits)
        self.rows = list(rows)
        self.random = random.Random(seed)
        self.answer = answer
        self.function = function or (lambda call: fake_text([call.node.name, None, call.args]))
        self.max_calls = max_calls
        self.now = 0.0
        self.open: list[Instruction] = []
        self.done: dict[int, RowDone] = {}
        self.sent: list[CallModel] = []
        self.sites: dict[TaskName, CallSite] = {}
        """Where the calls stand that were sent."""

    def play(self) -> list[RowDone]:
        """To the end. Returns the rows in order."""
        waiting = list(enumerate(self.rows))
        while waiting or self.state.num_rows or self.state.has_instructions:
            if waiting and (self.random.random() < 0.3 or not (self.open or self.state.has_next())):
                self.state.open_row(*waiting.pop(0))
            next_try_s = self.state.wake(self.now)
            self.state.work_all()
            calls = sum(isinstance(each, CallModel) for each in self.open)
            self._take(self.state.take(self.max_calls - calls))
            if self.open:
                self._step(self.open.pop(self.random.randrange(len(self.open))))
            elif next_try_s is not None and not self.state.has_next():
                self.now = next_try_s
        return [self.done[row] for row in sorted(self.done)]

    def _take(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, CallModel):
                self.sites[each.task] = self.state._tasks[each.task].site
            if isinstance(each, RowDone):
                assert each.row not in self.done
                self.done[each.row] = each
            else:
                self.open.append(each)
                self.sent += [each] if isinstance(each, CallModel) else []

    def _step(self, instruction: Instruction) -> None:
        """Carry out one instruction and report it."""
        assert not isinstance(instruction, RowDone)
        name = instruction.task
        try:
            value = self._value(instruction)
        except Exception as error:
            self.state.failed(name, error, self.now)
            return
        if isinstance(instruction, FindCost):
            self.state.counted(name, value)
        elif isinstance(instruction, CallModel):
            self.state.answered(name, value)
        else:
            self.state.returned(name, value)

    def _value(self, instruction: CallModel | FindCost | CallFunction | RunProgram | AwaitExternal) -> Any:
        match instruction:
            case FindCost(call=CallModel(request=request), counts_tokens=counts_tokens):
                return bound_of(request, len(str(request.body))) if counts_tokens else None
            case CallModel(request=request):
                return self.answer(request)
            case CallFunction(node=node, args=args) if node.name == "split":
                words = args["text"].split()
                return [" ".join(words[start:end]) for start, end in split_ranges(args, range(len(words) + 1), node)]
            case CallFunction():
                return self.function(instruction)
            case RunProgram(node=node, args=args):
                return fake_text([node.program, args])
        return fake_text(str(instruction.task))
