"""Each mistake is found, at its place, and each is reported once."""

from __future__ import annotations

import difflib
from typing import Any

import pytest

from tests.workflow.shapes import Json, body, function, graph, llm, loop, mapped, pick, switch, text
from weft.workflow.graph import InvalidGraph, graph_from_dict, graph_from_json
from weft.workflow.graph.check import MAX_DEPTH, MAX_REFERENCES, MAX_TEMPLATE_CHARS, MAX_TEMPLATE_VALUES
from weft.workflow.graph.mistakes import MAX_COMPARED, MAX_COMPARISONS
from weft.workflow.graph.nodes import MAX_NODES


def mistakes(raw: Any) -> list[str]:
    with pytest.raises(InvalidGraph) as caught:
        graph_from_dict(raw)
    return [str(mistake) for mistake in caught.value.mistakes]


LIST = {"id": "items", "op": "list", "of": ["a", "{{q}}"]}
WINNER = {"type": "object", "properties": {"winner": {"type": "string"}}}
VERDICT = llm("verdict", schema=WINNER)
CHAT = {"chat": "a"}
USER = {"role": "user", "content": ""}


def chat(*messages: Json) -> Json:
    return {"id": "b", "op": "llm", "messages": list(messages)}


WITHOUT_ID = graph({"op": "text", "template": ""}, outputs={"o": "q"})
MISSPELT = graph({**text("a"), "tempalte": ""})
NO_ROLE = graph({"id": "b", "op": "llm", "messages": [{"role": "user"}]})
OTHER_ROLE = chat({"role": "person", "content": ""})
TWO_OUTPUTS = graph(switch("a", "q", x=body(v="q"), y=body(w="q")), outputs={"o": "q"})


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ([], "a workflow must be a JSON object"),
        ({"version": 2}, "version: must be 1, not 2"),
        ({"version": True}, "version: must be 1, not True"),
        (graph(), "outputs: a workflow must have an output"),
        (graph(text("a"), extra=1), "extra: there is no such field"),
        (graph(text("a"), inputs=["q", "q"]), "inputs: 'q' is given 2 times"),
        (graph(text("a"), inputs=["1"]), "inputs: '1' is not a name"),
        (graph(text("a"), inputs=["a"]), "inputs: 'a' is also the id of a node"),
        (graph(text("a"), inputs=[3]), "inputs[0]: Expected 'str'"),
        (graph(text("a"), text("a")), "nodes: 'a' is given 2 times"),
        (graph(text("a b"), outputs={"o": "q"}), "a b: an id must be"),
        (WITHOUT_ID, "nodes[0].id: is required"),
        (graph(3, outputs={"o": "q"}), "nodes[0]: a node must be an object"),
        (graph({"id": "a", "op": "lmm"}), "a.op: there is no operator 'lmm'. Did you mean llm?"),
        (graph({"id": "a"}), "a.op: there is no operator 'None'"),
        (MISSPELT, "a.tempalte: text has no such field. Did you mean template?"),
        (graph({**text("a"), "tempalte": None}), "a.tempalte: text has no such field."),
        (graph(llm("a", temprature=None)), "a.temprature: llm has no such field. Did you mean temperature"),
        (graph(chat({**USER, "tool_calls": []})), "b.messages[0]: Object contains unknown field 'tool_calls'"),
        (graph(llm("a", temperature=11)), "a.temperature: must be in [0, 10], got 11"),
        (graph(llm("a", truncate_prompt_tokens=0)), "a.truncate_prompt_tokens: must be 1 or more, or -1"),
        (graph(text("a", "{{b}}"), text("b", "{{c}}"), text("c", "{{a}}")), "a: a cycle: a needs b needs c needs a"),
        (graph(text("a", "{{qq}}")), "a.template: there is no value 'qq'. Did you mean q? Braces that are text are"),
        (graph(text("a", "{{ x }}")), "'x'. Braces that are text are written \\{{x}}, or with weft.workflow.escape("),
        (graph(text("a"), outputs={"o": "b"}), "outputs.o: there is no value 'b'"),
        (graph(text("a"), outputs={"o": "{{a}}"}), "outputs.o: '{{a}}' is not the name of a value"),
        (graph(pick("a", "{{q}}", strip=True)), "a.of: '{{q}}' is not the name of a value"),
        (graph(mapped("a", "{{q}}", body(text("b"), value="b"))), "a.over: '{{q}}' is not the name of a value"),
        (graph(switch("a", "{{q}}", x=body(text("b"), o="b"))), "a.on: '{{q}}' is not the name of a value"),
        (graph(loop("a", {"x": "{{q}}"}, body(text("b"), x="b"))), "a.init.x: '{{q}}' is not the name of a value"),
        (graph(loop("a", {"x": "q"}, body(x="q"), until="{{q}}")), "a.until: '{{q}}' is not the name of a value"),
        (graph(mapped("a", "q", body(v="{{q}}"))), "a.body.outputs.v: '{{q}}' is not the name of a value"),
        (graph(llm("a"), chat({"chat": "{{a}}"}, USER)), "b.messages[0].chat: '{{a}}' is not the name of a value"),
        (graph(text("a"), outputs={"o p": "a"}), "outputs.o p: 'o p' is not a name"),
        (graph({"id": "a", "op": "llm"}), "a: give either messages or prompt"),
        (graph(llm("a", prompt="x")), "a: give either messages or prompt"),
        (graph(llm("a", max_tokens=0)), "a.max_tokens: Expected int >= 1"),
        (graph(llm("a", objective="fast")), "a.objective: Invalid enum value 'fast'; there are latency, ttft, "),
        (graph(llm("a", temprature=0)), "a.temprature: Unknown field 'temprature'. Did you mean temperature"),
        (graph(llm("a", n=2)), "a.n: is not supported in workflows; make several calls"),
        (graph(llm("a", stream=True)), "a.stream: is not supported in workflows"),
        (
            graph(llm("a", schema={}, response_format={"type": "text"})),
            "a.response_format: cannot be combined with schema",
        ),
        (NO_ROLE, "b.messages[0]: a message must have a role"),
        (
            graph(OTHER_ROLE),
            "b.messages[0].role: Invalid enum value 'person'; there are system, ",
        ),
        (graph(llm("a"), chat(CHAT)), "b.messages: there is no message"),
        (graph(llm("a"), chat(USER, CHAT)), "b.messages[1]: 'chat' is only allowed in the first"),
        (graph(llm("a"), chat({**CHAT, "role": "user"}, USER)), "b.messages[0]: a message with 'chat' has no other"),
        (graph({"id": "a", "op": "llm", "prompt": "x"}, chat(CHAT, USER)), "b.messages[0].chat: a is not the answer"),
        (graph(text("a"), chat(CHAT, USER)), "b.messages[0].chat: a is not the answer of a model"),
        (graph(LIST, text("a", "All: {{items}}")), "a.template: items is a list and cannot be part of a text"),
        (graph(VERDICT, text("a", "{{verdict.winer}}")), "a.template: verdict.winer: there is no field 'winer'"),
        (graph(text("b"), text("a", "{{b.c}}")), "a.template: b.c: a text has no field 'c'"),
        (graph(pick("a", "q")), "a: give one of field, regex"),
        (graph(pick("a", "q", strip=True, split=",")), "given: strip and split"),
        (graph(pick("a", "q", strip=False)), "a.strip: must be true"),
        (graph(pick("a", "q", strip=True, max_items=3)), "a.max_items: is a bound of the list of a slice"),
        (graph(pick("a", "q", regex="(")), "a.regex: missing ): ("),
        (graph(pick("a", "q", regex="a" * 1001)), "1,000 characters at most"),
        (graph(LIST, pick("a", "items", strip=True)), "a.strip: takes a text, and items is a list"),
        (graph(LIST, pick("a", "items", field="x")), "items is a list, whose items are numbered"),
        (graph(VERDICT, pick("a", "verdict", field="x")), "verdict has no field 'x'"),
        (graph(function("a", "join", of="{{q}} {{q}}")), "join takes a list here"),
        (graph(function("a", "join")), "a.args: join needs 'of'"),
        (graph(function("a", "split", text="", max_tokens=3, x=1)), "has no argument 'x'"),
        (graph({"id": "a", "op": "function"}), "a: give either name or source"),
        (graph({"id": "a", "op": "external", "timeout_s": 0}), "a.timeout_s: Expected 'float' > 0.0"),
        (graph(text("b"), mapped("a", "b", body(v="i"))), "a.over: must be a list, and b is"),
        (graph(LIST, mapped("a", "items", body()), outputs={"o": "q"}), "a.body.outputs: a body must have an output"),
        (
            graph(LIST, mapped("a", "items", body(text("x", "{{j}}"), v="x"))),
            "a.body.x.template: there is no value 'j'",
        ),
        (graph(mapped("a", "q", [])), "a.body: must be an object with nodes, a list"),
        (
            graph(loop("a", {"d": "q"}, body(e="d"))),
            "a.body.outputs: a loop's body must have the outputs that init has: d",
        ),
        (graph(loop("a", {"d": "q"}, body(text("x"), d="x"), until="x")), "a.until: must be true or false"),
        (graph(loop("a", {"d": "q"}, body(d="d"), until="x")), "a.until: there is no value 'x'"),
        (graph(loop("a", {}, body()), outputs={"o": "q"}), "a.init: a loop must have at least one value"),
        (graph(switch("a", "q"), outputs={"o": "q"}), "a.cases: a switch must have a case"),
        (graph(LIST, switch("a", "items", x=body(v="q"))), "a.on: must be a text"),
        (graph(pick("b", "q", matches="x"), switch("a", "b", yes=body(v="q"))), "a.cases[yes]: b is true or false"),
        (TWO_OUTPUTS, "a: all cases must have the same outputs"),
    ],
)
def test_a_mistake_is_found_at_its_place(raw: Any, expected: str) -> None:
    found = [mistake.replace("`", "'") for mistake in mistakes(raw)]
    assert len(found) == 1
    assert expected in found[0]


