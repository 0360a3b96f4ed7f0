"""What of a graph cannot be evaluated in this process: said of all nodes before a run begins, and at the node where the
graph grows while it runs."""

from __future__ import annotations

from collections.abc import Container

from weft.workflow.graph.builtin_functions import is_client_function
from weft.workflow.graph.labels import labelled_nodes
from weft.workflow.graph.mistakes import InvalidGraph, Mistake
from weft.workflow.graph.nodes import ExternalNode, FunctionNode, GraphNode, ProgramNode, WorkflowGraph

_THERE = "run the graph there, with on=weft.client.Client(url), or a session with the address of one"


def check_runs_here(graph: WorkflowGraph, functions: Container[str], *, has_external: bool) -> None:
    """Raise `InvalidGraph` with every node that cannot be evaluated in this process, with these functions;
    `has_external`: whether something gives values from outside."""
    mistakes = [
        Mistake(label, reason)
        for label, node in labelled_nodes(graph.nodes)
        if (reason := refusal(node, functions, has_external=has_external))
    ]
    if mistakes:
        raise InvalidGraph(mistakes)


def refusal(node: GraphNode, functions: Container[str] = (), *, has_external: bool = False) -> str:
    """Why a node cannot be evaluated in this process; empty where it can."""
    match node:
        case FunctionNode(source=str()):
            return f"functions with source run on servers of Weft only: {_THERE}"
        case ProgramNode(program=program):
            return f"the program {program!r} runs on servers of Weft only: {_THERE}"
        case ExternalNode(id=id) if not has_external:
            return f"nothing can set {id!r} here: pass external=, or run it on a server"
    if is_client_function(node) and node.name not in functions:
        return no_function(node.name or "")
    return ""


def no_function(name: str) -> str:
    """Why a function cannot be called: it is not there."""
    return f"there is no function {name!r} here: pass functions={{{name!r}: ...}}"
