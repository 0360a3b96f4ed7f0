"""Random graphs that pass every check, for properties that hold for all graphs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

INPUTS = ("question", "document")
_SLICES = st.sampled_from([[0, 1], [1, None], [None, -1], [-2, 9]])

_EMPTY = st.sampled_from(["", [], [""], [[]], {}, {"x": ""}, {"x": []}])


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 8) -> dict[str, Any]:
    """A graph as JSON, its nodes in an order in which each one follows what it needs."""
    nodes: list[dict[str, Any]] = []
    texts, lists, answers = list(INPUTS), [], []
    for number in range(draw(st.integers(1, max_nodes))):
        _add(draw, nodes, f"n{number}", texts, lists, answers, depth=0)
    names = [node["id"] for node in nodes]
    wanted = draw(st.lists(st.sampled_from(names), min_size=1, max_size=6, unique=True))
    return {"version": 1, "inputs": list(INPUTS), "nodes": nodes, "outputs": {f"out_{name}": name for name in wanted}}


def _add(
    draw: st.DrawFn,
    nodes: list[dict[str, Any]],
    name: str,
    texts: list[str],
    lists: list[str],
    answers: list[str],
    depth: int,
) -> None:
    """Append one node and note what its value is. A body of one output gives its value under `.value`."""
    kinds = ["text", "data", "llm", "llm", "pick", "list", "function", "program"]
    kinds += ["copy", "copy"] if nodes else []
    kinds += (["map"] if lists else []) + ["switch", "loop"] if depth < 2 else []
    op = draw(st.sampled_from(kinds))
    some = draw(st.lists(st.sampled_from(texts), min_size=1, max_size=3))
    template = draw(st.sampled_from(["", "Say: ", "\\{{no}} {"])) + " and ".join(f"{{{{{text}}}}}" for text in some)
    kind = texts
    if op == "copy":
        _copy(draw(st.sampled_from(nodes)), nodes, name, texts, lists, answers)
        return
    if op == "text":
        fields: dict[str, Any] = {"template": template}
    elif op == "data":
        value = draw(st.sampled_from(["{{braces}}", "x", "1. 2.", "", "{", ["x", "{{y}}"]]))
        fields, kind = {"value": value}, lists if isinstance(value, list) else texts
    elif op == "llm":
        messages: list[dict[str, Any]] = [{"role": "user", "content": template}]
        if answers and draw(st.booleans()):
            messages.insert(0, {"chat": draw(st.sampled_from(answers))})
        fields = {"messages": messages, "max_tokens": draw(st.integers(1, 4))}
        fields |= draw(st.sampled_from([{}, {"temperature": 0}, {"temperature": 0}, {"seed": 1}, {"cache": False}]))
        answers.append(name)
    elif op == "pick":
        way = draw(st.sampled_from([{"strip": True}, {"slice": draw(_SLICES)}, {"split": "."}, {"regex": ".*"}]))
        fields = {"of": some[0], **way}
        if lists and "slice" in way:
            fields["of"] = draw(st.sampled_from(lists))
        kind = lists if fields["of"] in lists or "split" in way else texts
    elif op == "list":
        fields, kind = {"of": [f"{{{{{text}}}}}" for text in some]}, lists
    elif op == "function":
        if lists and draw(st.booleans()):
            fields = {"name": "join", "args": {"of": f"{{{{{draw(st.sampled_from(lists))}}}}}", "separator": "; "}}
        else:
            fields = {
                "name": "measure",
                "args": {"first": template, "then": [1, template], "last": draw(_EMPTY)},
                "pure": draw(st.booleans()),
            }
    elif op == "program":
        fields = {"program": "agent", "args": {"task": [template]}}
    else:
        fields = _control(draw, op, name, texts, lists, answers, depth)
        nodes.append({"id": name, "op": op, **fields})
        if op == "map" and draw(st.booleans()):  # only a slice of it is used
            nodes.append({"id": f"{name}_part", "op": "pick", "of": f"{name}.value", "slice": draw(_SLICES)})
            lists.append(f"{name}_part")
        else:
            (lists if op == "map" else texts).append(f"{name}.value")
        return
    nodes.append({"id": name, "op": op, **fields})
    kind.append(name)


def _control(
    draw: st.DrawFn, op: str, name: str, texts: list[str], lists: list[str], answers: list[str], depth: int
) -> dict[str, Any]:
    def body(bound: list[str], prefix: str) -> dict[str, Any]:
        inside: list[dict[str, Any]] = []
        inner_texts, inner_lists, inner_answers = texts + bound, list(lists), list(answers)
        before = len(inner_texts)
        for number in range(draw(st.integers(1, 2))):
            _add(draw, inside, f"{prefix}_{number}", inner_texts, inner_lists, inner_answers, depth + 1)
        made = inner_texts[before:] or [*bound, *texts]
        return {"nodes": inside, "outputs": {"value": draw(st.sampled_from(made))}}

    if op == "map":
        return {
            "over": draw(st.sampled_from(lists)),
            "item": f"{name}_item",
            "body": body([f"{name}_item"], f"{name}b"),
        }
    if op == "switch":
        cases = {"x": body([], f"{name}x"), "y": body([], f"{name}y")}
        return {"on": draw(st.sampled_from(texts)), "cases": cases, "default": body([], f"{name}d")}
    inside = body(["value"], f"{name}l")
    ending: dict[str, Any] = {}
    if draw(st.booleans()):
        of = draw(st.sampled_from([inside["outputs"]["value"], *texts]))
        inside["nodes"].append({"id": f"{name}_end", "op": "pick", "of": of, "matches": "x"})
        ending = {"until": f"{name}_end", "at_limit": draw(st.sampled_from(["fail", "stop"]))}
    init, rounds = {"value": draw(st.sampled_from(texts))}, draw(st.integers(1, 2))
    return {"init": init, "body": inside, "max_rounds": rounds, **ending}


def _copy(
    node: dict[str, Any],
    nodes: list[dict[str, Any]],
    name: str,
    texts: list[str],
    lists: list[str],
    answers: list[str],
) -> None:
    """Append a node that computes what another one does."""
    nodes.append({**node, "id": name})
    for names in (texts, lists, answers):
        for known in (node["id"], f"{node['id']}.value"):
            if known in names:
                names.append(known.replace(node["id"], name, 1))