def test_all_mistakes_are_in_one_error() -> None:
    raw = graph(llm("a", max_tokens=-1, seed="x"), text("b", "{{zz}} {{yy}}"), pick("c", "q"))
    assert [mistake.partition(":")[0] for mistake in mistakes(raw)] == [
        "a.max_tokens",
        "a.seed",
        "b.template",
        "b.template",
        "c",
    ]


def test_what_depends_on_a_mistake_is_not_one() -> None:
    raw = graph(
        {"id": "a", "op": "tekst"}, text("b", "{{a.x}} {{a}}"), {"id": "c", "op": "pick", "of": "b", "strip": True}
    )
    assert len(mistakes(raw)) == 1


def test_two_cycles_are_two_mistakes() -> None:
    raw = graph(text("a", "{{a}}"), text("b", "{{c}}"), text("c", "{{b}}"), text("d", "{{b}}"))
    assert [mistake.split(": ", 2)[2] for mistake in mistakes(raw)] == ["a needs a", "b needs c needs b"]


def test_a_loop_keeps_a_conversation_only_if_every_round_returns_an_answer() -> None:
    more = {"id": "more", "op": "llm", "messages": [{"chat": "draft"}, USER]}
    kept = graph(llm("first"), loop("a", {"draft": "first"}, body(more, draft="more")))
    lost = graph(llm("first"), loop("a", {"draft": "first"}, body(more, text("plain", "{{more}}"), draft="plain")))
    assert graph_from_dict(kept)
    assert [mistake.partition(": ")[0] for mistake in mistakes(lost)] == ["a.body.more.messages[0].chat"]


