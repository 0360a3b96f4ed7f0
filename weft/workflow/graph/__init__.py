"""The graph of a workflow: nodes, their references, checks, JSON and digest. Immutable; nothing here runs anything."""

from weft.workflow.graph.check import check
from weft.workflow.graph.digest import canonical, digest
from weft.workflow.graph.json import graph_from_dict, graph_from_json, graph_to_dict
from weft.workflow.graph.json_schema import graph_schema
from weft.workflow.graph.mistakes import InvalidGraph
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.graph.templates import Reference, Template, escape, parse_template

__all__ = [
    "InvalidGraph",
    "Reference",
    "Template",
    "WorkflowGraph",
    "canonical",
    "check",
    "digest",
    "escape",
    "graph_from_dict",
    "graph_from_json",
    "graph_schema",
    "graph_to_dict",
    "parse_template",
]
