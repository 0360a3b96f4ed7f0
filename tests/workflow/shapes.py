"""Short ways to write graphs as JSON."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def llm(node_id: str, content: str = "Hi", **fields: Any) -> Json:
    return {"id": node_id, "op": "llm", "messages": [{"role": "user", "content": content}], **fields}


def text(node_id: str, template: str = "x") -> Json:
    return {"id": node_id, "op": "text", "template": template}


def pick(node_id: str, of: str, **way: Any) -> Json:
    return {"id": node_id, "op": "pick", "of": of, **way}


def function(node_id: str, name: str, **args: Any) -> Json:
    return {"id": node_id, "op": "function", "name": name, "args": args}


def body(*nodes: Json, **outputs: str) -> Json:
    return {"nodes": list(nodes), "outputs": outputs}


def mapped(node_id: str, over: str, inside: Any) -> Json:
    return {"id": node_id, "op": "map", "over": over, "item": "i", "body": inside}


def loop(node_id: str, init: Json, inside: Json, **fields: Any) -> Json:
    return {"id": node_id, "op": "loop", "init": init, "body": inside, **fields}


def switch(node_id: str, on: str, **cases: Json) -> Json:
    return {"id": node_id, "op": "switch", "on": on, "cases": cases}


def graph(*nodes: Any, outputs: Json | None = None, **fields: Any) -> Json:
    """One input `q`; the last node is the output unless others are named."""
    named = [node["id"] for node in nodes if isinstance(node, dict) and "id" in node]
    last = {"out": named[-1]} if named else {}
    whole = {"version": 1, "inputs": ["q"], "nodes": list(nodes), "outputs": last if outputs is None else outputs}
    return {**whole, **fields}
