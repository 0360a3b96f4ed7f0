"""Traces: the graph, or the body of a node, that is being made while a function of the user's runs."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from weft.endpoints.fields import with_allowed
from weft.workflow.frontend.json_values import NotJson, as_json
from weft.workflow.frontend.marks import NeedsValueError, has_mark, marked_in, readable, templated
from weft.workflow.frontend.variable import Values, Variable, reference_in, trace_in
from weft.workflow.function_args import name_of
from weft.workflow.graph.names import NameTable
from weft.workflow.graph.node_types import of_node
from weft.workflow.graph.nodes import (
    DEFAULT_OUTPUT,
    AnyNode,
    Body,
    DataNode,
    Field,
    GraphNode,
    TextNode,
    map_strings,
)
from weft.workflow.graph.templates import Reference, is_name, parse_template
from weft.workflow.graph.value_types import ANY, ValueType, follow

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORKFLOW = str(Path(__file__).parents[1])
_VARIABLE = re.compile(r"\bVariable\b")
_NO_VALUE = (
    "it takes a value, and a variable has none before the run: use ops.join for the texts of a list, and "
    "ops.function(f, value) for a function of Python"
)
_current: ContextVar[FlowTrace | None] = ContextVar("trace", default=None)


class FlowError(ValueError):
    """A flow that cannot be traced; the message says what to write instead."""

    def __init__(self, message: str):
        super().__init__(readable(message))


class _Names(NameTable):
    """What all traces of one flow share: names in use, lines, and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, str] = {}
        self.functions: dict[str, Callable[..., Any]] = {}
        self.returned_by: str | None = None
        """File, line and name of the function whose result is read; None: it runs."""

    def number(self, op: str) -> str:
        """A name for a node without one."""
        self.counts[op] = self.counts.get(op, 0) + 1
        return self.take(f"{op}_{self.counts[op]}")


class FlowTrace:
    """The nodes made so far. Names are unique in all traces of a flow, so that none hides another."""

    def __init__(self, outer: FlowTrace | None = None):
        self.outer = outer
        self.values: Values | None = None
        """Set by the trace of a session; what is made in a body has no value of its own."""
        self.names: _Names = outer.names if outer is not None else _Names()
        self.nodes: list[AnyNode] = []
        self._types: dict[str, ValueType] = {}

    def bind(self, name: str, kind: ValueType = ANY) -> Variable:
        """A variable for an input, an item, or what goes round a loop."""
        name = self.names.take(name)
        self._types[name] = kind
        return Variable(self, Reference(name), kind)

    def add(
        self,
        kind: type[GraphNode],
        op: str,
        fields: Mapping[str, Any],
        *,
        name: str | None = None,
        bodies: Mapping[str, Mapping[str, ValueType]] | None = None,
    ) -> Variable:
        """Append a node. `bodies` has the types of the outputs of its bodies, by their places. Raises `FlowError` for
        a name that is taken and for values that the node cannot have."""
        if name is not None and (not is_name(name) or name in self.names.used):
            why = "is used already" if is_name(name) else "is not a name: letters, digits and _"
            raise FlowError(f"{name!r} {why}")
        line = self.names.returned_by or caller_line()
        node_id = self.names.take(name) if name is not None else self.names.number(op)
        node = cast(AnyNode, _converted(kind(id=node_id, **fields), fields, line))
        self.nodes.append(node)
        self.names.lines[node_id] = line
        self._types[node_id] = found = of_node(node, self.type_of, bodies or {})
        return Variable(self, Reference(node_id), found)

    def type_of(self, reference: Reference) -> ValueType:
        """What is known of a value; `any` where a reference is wrong, which the check reports."""
        trace: FlowTrace | None = self
        while trace is not None and reference.name not in trace._types:
            trace = trace.outer
        found = ANY if trace is None else follow(trace._types[reference.name], reference.path)
        return ANY if isinstance(found, str) else found

    def current(self) -> FlowTrace:
        """The innermost trace of the same flow. Raises `FlowError` outside the flow's function."""
        current = current_trace()
        if current.names is not self.names:
            raise FlowError("a variable belongs to the flow in whose function it was made")
        return current

    def see(self, variable: Variable) -> Reference:
        """What a variable refers to. Raises `FlowError` for one that was made in a body which has ended."""
        trace: FlowTrace | None = self
        while trace is not None and trace is not trace_in(variable):
            trace = trace.outer
        if trace is None:
            raise FlowError(f"{reference_in(variable)} was made in a body that has ended: return it from the body")
        return reference_in(variable)

    def lift(self, value: Any) -> Variable:
        """A variable for a value of the user's: itself, a text with marks, or a constant."""
        if isinstance(value, Variable):
            self.see(value)
            return value
        if isinstance(value, str) and (has_mark(value) or parse_template(value).references):
            return self.add(TextNode, "text", {"template": value})
        return self.add(DataNode, "data", {"value": value})

    def named(self, value: Any) -> str:
        """The reference to a value of the user's, as fields of nodes have it."""
        return str(reference_in(self.lift(value)))

    def outputs(
        self,
        function: Callable[..., Any],
        args: Sequence[Variable] = (),
        named: Mapping[str, Variable] | None = None,
        names: tuple[str, ...] = (),
    ) -> dict[str, Variable]:
        """Call a function of the user's, whose operators make nodes here. Returns the variables that it returned, by
        name: one is `value` unless `names` says otherwise, a named tuple and a mapping have names of their own, and
        those of a tuple are numbered. Raises `FlowError` for a result that is none of these."""
        with tracing(self):
            try:
                result = function(*args, **(named or {}))
            except TypeError as error:
                if isinstance(error, NeedsValueError) or _VARIABLE.search(str(error)) is None:
                    raise
                raise NeedsValueError(f"{_raised_at(error, function)}: {error}: {_NO_VALUE}") from error
            outer, self.names.returned_by = self.names.returned_by, line_of(function)
            try:
                return self._lifted(result, names)
            finally:
                self.names.returned_by = outer

    def _lifted(self, result: Any, names: tuple[str, ...]) -> dict[str, Variable]:
        if isinstance(result, Mapping):
            return {readable(str(name)): self.lift(value) for name, value in result.items()}
        if isinstance(result, tuple):
            numbered = tuple(f"{DEFAULT_OUTPUT}_{number + 1}" for number in range(len(result)))
            given = names or getattr(result, "_fields", numbered)
            if len(given) != len(result):
                raise FlowError(f"{len(result)} values are returned for {', '.join(given)}")
            return dict(zip(given, map(self.lift, result), strict=True))
        if result is None:
            raise FlowError(
                f"{self.names.returned_by}: the function returns nothing: return a variable, a tuple of them, or a "
                "mapping"
            )
        return {(names or (DEFAULT_OUTPUT,))[0]: self.lift(result)}

    def body(self, outputs: Mapping[str, Variable]) -> Body:
        """What was traced, as the body of a node."""
        return Body(nodes=tuple(self.nodes), outputs={name: str(self.see(value)) for name, value in outputs.items()})


