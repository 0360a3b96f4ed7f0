"""The state of a run: events in, instructions out, no I/O and no clock of its own.

A node of a row is evaluated as soon as its inputs are there; nothing waits for other rows, or for a node to be done
with all of them. Calls of models leave in the order of the plan, as many as the caller takes. A value that cannot be
had is a `RowFailure`, which all that depends on it inherits, so a failed row has one error and no other row has any.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from weft.abi.errors import EngineDead, LimitExceeded, Overloaded, WeftError
from weft.workflow.actuals import CallCounts, PinCounts, RunCounts
from weft.workflow.graph.nodes import (
    CALL_RETRIES,
    AnyNode,
    Body,
    FunctionNode,
    LlmNode,
    ProgramNode,
    WorkflowGraph,
    count_nodes,
)
from weft.workflow.graph.values import RowError, plain
from weft.workflow.run.allowance import RunAllowance
from weft.workflow.run.bounds import EvaluationBudget, given_bytes
from weft.workflow.run.calls import AnswerRefused, CallBound, ModelAnswer, trace_of, value_of_answer
from weft.workflow.run.evaluation import Asked, Evaluation, site_of
from weft.workflow.run.frames import OUTPUTS, BodyPlan, Frame, RowFailure
from weft.workflow.run.instructions import (
    CallModel,
    FindCost,
    Instruction,
    Notice,
    RowDone,
    RunLimits,
    TaskName,
)
from weft.workflow.run.ledger import CallLedger, merged
from weft.workflow.run.order import CallSite, Hints, Order, no_hints, row_by_row
from weft.workflow.run.ready_calls import ReadyCalls

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


class _Task:
    """What something outside works on, or will."""

    __slots__ = ("attempts", "bound", "frame", "instruction", "is_counted", "key", "node")

    def __init__(self, frame: Frame, node: AnyNode, instruction: Instruction):
        self.frame = frame
        self.node = node
        self.instruction = instruction
        self.attempts = 0
        self.is_counted = False
        """Of a call: whether what it costs is known."""
        self.bound: CallBound | None = None
        """Of a call; None where it was not asked for."""
        self.key: str | None = None
        """Of a call whose answer equal calls have too; None for others, and with `cache` false: no other call may
        answer that."""
        if isinstance(instruction, CallModel) and instruction.may_be_cached:
            self.key = instruction.request.key

    @property
    def label(self) -> str:
        """The node, with those whose bodies it is in (`weft.workflow.graph.labels`)."""
        return self.frame.plan.labels[self.node.id]

    @property
    def site(self) -> CallSite:
        """Where it stands in the run."""
        return site_of(self.frame, self.node.id)


class RunState(Evaluation):
    """All rows in progress. Owns their values; knows the time only as an argument."""

    def __init__(
        self,
        graph: WorkflowGraph,
        order: Order | None = None,
        limits: RunLimits | None = None,
        hints: Hints = no_hints,
        counts: RunCounts | None = None,
        budget: EvaluationBudget | None = None,
    ):
        """`counts` are those of the rows of an interrupted run that have ended. Without a `budget` rows may evaluate
        and hold as much as they like."""
        super().__init__(budget)
        counts = counts or RunCounts()
        self._ledger = CallLedger(counts)
        self.num_nodes = count_nodes(graph.nodes)
        """Nodes of the graph, those of bodies included."""
        self._plan = BodyPlan(Body(nodes=graph.nodes, outputs=graph.outputs), None)
        self._order = order or row_by_row(graph)
        self._allowance = RunAllowance(limits or RunLimits())
        self._allowance.add(counts.calls)
        self._hints = hints
        self._rows: set[int] = set()
        self._unstarted: dict[int, Mapping[str, Any]] = {}
        """The inputs of rows no call of which was sent or has an earlier answer."""
        self.num_opened = 0
        """Rows that have arrived."""
        self._tasks: dict[TaskName, _Task] = {}
        self._ready = ReadyCalls()
        self._later: list[tuple[float, TaskName]] = []
        """Tasks to be tried again, a heap."""
        self._equal: dict[str, list[TaskName]] = {}
        """Calls in flight by the key of their request; the first of each list is the one that is sent."""
        self._out: list[Instruction] = []
        self._time_error: LimitExceeded | None = None
        """Set when the seconds of the run have passed."""
        self.on_settled: Callable[[int, str], None] = lambda row, node: None
        """Told each outer node of a row that has its value, or never will."""
        self.pin_counts: Callable[[], PinCounts] = lambda: counts.pins
        """What engines were asked to keep for the run, as far as it is known by now; its keeper counts on."""

    # ---- events

    def go_on(self, answered: CallCounts, seconds: float) -> None:
        """The run was interrupted after so many seconds, and rows that had not ended had these answers. They are of the
        limits from now on; the counts have them when they come again."""
        self._allowance.add(answered, seconds)

    def begin(self, now: float) -> float | None:
        """The run begins or goes on at `now`, in seconds. Returns when to call `time_over`; None: never."""
        return self._allowance.begin(now)

    def time_over(self) -> None:
        """The seconds of the run have passed: everything without a value fails, now and later. Tasks in progress are
        not reported."""
        error = self._time_error = self._allowance.out_of_time()
        self._ready.clear()
        self._later.clear()
        self._equal.clear()
        self._out = [each for each in self._out if isinstance(each, Notice)]
        tasks, self._tasks = self._tasks, {}
        for name, task in tasks.items():
            self._allowance.end(name)
            self._settle(task.frame, task.node.id, RowFailure(name.path, error))
        self._work()

    def open_row(self, row: int, values: Mapping[str, Any]) -> None:
        """A row arrives. `values` has all inputs of the graph."""
        self._rows.add(row)
        self._costs.begin(row)
        self._ledger.begin(row)
        self._unstarted[row] = values
        self.num_opened += 1
        self._todo += Frame(self._plan, values, row).ask(OUTPUTS)
        self._work()

    def counted(self, name: TaskName, bound: CallBound | None) -> None:
        """A call has no earlier answer. `bound`: the most tokens that it may use, where they were asked for."""
        task = self._tasks[name]
        task.is_counted, task.bound = True, bound
        self._issue(name)

    def answered(self, name: TaskName, answer: ModelAnswer) -> None:
        """A model answered a call, and with it those that are equal, now or earlier. An answer that goes past the limit
        of tokens is an error of theirs."""
        exceeded = self._allowance.end(name, answer)
        self._unstarted.pop(name.row, None)
        label = self._tasks[name].label
        self._ledger.note(name.row, label, lambda counts: counts.plus(answer.usage, is_cached=answer.is_cached))
        self._ledger.trace(name.row, trace_of(name.path, label, answer))
        call = self._tasks[name].instruction
        assert isinstance(call, CallModel)
        for each in self._with_equals(name):
            task = self._tasks.pop(each)
            assert isinstance(task.node, LlmNode)
            if exceeded is not None:
                self._settle(task.frame, task.node.id, RowFailure(each.path, exceeded))
                continue
            try:
                self._settle_given(each, task, value_of_answer(task.node, call.request, answer))
            except RowError as error:
                self._settle(task.frame, task.node.id, RowFailure(each.path, error))
        self._work()

    def returned(self, name: TaskName, value: Any) -> None:
        """A function or program returned, or a value came from outside."""
        self._settle_given(name, self._tasks.pop(name), value)
        self._work()

    def failed(self, name: TaskName, error: Exception, now: float) -> None:
        """A task failed at `now`, in seconds. Overloads and deaths of engines are tried again after a pause that
        doubles, at most `retries` times; functions after any error, as their node says. Of equal calls each has its own
        `retries`: the next one is sent when the first has none left."""
        refused = error.answer if isinstance(error, AnswerRefused) else None
        self._allowance.end(name, refused)
        task = self._tasks[name]
        if refused is not None:
            self._ledger.note(name.row, task.label, lambda counts: counts.plus(refused.usage, is_cached=False))
        if task.attempts < retries_of(task.node, error):
            self._try_again(name, error, now)
            return
        equals = self.answered_by(name)
        lasting = [each for each in equals if task.attempts < retries_of(self._tasks[each].node, error)]
        for each in self._with_equals(name, lasting):
            failed = self._tasks.pop(each)
            self._settle(failed.frame, failed.node.id, RowFailure(each.path, error))
        if lasting:
            first = self._tasks[lasting[0]]
            first.attempts, first.is_counted, first.bound = task.attempts, task.is_counted, task.bound
            self._try_again(lasting[0], error, now)
        self._work()

    def _try_again(self, name: TaskName, error: Exception, now: float) -> None:
        task = self._tasks[name]
        pause = pause_s(task.attempts, error)
        task.attempts += 1
        heapq.heappush(self._later, (now + pause, name))

    def answered_by(self, name: TaskName) -> list[TaskName]:
        """The call, and those that will have the same answer."""
        key = self._tasks[name].key
        return [name] if key is None else list(self._equal[key])

    def seconds(self, now: float) -> float:
        """Seconds that the run has taken, those before interruptions included."""
        return self._allowance.seconds(now)

    def wake(self, now: float) -> float | None:
        """Try again what is due at `now`. Returns when the next try is due."""
        while self._later and self._later[0][0] <= now:
            self._issue(heapq.heappop(self._later)[1])
        return self._later[0][0] if self._later else None

    @property
    def has_room(self) -> bool:
        """Whether another row may be opened, as far as the values of those in progress are concerned."""
        return self._costs.has_room or not (self._rows or self._out)

    # ---- instructions

    def take(self, max_calls: int, max_new: int | None = None) -> list[Instruction]:
        """What is to be done now: everything but calls of models, and of those the first `max_calls` in order, of which
        `max_new`, None: all, may begin a conversation. All that can be evaluated must have been (`work`)."""
        calls: list[CallModel] = []
        max_new = max_calls if max_new is None else max_new
        while len(calls) < max_calls:
            name = self._ready.first(may_begin=max_new > 0)
            if name is None:
                break
            bound = self._tasks[name].bound
            try:
                if not self._allowance.has_room(bound):
                    break
            except LimitExceeded as limit:
                self._ready.remove(name)
                self._costs.spend(1)
                self.failed(name, limit, 0.0)
                if self._costs.is_turn_over:
                    break
                continue
            self._ready.remove(name)
            self._allowance.send(name, bound)
            self._unstarted.pop(name.row, None)
            call = self._to_send(self._tasks[name])
            max_new -= not call.goes_on
            calls.append(call)
        others, self._out = self._out, []
        for each in others:
            if isinstance(each, RowDone):
                self._costs.end(each.row)
        return others + calls

    @property
    def counts(self) -> RunCounts:
        """What the run has done so far."""
        return self._ledger.counts._replace(pins=self.pin_counts())

    def sort(self) -> None:
        """The order has changed: sort the calls that are ready by it."""
        self._ready.sort(lambda name: self._rank(self._tasks[name]))

    def measured(self) -> dict[str, dict[str, Any]]:
        """Figures of nodes by label, as `weft.workflow.plan` takes them: means of what has happened so far."""
        return self._measures.statistics(self._ledger.counts.by_node)

    @property
    def rows(self) -> Set[int]:
        """Numbers of the rows in progress; a view that changes with them."""
        return self._rows

    @property
    def unstarted(self) -> Mapping[int, Mapping[str, Any]]:
        """The inputs of rows no call of which was sent or has an earlier answer, in the order in which they arrived."""
        return self._unstarted

    @property
    def num_rows(self) -> int:
        """How many rows are in progress."""
        return len(self._rows)

    @property
    def has_instructions(self) -> bool:
        """Whether `take(0)` would return something."""
        return bool(self._out)

    def has_next(self, max_new: int = 1) -> bool:
        """Whether `take(1, max_new)` would send a call, or refuse one: not where the next one waits for what calls in
        progress leave of the limit."""
        name = self._ready.first(may_begin=max_new > 0)
        if name is None:
            return False
        try:
            return self._allowance.has_room(self._tasks[name].bound)
        except LimitExceeded:
            return True

    def _to_send(self, task: _Task) -> CallModel:
        """A call with the hints that hold now; they are no part of what is known of the task."""
        call = task.instruction
        assert isinstance(call, CallModel)
        fields, advice = self._hints(call.site)
        return call._replace(request=call.request._replace(hints=fields, advice=advice))

    # ---- what evaluation asks for

    def _ask(self, frame: Frame, node: AnyNode, instruction: Asked) -> None:
        name = instruction.task
        task = self._tasks[name] = _Task(frame, node, instruction)
        key = task.key
        if key is not None:
            equals = self._equal.setdefault(key, [])
            equals.append(name)
            if len(equals) > 1:
                return
        self._issue(name)

    def _issue(self, name: TaskName) -> None:
        task = self._tasks[name]
        if not isinstance(task.instruction, CallModel):
            self._out.append(task.instruction)
        elif self._allowance.counts_calls and not task.is_counted:
            self._out.append(FindCost(task.instruction, self._allowance.counts_tokens))
        else:
            self._ready.add(self._rank(task), name, goes_on=task.instruction.goes_on)

    def _rank(self, task: _Task) -> tuple[Any, ...]:
        site = task.site
        return self._order(site), site.rounds, site.items, task.frame.path, task.node.id

    def _with_equals(self, name: TaskName, lasting: Sequence[TaskName] = ()) -> list[TaskName]:
        """The task, and those that have the same answer or error: all equal ones but the `lasting`, which stay equal to
        one another."""
        key = self._tasks[name].key
        if key is None:
            return [name]
        equals, stay = self._equal.pop(key), set(lasting)
        if lasting:
            self._equal[key] = list(lasting)
        ended = [each for each in equals if each not in stay]
        for each in ended[1:]:
            self._ledger.note(each.row, self._tasks[each].label, merged)
        return ended

    def _evaluate(self, frame: Frame, node: AnyNode) -> None:
        if self._time_error is not None:
            raise self._time_error
        super()._evaluate(frame, node)

    def _settle_given(self, name: TaskName, task: _Task, value: Any) -> None:
        """Give a node a value from outside. Without room for it the node fails."""
        try:
            self._hold(task.frame, given_bytes(value))
        except LimitExceeded as error:
            value = RowFailure(name.path, error)
        self._settle(task.frame, task.node.id, value)

    def _settle(self, frame: Frame, node_id: str, value: Any) -> None:
        super()._settle(frame, node_id, value)
        if frame.outer is None:
            self.on_settled(frame.row, node_id)

    def _row_ended(self, row: int, outputs: Mapping[str, Any]) -> None:
        failure = next((value for value in outputs.values() if isinstance(value, RowFailure)), None)
        made = {name: plain(value) for name, value in outputs.items() if not isinstance(value, RowFailure)}
        ended = self._ledger.end(row, failed=failure is not None)
        self._rows.remove(row)
        self._unstarted.pop(row, None)
        self._out.append(RowDone(row, made, failure, ended.traces, ended.by_node))


def pause_s(attempts: int, error: Exception) -> float:
    """How long to wait after an error before another try, behind so many further ones."""
    asked = error.retry_after_s if isinstance(error, WeftError) else None
    pause: float = min(FIRST_PAUSE_S * 2**attempts, MAX_PAUSE_S)
    return max(pause, asked or 0.0)


def retries_of(node: AnyNode, error: Exception) -> int:
    """Further tries of what a node asks for, after such an error."""
    of_server = isinstance(error, (EngineDead, Overloaded))
    if isinstance(node, LlmNode):
        return node.retries if of_server else 0
    if isinstance(node, ProgramNode) or (isinstance(node, FunctionNode) and node.source is not None):
        # Nothing of it has run: there was no place for another program.
        refused = CALL_RETRIES if isinstance(error, Overloaded) else 0
        return refused if isinstance(node, ProgramNode) else max(node.retries, refused)
    if not isinstance(node, FunctionNode):
        return 0
    asks_server = node.source is None and node.name == "split"
    return max(node.retries, CALL_RETRIES) if asks_server and of_server else node.retries
