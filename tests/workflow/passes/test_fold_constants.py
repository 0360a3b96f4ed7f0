from __future__ import annotations

from typing import Any

import pytest

from tests.workflow.passes.fixtures import leaves, rewrites
from tests.workflow.shapes import Json, body, function, graph, llm, loop, mapped, pick, switch, text
from weft.workflow.graph import graph_from_dict, graph_to_dict
from weft.workflow.passes import fold_constants, optimise
from weft.workflow.passes.fold_constants import MAX_CONSTANT_CHARS, MAX_TEXT_CHARS


def data(node_id: str, value: Any) -> Json:
    return {"id": node_id, "op": "data", "value": value}


def listed(node_id: str, *of: Any) -> Json:
    return {"id": node_id, "op": "list", "of": list(of)}


D = data("d", "Be short.")
ENDED = {"out": "n"}


@pytest.mark.parametrize(
    ("node", "constants", "value"),
    [
        (text("n", "Hi. {{d}}"), [D], "Hi. Be short."),
        (text("n", "{{d.x}}{{d}}"), [data("d", {"x": 1})], '1{"x":1}'),
        (text("n", "\\{{d}}"), [], "{{d}}"),
        (listed("n", "{{d}}", ["{{d}}!"], 3), [D], ["Be short.", ["Be short.!"], 3]),
        (listed("n", "{{d.x}}"), [data("d", {"x": [1, "{{q}}"]})], [[1, "{{q}}"]]),
        (pick("n", "d", split=" "), [D], ["Be", "short."]),
        (pick("n", "d.x", field="1"), [data("d", {"x": "[1, 2]"})], 2),
        (pick("n", "d", matches="short"), [D], True),
        (function("n", "join", of="{{d}}", separator="{{e}}"), [data("d", ["a", 1]), data("e", "+")], "a+1"),
        (function("n", "join", of=["a", "{{d}}"]), [D], "a\n\nBe short."),
    ],
)
def test_what_is_made_of_constants_is_one(node: Json, constants: list[Json], value: Any) -> None:
    before, after = graph(*constants, node), graph(*constants, data("n", value), outputs=ENDED)
    rewrites(fold_constants, before, after, removed=["n"])


def test_constants_of_constants() -> None:
    before = graph(D, pick("w", "d", split=" "), pick("n", "w", field="0"), text("t", "{{n}} {{q}}"))
    after = graph(D, data("w", ["Be", "short."]), data("n", "Be"), text("t", "Be {{q}}"))
    rewrites(fold_constants, before, after, removed=["w", "n"])


TEMPLATES: list[tuple[Any, str, str]] = [
    ("Be short.", "{{d}} {{q}}", "Be short. {{q}}"),
    ("{{q}}", "{{d}} {{q}}", "\\{{q}} {{q}}"),
    ("\\{{q}}", "{{d}}{{q}}", "\\\\\\{{q}}{{q}}"),
    ("\\", "{{d}}{{q}}", "\\\\{{q}}"),
    ("{", "{{d}}{q}} {{q}}", "\\{{q}} {{q}}"),
    ("}", "{{q}} \\{{q}{{d}}", "{{q}} \\\\\\{{q}}"),
    (3.5, "{{d}} {{q}}", "3.5 {{q}}"),
    (None, "{{d}} {{q}}", "null {{q}}"),
    ({"x": True}, "{{d.x}} {{d}} {{q}}", 'true {"x":true} {{q}}'),
    ("", "{{d}}{{q}}", "{{q}}"),
]


@pytest.mark.parametrize(("value", "template", "filled"), TEMPLATES)
def test_constants_become_part_of_templates(value: Any, template: str, filled: str) -> None:
    before = graph(data("d", value), llm("a", template), text("n", template), outputs={"a": "a", **ENDED})
    after = graph(data("d", value), llm("a", filled), text("n", filled), outputs={"a": "a", **ENDED})
    rewrites(fold_constants, before, after)


@pytest.mark.parametrize(
    ("value", "given", "folded"),
    [
        ("x", "{{d}}", "x"),
        ("{{q}}", ["{{d}}"], ["\\{{q}}"]),
        ("x", "{{d}} {{q}}", "x {{q}}"),
        (3, "{{d}}", "{{d}}"),
        ([1, 2], {"k": "{{d}}"}, {"k": "{{d}}"}),
        ("", "{{d}}{{q}}", "{{d}}{{q}}"),
        ("x", "{{q}}", "{{q}}"),
    ],
)
def test_constants_in_arguments(value: Any, given: Any, folded: Any) -> None:
    """A string that is one reference passes a value on as it is, so no other string may become one."""
    nodes = [
        {"id": name, "op": "program", "program": "f", "args": args} for name, args in (("n", given), ("m", folded))
    ]
    before, after = graph(data("d", value), nodes[0]), graph(data("d", value), {**nodes[1], "id": "n"})
    rewrites(fold_constants, before, after)


