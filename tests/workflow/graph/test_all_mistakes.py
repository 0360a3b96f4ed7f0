"""All mistakes of a graph are reported at once, and none that only follows from another."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.workflow.graph.test_check import mistakes
from tests.workflow.shapes import Json, body, function, graph, llm, loop, mapped, pick, switch, text
from weft.workflow.graph import InvalidGraph, graph_from_dict
from weft.workflow.graph.json import growth_from_list

WINNER = {"type": "object", "properties": {"winner": {"type": "string"}}}


def more(chat: str) -> Json:
    return {"id": "more", "op": "llm", "messages": [{"chat": chat}, {"role": "user", "content": "{{q}}"}]}


def whole() -> Json:
    """A graph with every operator and every field of each."""
    answer = llm("answer", "{{q}}", schema=WINNER, cache=True, retries=1, temperature=0)
    answer["messages"][0] |= {"name": "n", "tool_call_id": "t"}
    further = {"id": "further", "op": "llm", "messages": [{"chat": "answer"}, {"role": "user", "content": "x"}]}
    nodes = [
        answer,
        further,
        {"id": "plain", "op": "llm", "prompt": "{{q}}", "max_tokens": 3},
        text("t", "{{answer.winner}} {{plain}}"),
        {"id": "d", "op": "data", "value": {"a": [1]}},
        {"id": "l", "op": "list", "of": ["{{answer}}", "{{further}}"]},
        function("joined", "join", of="{{l}}", separator="{{t}}") | {"pure": False, "retries": 0},
        {"id": "made", "op": "function", "source": "async def main(args): ...", "args": {"x": "{{joined}}"}},
        {"id": "p", "op": "program", "program": "agent", "args": {"task": "{{made}}"}},
        {"id": "e", "op": "external", "schema": WINNER, "timeout_s": 1},
        *(pick("f", "e", field="winner"), pick("r", "f", regex="a"), pick("s", "r", strip=True)),
        *(pick("c", "s", split=","), pick("sl", "c", slice=[0, 2], max_items=3), pick("ok", "s", matches="b")),
        mapped("m", "l", body(more("i"), v="more")) | {"max_items": 9},
        switch("w", "ok", true=body(text("yes", "{{q}}"), o="yes"), false=body(o="q")) | {"default": body(o="t")},
        loop(
            "rounds",
            {"draft": "answer", "said": "w"},
            body(more("draft"), pick("end", "more", matches="c"), draft="more", said="end"),
            until="end",
            max_rounds=3,
            at_limit="stop",
        ),
        {"id": "last", "op": "llm", "messages": [{"chat": "rounds.draft"}, {"role": "user", "content": "{{sl.0}}"}]},
    ]
    nodes[-1]["messages"][1]["content"] = "{{rounds.said}}"
    return graph(*nodes, outputs={"o": "last", "p": "p", "m": "m", "sl": "sl", "d": "d.a"})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all fields of a graph's nodes and bodies, and of messages, outputs and names in them."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if path[-1:] == ("schema",) or name in ("version", "op", "temperature", "max_tokens"):
                continue
            yield (*path, name)
            if name not in ("schema", "value", "args", "slice"):
                yield from places(inner, (*path, name))
    elif isinstance(value, list) and path[-1] in ("nodes", "messages", "inputs"):
        for number, inner in enumerate(value):
            yield (*path, number)
            yield from places(inner, (*path, number))


def changed(raw: Json, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Json:
    raw = copy.deepcopy(raw)
    inner = raw
    for step in path[:-1]:
        inner = inner[step]
    change(inner, path[-1])
    return raw


def spoil(inner: Any, step: Any) -> None:
    inner[step] = "wrong" if isinstance(inner[step], (dict, list, bool, int)) else 3


def misspell(inner: Any, step: Any) -> None:
    inner[f"{step}z"] = inner.pop(step)


def remove(inner: Any, step: Any) -> None:
    del inner[step]


ANY_JSON = {("nodes", 4, "value"), ("nodes", 8, "args")}
ALL = [path for path in places(whole()) if path not in ANY_JSON]
FIELDS = [path for path in ALL if path[-3:-2] == ("nodes",)]
"""Of nodes, those of bodies included."""
REQUIRED = ("id", "template", "of", "program", "over", "item", "body", "init", "cases", "on")


def named(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def test_the_graph_is_right() -> None:
    assert graph_from_dict(whole()).outputs.keys() == {"o", "p", "m", "sl", "d"}


@pytest.mark.parametrize("path", ALL, ids=named)
def test_a_wrong_value_is_one_mistake(path: tuple[Any, ...]) -> None:
    assert len(mistakes(changed(whole(), path, spoil))) == 1


@pytest.mark.parametrize("path", FIELDS, ids=named)
def test_a_misspelt_field_is_one_mistake(path: tuple[Any, ...]) -> None:
    unknown, *missing = mistakes(changed(whole(), path, misspell))
    assert f"{path[-1]}z" in unknown or f"{path[-1]}z" in missing[0]
    assert len(missing) == (path[-1] in REQUIRED)


@pytest.mark.parametrize("path", [path for path in FIELDS if path[-1] in REQUIRED], ids=named)
def test_a_missing_field_is_one_mistake(path: tuple[Any, ...]) -> None:
    (missing,) = mistakes(changed(whole(), path, remove))
    assert missing.endswith(f"{path[-1]}: is required")


def test_two_wrong_values_are_two_mistakes() -> None:
    pairs = [
        (one, other)
        for one, other in itertools.combinations(ALL, 2)
        if other[: len(one)] != one and "id" not in (one[-1], other[-1])
    ]
    for one, other in pairs[::101]:
        apart = {*mistakes(changed(whole(), one, spoil)), *mistakes(changed(whole(), other, spoil))}
        assert set(mistakes(changed(changed(whole(), one, spoil), other, spoil))) == apart


def test_a_wrong_value_in_every_node() -> None:
    raw = whole()
    wrong = [path for path in FIELDS if path[-1] not in ("id", "body", "cases", "default", "messages")]
    for path in wrong:
        raw = changed(raw, path, spoil)
    assert len(mistakes(raw)) == len(wrong)


@pytest.mark.parametrize("fields", [{}, {"retries": "x"}, {"retries": "x", "cache": 3}, {"schema": []}])
@pytest.mark.parametrize("content", ["", "{{nope}}"])
@pytest.mark.parametrize("unknown", [{}, {"temprature": 0}, {"temprature": 0, "max_tokens": 0}])
@pytest.mark.parametrize("around", ["", "map", "switch", "loop"])
def test_mistakes_of_a_call(fields: Json, content: str, unknown: Json, around: str) -> None:
    call = llm("a", content, **fields, **unknown)
    expected = [f"a.{name}" for name in (*fields, *unknown)] + ["a.messages[0].content"] * bool(content)
    raw = graph(call, {"id": "b", "op": "llm", "messages": [{"chat": "a"}, {"role": "user", "content": "{{a.x}}"}]})
    if not {"schema", "temprature"}.intersection({**fields, **unknown}):
        expected.append("b.messages[1].content")
    if around:
        inside = body(*raw["nodes"], o="b")
        outer, place = {
            "map": (mapped("m", "{{q}}", inside), "m.body."),
            "switch": (switch("m", "{{q}}", x=inside), "m.cases[x]."),
            "loop": (loop("m", {"o": "q"}, inside, max_rounds=-1, until="{{x}}"), "m.body."),
        }[around]
        own = {"map": ["m.over"], "switch": ["m.on"], "loop": ["m.max_rounds", "m.until"]}[around]
        raw, expected = graph(outer), [*own, *(f"{place}{each}" for each in expected)]
    found = [mistake.partition(": ")[0] for mistake in mistakes(raw)] if expected else []
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"nodes": [text("a", "{{q}}"), {"op": "text"}]}, ["version", "nodes[1].id", "nodes[1].template", "outputs"]),
        (graph({"op": "tekst"}, text("b", "{{a}}"), outputs={"o": "b"}), ["nodes[0].op", "nodes[0].id"]),
        (graph({"id": "a", "op": "tekst"}, text("b", "{{a}} {{c}}")), ["a.op", "b.template"]),
        (graph(text("a", "{{nope}}"), text("a", "{{nor}}")), ["nodes", "a.template", "a.template"]),
        (
            graph(mapped("m", "q", body({"id": "x", "op": "tekst"}, o="x")), text("t", "{{x}}")),
            ["m.body.x.op", "t.template"],
        ),
        (graph(mapped("m", "q", {"nodez": [], "outputs": 3})), ["m.body.nodez", "m.body.outputs", "m.body"]),
        (graph(switch("m", "q", a=body(o="q"), b=body()), text("t", "{{m}}")), ["m.cases[b].outputs"]),
        (graph(switch("m", "q", a=body(o="q"), b=body(p="q")), text("t", "{{m.p}}")), ["m"]),
        (graph(loop("m", {"a": "q"}, body(b="q")), text("t", "{{m.a}}")), ["m.body.outputs"]),
        (
            graph(loop("m", {"a": 3}, body(a="{{a}}"), until="{{b}}"), text("t", "{{m.b}}")),
            ["m.init.a", "m.body.outputs.a", "m.until", "t.template"],
        ),
        (
            graph({"id": "b", "op": "llm", "messages": [{"chat": "nope"}, {"role": "uzer", "content": "{{nor}}"}, 3]}),
            ["b.messages[0].chat", "b.messages[1].role", "b.messages[1].content", "b.messages[2]"],
        ),
        (graph(text("a", "{{x}}"), inputs={"q": 1}), ["inputs"]),
        (graph(text("a", "{{x}}"), inputs=["q", 1, 2]), ["inputs[1]", "inputs[2]"]),
        (graph(pick("a", "q", field=3, max_items=0)), ["a.field", "a.max_items"]),
        (
            graph(
                text("l"),
                mapped(
                    "m",
                    "l",
                    body({"id": "c", "op": "llm", "messages": [{"chat": "i"}, {"role": "user", "content": ""}]}, o="c"),
                ),
            ),
            ["m.over"],
        ),
    ],
)
def test_mistakes_and_what_follows_from_them(raw: Json, expected: list[str]) -> None:
    assert sorted(mistake.partition(": ")[0] for mistake in mistakes(raw)) == sorted(expected)


def test_mistakes_of_nodes_that_are_added() -> None:
    wrong = [llm("a", "{{nope}}", retries="x"), {"id": "b", "op": "text", "template": 3}, text("c", "{{b}} {{a.x}}")]
    with pytest.raises(InvalidGraph) as caught:
        growth_from_list(wrong, {}, {})
    found = [mistake.place for mistake in caught.value.mistakes]
    assert found == ["a.retries", "b.template", "a.messages[0].content", "c.template"]


def test_many_wrong_items_are_one_mistake() -> None:
    found = mistakes(graph(*[{"id": f"n{number}", "op": "llm", "messages": [1] * 5000} for number in range(10)]))
    assert len(found) == 1009