def _converted(node: GraphNode, fields: Mapping[str, Any], line: str) -> GraphNode:
    """The node with its fields checked as those of JSON are, and with templates for the texts of the user's. Raises
    `FlowError`, and `NeedsValueError` for a text with the `repr` of a variable or a piece of a mark."""
    place = f"{line}: {node.op}"
    given = {**fields, **fields.get("request", {})}
    given.pop("request", None)

    def template(inside: str, field: Field, value: Any) -> Any:
        try:
            return value if field == "name" else map_strings(value, templated)
        except NeedsValueError as error:
            raise NeedsValueError(f"{place}.{inside}: {error}") from None

    try:
        made = msgspec.convert(msgspec.to_builtins(node), type(node))
    except msgspec.ValidationError as error:
        what, at, where = str(error).partition(" - at ")
        what = with_allowed(what, type(node), where.strip("`").removeprefix("$."))
        raise FlowError(f"{place}: {what}{at}{where}".replace("`", "'")) from None
    except TypeError as error:
        raise FlowError(f"{place}{_not_json(given, '') or f': a value is not JSON: {error}'}") from None
    made = made.visit(template)
    if has_mark(msgspec.json.encode(made).decode()):
        plain: dict[str, Any] = msgspec.to_builtins(made)
        for name, value in (plain.pop("request", {}) | plain).items():
            shown = msgspec.json.encode(value).decode()
            if has_mark(shown):
                raise _marked(shown, f"{place}.{name}", name)
    return made


def _not_json(value: Any, place: str) -> str | None:
    """The place of the first value that JSON does not have, and what to do about it; None: there is none."""
    if isinstance(value, Mapping):
        found = (_not_json(inner, f"{place}.{key}") for key, inner in value.items())
        return next(filter(None, found), None)
    if isinstance(value, (list, tuple)):
        found = (_not_json(inner, f"{place}[{number}]") for number, inner in enumerate(value))
        return next(filter(None, found), None)
    if isinstance(value, Variable):
        return f"{place}: {_same_for_all(str(reference_in(value)), place)}"
    shown = repr(value)
    if has_mark(shown):
        try:
            templated(shown)
        except NeedsValueError as error:
            return f"{place}: {error}"
    if inspect.iscoroutine(value):
        value.close()
        return (
            f"{place}: an async function was called, which gives no variable: operators wait for nothing, so write "
            "def; ops.function(f, ...) calls an async function in the run"
        )
    try:
        msgspec.to_builtins(value)
    except TypeError:
        try:
            as_json(value)
        except NotJson as error:
            return f"{place}: {error}"
    return None


def _marked(text: str, place: str, field: str) -> Exception:
    """The error of a field with a variable, or a piece of a mark, that must be the same for all rows."""
    try:
        return FlowError(f"{place}: {_same_for_all(marked_in(text), field)}")
    except NeedsValueError as error:
        return NeedsValueError(f"{place}: {error}")


def _same_for_all(name: str, place: str) -> str:
    """Why a variable cannot stand in a field of a node, and what to use instead."""
    if place.removeprefix(".").partition("[")[0].partition(".")[0] == "value":
        return (
            f"{name} is a value of a row, and a constant has none: ops.list(...) makes a list of variables, ops.text a "
            "text; a function returns several values as a tuple, or as a mapping without others within"
        )
    return f"{name} is a value of a row, and this is the same for all rows: give a constant"


def current_trace() -> FlowTrace:
    """The trace that operators add to. Raises `FlowError` outside the function of a flow."""
    trace = _current.get()
    if trace is None:
        raise FlowError("operators make nodes of a flow: call them in a function with @weft.flow, or in weft.session()")
    return trace


def is_tracing() -> bool:
    """Whether the function of a flow is running."""
    return _current.get() is not None


def untraced() -> Context:
    """A copy of the context in which no function is traced: for what runs what was traced."""
    context = copy_context()
    context.run(_current.set, None)
    return context


@contextmanager
def tracing(trace: FlowTrace) -> Iterator[FlowTrace]:
    """Let operators add to a trace."""
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def line_of(function: Callable[..., Any]) -> str:
    """File and line where a function of the user's begins, and its name."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = name_of(function)
    return name if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}: {name}"


def _raised_at(error: TypeError, function: Callable[..., Any]) -> str:
    """File and line of a function's file that an error passed last."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if code and each.filename == code.co_filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else line_of(function)


def caller_line() -> str:
    """File and line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_WORKFLOW):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
