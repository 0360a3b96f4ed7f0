"""Flows: a function whose parameters are the columns of a row, traced once into a graph."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from weft.workflow.frontend.trace import FlowError, FlowTrace, is_tracing, tracing
from weft.workflow.frontend.workflow import Workflow
from weft.workflow.graph.check import check
from weft.workflow.graph.digest import canonical
from weft.workflow.graph.mistakes import InvalidGraph
from weft.workflow.graph.nodes import WorkflowGraph


class Flow(Workflow):
    """A workflow that a Python function describes. Within the function of another flow it can be called like one."""

    def __init__(self, function: Callable[..., Any], name: str | None = None):
        self._function = function
        self.name = name or function.__name__
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
        with tracing(trace):
            body = trace.body(trace.outputs(self._function(**given)))
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

    def __repr__(self) -> str:
        return f"<flow {self.name}>"


def flow(function: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Make a flow of a function, as a decorator with or without arguments. Parameters without a default are columns of
    the rows; one with a default is a constant."""
    if function is None:
        return functools.partial(flow, name=name)
    return Flow(function, name)
