"""Evaluates a graph for one row, node after node, with fakes for models, functions and programs: what every other way
of running the graph has to give.

The fakes are pure functions of what they get, but for what may differ from call to call (sampling without a seed,
impure functions, programs): those give a **mark** that no other call gives, one character of a private area of
Unicode. Results are equal if they are after `normalized` has numbered their marks in order of appearance. So two calls
that became one are seen, as is one that became two.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from weft.workflow.graph import values
from weft.workflow.graph.builtin_functions import JOIN_SEPARATOR
from weft.workflow.graph.nodes import (
    Body,
    DataNode,
    ExternalNode,
    FunctionNode,
    GraphNode,
    ListNode,
    LlmNode,
    LoopNode,
    MapNode,
    PickNode,
    ProgramNode,
    SwitchNode,
    TextNode,
    WorkflowGraph,
    reference_of,
)
from weft.workflow.graph.templates import Reference
from weft.workflow.graph.values import AnswerValue, RowError

Scope = dict[str, Any]
Model = Callable[[LlmNode, Mapping[str, Any]], str]
"""(node, request) -> the answer's text."""
_FIRST_MARK = 0xF0000
_MARK = re.compile("[\U000f0000-\U000fffff]")


class NaiveRunner:
    """Evaluates graphs. `functions` and `programs` replace fakes by name, `externals` gives values by id."""

    def __init__(
        self,
        *,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        programs: Mapping[str, Callable[[Any], Any]] | None = None,
        externals: Mapping[str, Any] | None = None,
        model: Model | None = None,
    ):
        self.functions = functions or {}
        self.programs = programs or {}
        self.externals = externals or {}
        self.model = model or self.fake_model
        self.evaluated: list[str] = []
        """Ids of all nodes evaluated, once for each time."""
        self.calls: list[str] = []
        """Ids of calls of models, functions and programs, once for each call."""
        self._num_marks = 0

    def run(self, graph: WorkflowGraph, row: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a canonical graph as JSON. Raises `RowError`."""
        found = self._body(Body(nodes=graph.nodes, outputs=graph.outputs), dict(row))[0]
        return {name: values.plain(value) for name, value in found.items()}

    def fake_model(self, node: LlmNode, request: Mapping[str, Any]) -> str:
        """An answer in the form that the call asks for."""
        is_fixed = request.get("temperature") == 0 or request.get("seed") is not None
        answer = fake_text(request) + ("" if is_fixed else self._mark())
        return answer if node.schema is None else json.dumps(_like(node.schema, answer), ensure_ascii=False)

    def _mark(self) -> str:
        self._num_marks += 1
        return chr(_FIRST_MARK + self._num_marks)

    def _body(self, body: Body, scope: Scope) -> tuple[dict[str, Any], Scope]:
        """The values of a body's outputs, and of all its names."""
        scope = dict(scope)
        for node in body.nodes:
            self.evaluated.append(node.id)
            scope[node.id] = self._node(node, scope)
        return {name: _read(scope, reference_of(text)) for name, text in body.outputs.items()}, scope

    def _node(self, node: GraphNode, scope: Scope) -> Any:
        def value_of(reference: Reference) -> Any:
            return _read(scope, reference)

        match node:
            case LlmNode():
                return self._answer(node, value_of)
            case TextNode():
                return values.fill(node.template, value_of)
            case DataNode():
                return node.value
            case ListNode():
                return values.fill_values(list(node.of), value_of)
            case FunctionNode():
                return self._function(node, values.fill_values(node.args, value_of))
            case ProgramNode():
                self.calls.append(node.id)
                args = values.plain(values.fill_values(node.args, value_of))
                program = self.programs.get(node.program)
                return fake_text([node.program, args]) + self._mark() if program is None else program(args)
            case ExternalNode():
                if node.id not in self.externals:
                    raise RowError("no value was set", node.id)
                return self.externals[node.id]
            case PickNode():
                return values.pick(node, value_of(reference_of(node.of)))
            case MapNode():
                items = values.items_of(node, value_of(reference_of(node.over)))
                found = [self._body(node.body, {**scope, node.item: item})[0] for item in items]
                return {name: [each[name] for each in found] for name in node.body.outputs}
            case SwitchNode():
                return self._body(node.bodies[values.case_of(node, value_of(reference_of(node.on)))], scope)[0]
            case LoopNode():
                return self._loop(node, scope)
        raise AssertionError(node.op)

    def _answer(self, node: LlmNode, value_of: values.ValueOf) -> AnswerValue:
        self.calls.append(node.id)
        messages = values.chat_messages(node, value_of)
        asked = {"prompt": values.fill(node.prompt, value_of)} if node.prompt is not None else {"messages": messages}
        text = self.model(node, {**node.request, **asked, "schema": node.schema})
        calls = ({"function": fake_text([messages])},) if node.request.get("tools") else None
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        return AnswerValue(
            value=values.answer_content(node, text),
            messages=()
            if node.messages is None
            else (*messages, answer if calls is None else {**answer, "tool_calls": calls}),
            tool_calls=calls,
        )

    def _function(self, node: FunctionNode, args: Mapping[str, Any]) -> Any:
        if node.name == "join":
            return values.join(args["of"], args.get("separator", JOIN_SEPARATOR), node)
        args = values.plain(args)
        if node.name == "split":
            tokens = fake_tokens(values.text_of(args["text"]))
            ranges = values.split_ranges(args, range(len(tokens) + 1), node)
            return ["".join(tokens[start:end]) for start, end in ranges]
        self.calls.append(node.id)
        if node.name in self.functions:
            return self.functions[node.name](**args)
        return fake_text([node.name, node.source, args]) + ("" if node.pure else self._mark())

    def _loop(self, node: LoopNode, scope: Scope) -> Any:
        states = {name: _read(scope, reference_of(text)) for name, text in node.init.items()}
        for number in range(1, node.max_rounds + 1):
            states, inside = self._body(node.body, {**scope, **states})
            until = None if node.until is None else _read(inside, reference_of(node.until))
            if values.is_last_round(node, number, until):
                break
        return states


def evaluate(graph: WorkflowGraph, row: Mapping[str, Any], **fakes: Any) -> dict[str, Any]:
    """The outputs of a canonical graph for a row. Raises `RowError`."""
    return NaiveRunner(**fakes).run(graph, row)


def outcome(graph: WorkflowGraph, row: Mapping[str, Any], **fakes: Any) -> Any:
    """What comparisons compare: the normalized outputs, or None for an error of the row."""
    try:
        return normalized(evaluate(graph, row, **fakes))
    except RowError:
        return None


def normalized(value: Any) -> str:
    """A value as JSON with its marks numbered in order of appearance."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=msgspec.to_builtins)
    numbers = {mark: f"<{number}>" for number, mark in enumerate(marks_in(text))}
    return _MARK.sub(lambda found: numbers[found[0]], text)


def marks_in(text: str) -> list[str]:
    """The marks of a text, each once, in order of appearance."""
    return list(dict.fromkeys(_MARK.findall(text)))


def fake_text(asked: Any) -> str:
    """A text that follows from JSON, with the marks of it; now and then one that a switch or a pick can meet."""
    text = json.dumps(asked, ensure_ascii=False, sort_keys=True, default=msgspec.to_builtins)
    hashed = hashlib.sha256(normalized(asked).encode()).hexdigest()
    form = ["x", "y", "1. 2", "{} . "][int(hashed[0], 16) % 4] if hashed[1] in "01234567" else f"{hashed[:6]}. x y"
    return form + "".join(marks_in(text))


def fake_tokens(text: str) -> list[str]:
    """The tokens of the fake model: words with the space after them."""
    return re.findall(r"\S+\s*|^\s+", text)


def _like(schema: Any, text: str) -> Any:
    """A value of a schema's form that follows from a text."""
    number = int(hashlib.sha256(normalized(text).encode()).hexdigest()[:4], 16)
    match schema.get("type"):
        case "object":
            return {name: _like(inner, f"{name} {text}") for name, inner in schema.get("properties", {}).items()}
        case "array":
            return [_like(schema.get("items", {}), f"{at} {text}") for at in range(2)]
        case "number" | "integer":
            return number
        case "boolean":
            return number % 2 == 0
    return text


def _read(scope: Scope, reference: Reference) -> Any:
    return values.value_at(scope[reference.name], reference)
