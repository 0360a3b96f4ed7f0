"""The evaluation of frames: nodes become values, bodies are entered and left, and what is asked of others is handed on.

Work is done in turns, because a graph may loop or map any number of times. Owns what is still to be evaluated, and what
it costs (`weft.workflow.run.bounds`). It does not know calls, rows or their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from weft.abi.errors import LimitExceeded
from weft.workflow.graph.builtin_functions import JOIN_SEPARATOR
from weft.workflow.graph.labels import case_step
from weft.workflow.graph.nodes import (
    AnyNode,
    DataNode,
    ExternalNode,
    FunctionNode,
    ListNode,
    LlmNode,
    LoopNode,
    MapNode,
    PickNode,
    ProgramNode,
    SwitchNode,
    TextNode,
    reference_of,
)
from weft.workflow.graph.templates import Reference
from weft.workflow.graph.values import (
    RowError,
    ValueOf,
    case_of,
    check_items,
    fill,
    fill_values,
    is_last_round,
    items_of,
    join,
    list_of,
    pick,
    plain,
    value_at,
)
from weft.workflow.run.bounds import (
    BYTES_PER_COST,
    FRAME_BYTES,
    EvaluationBudget,
    RowCosts,
    copied_bytes,
    is_flat,
    made_bytes,
)
from weft.workflow.run.calls import request_of
from weft.workflow.run.frames import OUTPUTS, Frame, OpenMap, RowFailure, Within
from weft.workflow.run.instructions import AwaitExternal, CallFunction, CallModel, RunProgram, TaskName
from weft.workflow.run.measures import RunMeasures
from weft.workflow.run.order import CallSite

Asked = CallModel | CallFunction | RunProgram | AwaitExternal


class Evaluation:
    """Evaluates the frames of all rows. Its owner asks for frames, and takes what evaluation asks for."""

    def __init__(self, budget: EvaluationBudget | None):
        self._todo: deque[tuple[Frame, str]] = deque()
        self._items: list[Iterator[tuple[Within, Mapping[str, Any]]]] = []
        """Of maps, the items that are still to be opened, those of the innermost map last."""
        self._costs = RowCosts(budget)
        self._measures = RunMeasures()

    # ---- of the owner

    def _ask(self, frame: Frame, node: AnyNode, instruction: Asked) -> None:
        """Something outside has to give a node its value."""
        raise NotImplementedError

    def _row_ended(self, row: int, outputs: Mapping[str, Any]) -> None:
        """Every output of a row is there or has failed."""
        raise NotImplementedError

    # ---- turns

    def work(self) -> bool:
        """Go on with what events have made possible, where the turn ended before all of it was evaluated. Whether
        other tasks are to have a turn before more is done."""
        self._work()
        return self._costs.is_turn_over

    def begin_turn(self) -> None:
        """Other tasks have had a turn."""
        self._costs.begin_turn()

    def work_all(self) -> None:
        """Evaluate all that can be, where no other task waits for a turn."""
        while self.work():
            self.begin_turn()

    @property
    def has_work(self) -> bool:
        """Whether something could be evaluated."""
        return bool(self._todo or self._items)

    def close(self) -> None:
        """Give back what rows hold of the budget: nothing more is evaluated. Idempotent."""
        self._costs.close()

    def _work(self) -> None:
        """Evaluate all that can be in this turn. A queue, because chains may be longer than Python's stack."""
        while not self._costs.is_turn_over:
            if self._todo:
                self._next(*self._todo.popleft())
            elif self._items:
                self._open_item()
            else:
                return

    def _next(self, frame: Frame, name: str) -> None:
        """Evaluate a node, or end a frame."""
        if name == OUTPUTS:
            self._ended(frame)
            return
        node = frame.plan.nodes[name]
        broken = (frame.value(Reference(need)) for need in frame.plan.needs[name])
        failure = next((value for value in broken if isinstance(value, RowFailure)), None)
        if failure is not None:
            self._settle(frame, name, failure)
            return
        try:
            self._costs.evaluate(frame.row)
            self._evaluate(frame, node)
        except (RowError, LimitExceeded) as error:
            # Without the frames of its traceback, which hold the value that was refused.
            self._settle(frame, name, RowFailure(frame.path + name, error.with_traceback(None)))

    def _evaluate(self, frame: Frame, node: AnyNode) -> None:
        def value_of(reference: Reference) -> Any:
            return value_at(frame.value(reference), reference)

        name = TaskName(frame.row, frame.path + node.id)
        match node:
            case TextNode():
                self._settle_made(frame, node, fill(node.template, value_of))
            case DataNode():
                self._settle(frame, node.id, node.value)
            case ListNode():
                self._settle_made(frame, node, list_of(node.of, value_of))
            case PickNode():
                of = value_of(reference_of(node.of))
                self._costs.read(of)
                self._settle_made(frame, node, pick(node, of))
            case FunctionNode(name="join"):
                args = fill_values(node.args, value_of)
                self._settle_made(frame, node, join(args["of"], args.get("separator", JOIN_SEPARATOR), node))
            case FunctionNode():
                self._ask(frame, node, CallFunction(name, node, self._arguments(frame, node, value_of)))
            case ProgramNode():
                self._ask(frame, node, RunProgram(name, node, self._arguments(frame, node, value_of)))
            case ExternalNode():
                self._ask(frame, node, AwaitExternal(name, node))
            case LlmNode():
                request = request_of(node, value_of)
                self._hold(frame, _own_bytes(node, request.body))
                site = site_of(frame, node.id)
                self._ask(frame, node, CallModel(name, request, node.cache, site, node.continued is not None))
            case MapNode():
                items = items_of(node, value_of(reference_of(node.over)))
                frame.opened[node.id] = OpenMap(len(items))
                self._measures.map_began(frame.plan.labels[node.id], len(items))
                self._items.append(
                    (Within(frame, node.id, f"[{number}]", number), {node.item: item})
                    for number, item in enumerate(items)
                )
                if not items:
                    self._map_ended(frame, node)
            case SwitchNode():
                place = case_of(node, value_of(reference_of(node.on)))
                self._measures.case_taken(frame.plan.labels[node.id], place)
                self._enter(Within(frame, node.id, case_step(place), 0), place, {})
            case LoopNode():
                bound = {each: value_of(reference_of(text)) for each, text in node.init.items()}
                self._enter(Within(frame, node.id, "#1", 1), "body", bound)

    def _arguments(self, frame: Frame, node: FunctionNode | ProgramNode, value_of: ValueOf) -> Any:
        """What a function or a program is called with. Raises `RowError` and `LimitExceeded`."""
        args = plain(fill_values(node.args, value_of))
        self._hold(frame, copied_bytes(node.args, args))
        return args

    def _settle(self, frame: Frame, node_id: str, value: Any) -> None:
        self._todo += frame.settle(node_id, value)

    def _settle_made(self, frame: Frame, node: AnyNode, value: Any) -> None:
        """Give a node a value that was made here. Raises `LimitExceeded` where there is no room for it."""
        self._hold(frame, made_bytes(value))
        self._settle(frame, node.id, value)

    def _hold(self, frame: Frame, size: int) -> None:
        self._costs.spend(size // BYTES_PER_COST)
        self._costs.hold(frame.row, size)
        frame.held_bytes += size

    # ---- bodies

    def _enter(self, within: Within, place: str, bound: Mapping[str, Any], held_bytes: int = 0) -> None:
        """Evaluate a body. `held_bytes`: of `bound`. Raises `LimitExceeded`."""
        plan = within.frame.plan.plans[within.node, place]
        self._costs.evaluate(within.frame.row)
        frame = Frame(plan, bound, within.frame.row, within)
        self._hold(frame, FRAME_BYTES + held_bytes)
        self._todo += frame.ask(OUTPUTS)

    def _open_item(self) -> None:
        """Open the next item of the innermost map: its items may end before those around it begin."""
        found = next(self._items[-1], None)
        if found is None:
            self._items.pop()
            return
        within, bound = found
        try:
            self._enter(within, "body", bound)
        except LimitExceeded as error:
            self._item_ended(within.frame, within.node, within.number, RowFailure(_place(within), error))

    def _ended(self, frame: Frame) -> None:
        """Every output of a frame is there or has failed."""
        outputs = {name: reached_value(frame, reference_of(text)) for name, text in frame.plan.body.outputs.items()}
        outer = frame.outer
        if outer is None:
            self._row_ended(frame.row, outputs)
            return
        node = outer.plan.nodes[frame.owner]
        failure = next((value for value in outputs.values() if isinstance(value, RowFailure)), None)
        # What the outputs have stays, now with the frame around.
        kept = sum(map(made_bytes, outputs.values())) if is_flat(outputs) else frame.held_bytes
        kept = 0 if failure is not None else min(kept, frame.held_bytes)
        self._costs.give_back(frame.row, frame.held_bytes - kept)
        if isinstance(node, LoopNode) and failure is None:
            self._round_ended(frame, outer, node, outputs, kept)
            return
        outer.held_bytes += kept
        if isinstance(node, MapNode):
            self._item_ended(outer, node.id, frame.number, failure or outputs)
        else:
            self._settle(outer, node.id, failure or outputs)

    def _item_ended(self, frame: Frame, node_id: str, number: int, value: Any) -> None:
        opened, node = frame.opened[node_id], frame.plan.nodes[node_id]
        assert isinstance(node, MapNode)
        opened.done[number] = value
        opened.left -= 1
        self._map_ended(frame, node)

    def _map_ended(self, frame: Frame, node: MapNode) -> None:
        """Nothing while an item is in progress. Of several items that failed the first one counts."""
        if frame.opened[node.id].left:
            return
        done = frame.opened.pop(node.id).done
        failure = next((each for each in done if isinstance(each, RowFailure)), None)
        if failure is not None:
            self._settle(frame, node.id, failure)
            return
        made = {name: [each[name] for each in done] for name in node.body.outputs}
        try:
            for items in made.values():
                check_items(items)
        except RowError as error:
            self._settle(frame, node.id, RowFailure(frame.path + node.id, error))
            return
        self._settle(frame, node.id, made)

    def _round_ended(
        self, frame: Frame, outer: Frame, node: LoopNode, outputs: Mapping[str, Any], held_bytes: int
    ) -> None:
        """`held_bytes`: of the outputs, which no frame counts now."""
        until = None if node.until is None else reached_value(frame, reference_of(node.until))
        if isinstance(until, RowFailure):
            self._costs.give_back(frame.row, held_bytes)
            self._settle(outer, node.id, until)
            return
        try:
            if is_last_round(node, frame.number, until):
                self._measures.loop_ended(outer.plan.labels[node.id], frame.number)
                outer.held_bytes += held_bytes
                self._settle(outer, node.id, outputs)
                return
        except RowError as error:
            self._costs.give_back(frame.row, held_bytes)
            self._settle(outer, node.id, RowFailure(outer.path + node.id, error))
            return
        number = frame.number + 1
        self._costs.give_back(frame.row, held_bytes)
        try:
            self._enter(Within(outer, node.id, f"#{number}", number), "body", outputs, held_bytes)
        except LimitExceeded as error:
            self._settle(outer, node.id, RowFailure(outer.path + node.id, error))


def site_of(frame: Frame, node_id: str) -> CallSite:
    """Where a node of a frame stands in the run."""
    return CallSite(frame.row, frame.plan.labels[node_id], frame.rounds, frame.items)


def reached_value(frame: Frame, reference: Reference) -> Any:
    """What a reference means, a `RowFailure` where it cannot be had."""
    value = frame.value(reference)
    if isinstance(value, RowFailure):
        return value
    try:
        return value_at(value, reference)
    except RowError as error:
        return RowFailure(frame.path + reference.name, error)


def _own_bytes(node: LlmNode, body: Mapping[str, Any]) -> int:
    """Bytes of the texts of a request, without those of a conversation that it goes on with."""
    if node.messages is None:
        return made_bytes(body["prompt"])
    own = len(node.messages) - (node.continued is not None)
    return sum(made_bytes(message["content"]) for message in body["messages"][-own:]) if own else 0


def _place(within: Within) -> str:
    return f"{within.frame.path}{within.node}{within.step}"
