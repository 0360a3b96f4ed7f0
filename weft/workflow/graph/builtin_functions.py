"""Functions that every workflow has."""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

from weft.workflow.graph.labels import labelled_nodes
from weft.workflow.graph.nodes import FunctionNode, GraphNode, WorkflowGraph
from weft.workflow.graph.value_types import TEXT, ValueType


class BuiltinFunction(NamedTuple):
    """A built-in function's parameters and result."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes: dict[str, str]
    """Parameter -> the kind of value it takes, for those that are references."""
    returns: ValueType


JOIN_SEPARATOR = "\n\n"
BUILTIN_FUNCTIONS = {
    "join": BuiltinFunction(("of",), ("separator",), {"of": "list"}, TEXT),
    "split": BuiltinFunction(
        ("text", "max_tokens"), ("overlap_tokens",), {"text": "text"}, ValueType("list", items=TEXT)
    ),
}
"""`join`: the texts of a list with `separator` (`JOIN_SEPARATOR`) between them. `split`: parts of a text of at most
`max_tokens` tokens of the run's first model, of which `overlap_tokens` (0) are those that end the part before."""


def is_client_function(node: GraphNode) -> TypeGuard[FunctionNode]:
    """Whether a node calls a function of the client's process: neither built in nor with its source in the graph."""
    return isinstance(node, FunctionNode) and node.source is None and node.name not in BUILTIN_FUNCTIONS


def client_functions(graph: WorkflowGraph) -> set[str]:
    """Functions of Python that a graph calls, which its client has to call."""
    return {node.name for _, node in labelled_nodes(graph.nodes) if is_client_function(node) and node.name is not None}
