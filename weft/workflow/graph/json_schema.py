"""The JSON Schema of graphs, made of the structs that the reader converts to and of those of completions.

The reader refuses what the schema refuses, and more: references to nothing, cycles, types of values, sizes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weft.endpoints.fields import ADVISORY, REFUSED, advisory_schema
from weft.workflow.graph.node_checks import CALL_FIELDS, NOT_IN_WORKFLOWS, REQUESTS
from weft.workflow.graph.nodes import NODES, Body, GraphNode, LlmNode, PromptMessage, WorkflowGraph

Json = dict[str, Any]
NODE = "WorkflowNode"
"""Name of the schema of a node of any kind."""


def graph_schema() -> Json:
    """The schema as a document of its own, in draft 2020-12."""
    defs = graph_components("#/$defs/{name}")
    del defs[NODE]["discriminator"]  # a word of OpenAPI
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return dialect | defs.pop(WorkflowGraph.__name__) | {"$defs": defs}


def graph_components(ref_template: str) -> dict[str, Json]:
    """The schema of a graph and those that it refers to, by name. References are `ref_template` with a name."""
    _, found = msgspec.json.schema_components([WorkflowGraph], ref_template=ref_template)
    _, requests = msgspec.json.schema_components(REQUESTS, ref_template=ref_template)
    for outer in (WorkflowGraph, Body):
        nodes = found[outer.__name__]["properties"]["nodes"]
        found[NODE], nodes["items"] = nodes["items"], {"$ref": ref_template.format(name=NODE)}
    call = found[LlmNode.__name__]["properties"]
    del call["request"]
    call |= {name: _call_field(name, requests) for name in sorted(CALL_FIELDS - set(call))}
    for node in NODES.values():
        schema = found[node.__name__]
        schema["properties"] = {
            name: field if name in schema["required"] else _or_null(field)
            for name, field in schema["properties"].items()
        }
    choices: tuple[type[PromptMessage | GraphNode], ...] = (PromptMessage, *NODES.values())
    for kind in choices:
        if kind.ONE_OF:
            found[kind.__name__]["oneOf"] = [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in kind.ONE_OF
            ]
    graph = found[WorkflowGraph.__name__]
    graph["required"] = ["version", *graph["required"]]
    del graph["properties"]["version"]["default"]
    for schema in found.values():
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())
    # Lists for the tuples of defaults, and copies of what the tables hold.
    return msgspec.json.decode(msgspec.json.encode(found), type=dict[str, Json])


def _call_field(name: str, requests: dict[str, Json]) -> Json:
    """The schema of a field of a completion in a call of a model."""
    if name in NOT_IN_WORKFLOWS:
        return {"const": None, "description": f"Not in workflows: {NOT_IN_WORKFLOWS[name]}."}
    kinds = (requests[kind.__name__]["properties"] for kind in REQUESTS)
    found = [fields[name] for fields in kinds if name in fields]
    if found:
        return found[0] if found[0] == found[-1] else {"anyOf": found}
    if name in ADVISORY:
        return advisory_schema(ADVISORY[name])
    return next(REFUSED[kind][name].schema for kind in REQUESTS if name in REFUSED[kind])


def _or_null(field: Json) -> Json:
    """The schema of a field that may be null, which means that it is absent."""
    if not {"type", "enum", "anyOf"} & set(field) or {"type": "null"} in field.get("anyOf", ()):
        return field
    if "enum" in field:
        return field | {"enum": [*field["enum"], *[None] * (None not in field["enum"])]}
    return {"anyOf": [{key: value for key, value in field.items() if key != "default"}, {"type": "null"}]} | {
        key: value for key, value in field.items() if key == "default"
    }
