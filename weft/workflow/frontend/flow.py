"""Flows: a function whose parameters are the columns of a row, traced once into a graph."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from weft.workflow.frontend.trace import FlowError, FlowTrace, is_tracing, line_of
from weft.workflow.frontend.workflow import Workflow
from weft.workflow.function_args import name_of
from weft.workflow.graph.check import check
from weft.workflow.graph.digest import canonical
from weft.workflow.graph.mistakes import InvalidGraph
from weft.workflow.graph.nodes import WorkflowGraph


class Flow(Workflow):
    """A workflow that a Python function describes. Within the function of another flow it can be called like one."""

    def __init__(self, function: Callable[..., Any], name: str | None = None):
        """Raises `FlowError` for what cannot be traced: a coroutine function, a generator function, a method."""
        _check_function(function)
        self._function = function
        self.name = name or name_of(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Make the nodes of this flow in the flow that is being traced. Raises `FlowError` elsewhere."""
        if not is_tracing():
            raise FlowError(
                f"{self.name} is a flow: its rows go to {self.name}.run(rows, on=...); only other flows call it"
            )
        return self._function(*args, **named)

    @functools.cached_property
    def _traced(self) -> tuple[WorkflowGraph, Mapping[str, Callable[..., Any]]]:
        trace = FlowTrace()
        given: dict[str, Any] = {}
        inputs = []
        for parameter in inspect.signature(self._function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise FlowError(f"{self.name}: *{parameter.name} cannot be a column: name each parameter")
            if parameter.default is parameter.empty:
                given[parameter.name] = trace.bind(parameter.name)
                inputs.append(parameter.name)
        body = trace.body(trace.outputs(self._function, named=given))
        graph = WorkflowGraph(inputs=tuple(inputs), nodes=body.nodes, outputs=body.outputs)
        mistakes = check(graph, trace.names.lines)
        if mistakes:
            raise InvalidGraph(mistakes)
        return canonical(graph), trace.names.functions

    @property
    def graph(self) -> WorkflowGraph:
        """The graph; the function runs when it is first asked for. Raises what the function raises, `FlowError`, and
        `InvalidGraph` with every mistake."""
        return self._traced[0]

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The Python functions that nodes of the graph call, by name."""
        return self._traced[1]

    def table(self, rows: Any) -> Any:
        """The rows, none of which may have a column that would be silently left aside for a constant."""
        if isinstance(rows, int):
            return rows
        # Imported when something runs, as what runs it is.
        from weft.workflow.frontend.rows import Rows

        parameters = inspect.signature(self._function).parameters.values()
        return Rows(rows, constants=[each.name for each in parameters if each.default is not each.empty])

    def __repr__(self) -> str:
        return f"<flow {self.name}>"


def _check_function(function: Any) -> None:
    if not callable(function):
        raise FlowError(f"a flow is made of a function, not {function!r:.60}")
    if inspect.iscoroutinefunction(function):
        raise FlowError(f"{line_of(function)}: an async function is no flow: write def, for operators wait for nothing")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise FlowError(f"{line_of(function)}: a function with yield is no flow: return all outputs at once")
    of_class = getattr(function, "__qualname__", "").rpartition(".")[0]
    first = next(iter(inspect.signature(function).parameters), "")
    if of_class and not of_class.endswith("<locals>") and first in ("self", "cls"):
        raise FlowError(
            f"{line_of(function)}: a method is no flow: {first!r} would be a column. Define the flow outside the class"
        )


def flow(function: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Make a flow of a function, as a decorator with or without arguments. Parameters without a default are columns of
    the rows; one with a default is a constant, and rows with a column of its name are refused. The function is called
    once, when the graph is first asked for: a global that changes later is not seen. Raises `FlowError` for anything
    but a plain function."""
    if function is None:
        return functools.partial(flow, name=name)
    return Flow(function, name)