def test_a_prompt_has_constants_too() -> None:
    call = {"id": "n", "op": "llm", "prompt": "{{d}} {{q}}"}
    rewrites(fold_constants, graph(D, call), graph(D, {**call, "prompt": "Be short. {{q}}"}))


def test_in_bodies() -> None:
    before = body(data("e", "e"), text("f", "{{d}}{{e}}"), llm("a", "{{f}} {{i}}"), v="a")
    after = body(data("e", "e"), data("f", "Be short.e"), llm("a", "Be short.e {{i}}"), v="a")
    parts = pick("parts", "q", split=", ")
    rewrites(
        fold_constants,
        graph(D, parts, mapped("m", "parts", before)),
        graph(D, parts, mapped("m", "parts", after)),
        removed=["f"],
    )


def test_a_switch_on_a_constant_is_its_case() -> None:
    cases = {"7": body(llm("a"), text("t", "{{a}} {{d}}"), v="t"), "8": body(llm("b"), v="b")}
    before = graph(data("d", 7), switch("s", "d", **cases), llm("n", "{{s}}!"))
    rewrites(
        fold_constants,
        before,
        graph(data("d", 7), llm("a"), text("t", "{{a}} 7"), llm("n", "{{t}}!")),
        removed=["s", "b"],
    )


@pytest.mark.parametrize(("value", "taken"), [(True, "a"), (False, "d")])
def test_a_switch_on_true_or_false(value: bool, taken: str) -> None:
    choice = {**switch("s", "c", true=body(llm("a"), v="a")), "default": body(llm("d"), v="d")}
    before, after = graph(data("c", value), choice), graph(data("c", value), llm(taken), outputs={"out": taken})
    rewrites(fold_constants, before, after, removed=["s", "d" if value else "a"])


def test_what_a_case_returns_may_be_around_it() -> None:
    inner = switch("s", "c", x=body(v="q", w="d.k"))
    constants = data("c", "x"), data("d", {"k": {"l": "m"}})
    uses = graph(*constants, inner, pick("p", "s.v", strip=True), outputs={"p": "p", "w": "s.w", "l": "s.w.l"})
    after = graph(*constants, pick("p", "q", strip=True), outputs={"p": "p", "w": "d.k", "l": "d.k.l"})
    rewrites(fold_constants, uses, after, removed=["s"])


def test_a_switch_in_a_switch_in_a_loop() -> None:
    inner = switch("u", "c", x=body(text("t", "{{s}}!"), pick("ok", "t", matches="!!!"), v="t", end="ok"))
    outer = switch("w", "c", x=body(inner, v="u.v", end="u.end"))
    before = graph(data("c", "x"), loop("l", {"s": "q"}, body(outer, s="w.v"), until="w.end"))
    inside = body(text("t", "{{s}}!"), pick("ok", "t", matches="!!!"), s="t")
    after = graph(data("c", "x"), loop("l", {"s": "q"}, inside, until="ok"))
    rewrites(fold_constants, before, after, removed=["w", "u"])


def choice(node: Json) -> Json:
    """A node that most rows do not meet."""
    return switch("s", "q", x=body(node, v=node["id"])) | {"default": body(v="q")}


@pytest.mark.parametrize(
    "raw",
    [
        graph(D, choice(pick("n", "d", regex="none"))),
        graph(D, choice(switch("n", "d", y=body(v="q")))),
        graph(function("n", "split", text="a b", max_tokens=1)),
        graph(D, {**function("n", "f"), "pure": True}),
        graph(D, {"id": "n", "op": "program", "program": "f"}),
        graph(data("d", ["a", "b"]), mapped("n", "d", body(llm("a", "{{i}}"), v="a"))),
        graph(data("d", "x" * (MAX_TEXT_CHARS + 1)), text("n", "{{d}} {{q}}")),
    ],
)
def test_what_is_not_folded(raw: Json) -> None:
    """What fails has to fail for its row, what costs is not computed here, and a map stays a map."""
    leaves(fold_constants, raw)


def test_constants_are_computed_within_a_bound() -> None:
    texts = [text(f"t{n}", f"{n}{{{{d}}}}") for n in range(9)]
    raw = graph(data("d", "x" * (MAX_CONSTANT_CHARS // 4)), *texts, outputs={f"t{n}": f"t{n}" for n in range(9)})
    kinds = [node["op"] for node in graph_to_dict(optimise(graph_from_dict(raw)).graph)["nodes"]]
    assert (kinds.count("data"), kinds.count("text")) == (3, 7)
