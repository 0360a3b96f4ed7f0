"""Which nodes give the same value again."""

from __future__ import annotations

from weft.workflow.graph.builtin_functions import BUILTIN_FUNCTIONS
from weft.workflow.graph.nodes import ExternalNode, FunctionNode, GraphNode, LlmNode, ProgramNode


def is_deterministic(node: GraphNode) -> bool:
    """Whether equal inputs give equal values and nothing else happens, so that one evaluation can stand for several. A
    call of a model is if it says temperature 0 or a seed; what it does not say is up to the model. Programs, values
    from outside and functions that are not declared pure are not. A node with bodies is if all in them are."""
    match node:
        case LlmNode():
            return node.request.get("temperature") == 0 or node.request.get("seed") is not None
        case FunctionNode():
            return node.pure or node.name in BUILTIN_FUNCTIONS
        case ProgramNode() | ExternalNode():
            return False
    return all(is_deterministic(inner) for body in node.bodies.values() for inner in body.nodes)