def test_graphs_are_bounded() -> None:
    many = graph(*[text(f"t{number}") for number in range(MAX_NODES + 1)])
    assert "10,000" in mistakes(many)[0]
    inner: Json = body(text("x"), v="x")
    for number in range(MAX_DEPTH + 1):
        inner = {
            "nodes": [{"id": f"s{number}", "op": "switch", "on": "q", "cases": {"a": inner}}],
            "outputs": {"v": f"s{number}"},
        }
    deep = {"version": 1, "inputs": ["q"], **inner}
    assert any("nested 8 deep" in mistake for mistake in mistakes(deep))
    with pytest.raises(InvalidGraph, match="not JSON"):
        graph_from_json(b"[" * 100_000)
    chain = [text("t0"), *[text(f"t{number}", f"{{{{t{number - 1}}}}}") for number in range(1, MAX_NODES)]]
    assert len(graph_from_dict(graph(*chain)).nodes) == MAX_NODES


@pytest.mark.parametrize(
    ("node", "what"),
    [
        (text("t", "x" * (MAX_TEMPLATE_CHARS + 1)), "characters of templates"),
        (text("t", "{{q}}" * (MAX_REFERENCES + 1)), "references"),
        ({"id": "t", "op": "list", "of": [[1] * (MAX_TEMPLATE_VALUES + 1)]}, "values"),
    ],
)
def test_templates_of_a_node_are_bounded(node: Json, what: str) -> None:
    with pytest.raises(InvalidGraph, match=what):
        graph_from_dict(graph(mapped("m", "q", body(node, t="t"))))
    assert graph_from_dict(graph({"id": "d", "op": "data", "value": ["x" * MAX_TEMPLATE_CHARS] * 2}))


def test_hints_at_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comparison of two names takes microseconds, and every mistake could compare thousands."""
    compared: list[int] = []

    def close_matches(name: str, names: list[str], n: int) -> list[str]:
        compared.append(len(names))
        return []

    monkeypatch.setattr(difflib, "get_close_matches", close_matches)
    names = [text(f"t{number}", f"{{{{missing_{number}}}}}") for number in range(2000)]
    assert len(mistakes(graph(*names))) == 2000
    assert MAX_COMPARISONS <= sum(compared) <= MAX_COMPARISONS + MAX_COMPARED
    assert max(compared) == MAX_COMPARED
    compared.clear()
    mistakes(graph(text("a", "{{b}}")))
    assert compared, "the bound is of one check"


def test_loops_in_loops_have_so_many_nodes() -> None:
    inside, outputs = [text(f"t{number}", "{{v8}}") for number in range(400)], {"v8": "t0"}
    for level in range(8, 0, -1):
        inside = [loop(f"l{level}", {f"v{level}": f"v{level - 1}" if level > 1 else "q"}, body(*inside, **outputs))]
        outputs = {f"v{level - 1}": f"l{level}.v{level}"}
    [mistake] = mistakes(graph(*inside, outputs={"out": "l1.v1"}))
    assert mistake.startswith("nodes: there are 102,655 nodes, counted twice for each loop around them")


def test_of_many_cycles_the_first_are_told() -> None:
    pairs = [(f"a{number}", f"b{number}") for number in range(200)]
    nodes = [text(one, f"{{{{{other}}}}}") for pair in pairs for one, other in (pair, pair[::-1])]
    found = mistakes(graph(*nodes))
    assert len(found) == 50
    assert all("a cycle: " in mistake for mistake in found)
    ring = [text(f"r{number}", f"{{{{r{(number + 1) % 1000}}}}}") for number in range(1000)]
    [long] = mistakes(graph(*ring))
    assert long.endswith(" needs …")
