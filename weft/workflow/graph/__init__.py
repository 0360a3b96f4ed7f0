"""The graph of a workflow: nodes, their references, checks, JSON and digest. Immutable; nothing here runs anything."""

from weft.workflow.graph.check import check
from weft.workflow.graph.digest import canonical, digest, node_digests
from weft.workflow.graph.json import graph_from_dict, graph_from_json, graph_to_dict
from weft.workflow.graph.mistakes import InvalidGraph, Mistake
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
    PromptMessage,
    SwitchNode,
    TextNode,
    WorkflowGraph,
)
from weft.workflow.graph.templates import Reference, Template, escape, parse_template

__all__ = [
    "Body",
    "DataNode",
    "ExternalNode",
    "FunctionNode",
    "GraphNode",
    "InvalidGraph",
    "ListNode",
    "LlmNode",
    "LoopNode",
    "MapNode",
    "Mistake",
    "PickNode",
    "ProgramNode",
    "PromptMessage",
    "Reference",
    "SwitchNode",
    "Template",
    "TextNode",
    "WorkflowGraph",
    "canonical",
    "check",
    "digest",
    "escape",
    "graph_from_dict",
    "graph_from_json",
    "graph_to_dict",
    "node_digests",
    "parse_template",
]
