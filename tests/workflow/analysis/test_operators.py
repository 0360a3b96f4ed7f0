"""Operators of a graph: bodies entered, loops unrolled, prompts with placeholders."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.workflow.random_graphs import graphs
from tests.workflow.shapes import body, function, graph, llm, loop, mapped, pick, switch, text
from weft.testing.word_tokens import WordTokens
from weft.workflow.analysis.operators import Operator, TooLarge, Unrolled, unroll
from weft.workflow.analysis.prompts import FIRST_MARK, template_of
from weft.workflow.analysis.statistics import Statistics
from weft.workflow.graph import graph_from_dict


def unrolled(raw: dict[str, Any], statistics: dict[str, Any] | None = None) -> Unrolled:
    tokens = WordTokens()
    return unroll(graph_from_dict(raw), lambda model: tokens, Statistics(statistics), "m")


def prompt(made: Unrolled, operator: Operator) -> list[str]:
    """The placeholders of a prompt by name, and `.` for each run of static tokens."""
    said: list[str] = []
    for element in operator.template:
        if element < 0:
            said.append(made.placeholders[-1 - element].name)
        elif said[-1:] != ["."]:
            said.append(".")
    return said


def test_texts_and_lists_are_written_into_prompts() -> None:
    made = unrolled(
        graph(
            llm("a", "One {{q}}"),
            text("t", "({{a}} of {{q}})"),
            {"id": "l", "op": "list", "of": ["{{t}}", "fixed", "{{q}}"]},
            function("j", "join", of="{{l}}", separator=" - "),
            llm("b", "Two: {{j}}"),
        )
    )
    first, second = made.operators
    assert prompt(made, first) == [".", "q", "."]
    assert prompt(made, second) == [".", "a", ".", "q", ".", "q", "."]
    assert second.needs == (0,)
    assert second.continues is None


def test_adjacent_static_text_is_one_piece_however_it_is_split() -> None:
    tokens = WordTokens()
    whole = graph(llm("a", "You are a judge of texts {{q}}"))
    split = graph(text("t", "a judge"), llm("a", "You are {{t}} of texts {{q}}"))
    one, other = (unroll(graph_from_dict(raw), lambda model: tokens, Statistics(), "m") for raw in (whole, split))
    assert one.operators[0].template == other.operators[0].template


def test_roles_are_part_of_the_prompt() -> None:
    raw = graph(
        {"id": "a", "op": "llm", "messages": [{"role": "system", "content": "Hi"}]},
        {"id": "b", "op": "llm", "messages": [{"role": "user", "content": "Hi"}]},
        outputs={"a": "a", "b": "b"},
    )
    one, other = unrolled(raw).operators
    assert one.template[0] != other.template[0]
    assert one.template[1:] == other.template[1:]


def test_a_chat_goes_on_after_the_answer() -> None:
    made = unrolled(
        graph(llm("a"), {"id": "b", "op": "llm", "messages": [{"chat": "a"}, {"role": "user", "content": "?"}]})
    )
    first, second = made.operators
    assert second.continues == 0
    assert second.template[: len(first.template)] == first.template
    assert prompt(made, second) == [".", "a", "."]


def test_a_field_of_an_answer_is_another_value() -> None:
    schema = {"type": "object", "properties": {"who": {"type": "string"}}}
    made = unrolled(graph(llm("a", schema=schema), llm("b", "{{a.who}} {{a.who}} {{a}}")))
    names = prompt(made, made.operators[1])
    assert names == [".", "a.who", "a.who", "a", "."]
    field, whole = (made.placeholders[-1 - element] for element in made.operators[1].template[1:4:2])
    assert field.operator is None
    assert whole.operator == 0


def test_a_map_counts_its_items_and_shares_what_is_before_them() -> None:
    raw = graph(
        pick("parts", "q", split=";"),
        mapped("each", "parts", body(llm("note", "About {{q}} and {{i}} more"), value="note")),
        function("all", "join", of="{{each}}"),
        llm("end", "{{all}}"),
    )
    made = unrolled(raw, {"each": {"items": 5}, "each.note": {"output_tokens": 20}})
    note, end = made.operators
    assert (note.node, note.calls, note.items) == ("each.note", 5, 5)
    assert prompt(made, note) == [".", "q", ".", "each.i", "."]
    assert note.template[note.shared_by_items] == -1 - [p.name for p in made.placeholders].index("each.i")
    assert end.needs == (0,)
    joined = made.placeholders[-1 - end.template[1]]
    assert (joined.name, joined.tokens) == ("all", 100)
    assert end.items == 1


def of_rows(raw: dict[str, Any], *values: Any) -> Unrolled:
    tokens = WordTokens()
    return unroll(graph_from_dict(raw), lambda model: tokens, Statistics(), "m", [{"q": value} for value in values])


NOTES = body(llm("note", "About {{i}} more"), value="note")


@pytest.mark.parametrize(
    ("nodes", "over", "lists"),
    [
        ([], "q", (("a b", "c"), ("d",), ())),
        ([pick("part", "q", slice=[0, 1])], "part", (("a b",), ("d",), ())),
        ([{"id": "l", "op": "data", "value": ["x", "y z"]}], "l", (("x", "y z"),) * 3),
        ([{"id": "l", "op": "list", "of": ["{{q}}", "x"]}], "l", (('["a b","c"]', "x"), ('["d"]', "x"), ("[]", "x"))),
        ([text("t", "{{q}};x"), pick("l", "t", split=";")], "l", (('["a b","c"]', "x"), ('["d"]', "x"), ("[]", "x"))),
    ],
)
def test_lists_that_are_known_before_a_run_are_read(nodes: list[Any], over: str, lists: tuple[Any, ...]) -> None:
    made = of_rows(graph(*nodes, mapped("m", over, NOTES)), ["a b", "c"], ["d"], [])
    (note,) = made.operators
    items = [item for each in lists for item in each]
    assert note.calls == pytest.approx(len(items) / 3)
    assert note.items == max(1, round(len(items) / 3))
    assert note.sure == tuple(map(bool, lists))
    (item,) = (each for each in made.placeholders if each.name == "m.i")
    assert item.lists == lists
    assert item.tokens == round(sum(len(each.split()) for each in items) / len(items))


def test_parts_of_known_items_are_known() -> None:
    inside = body(pick("b", "i", field="b"), llm("note", "{{i.a}} {{b}}"), value="note")
    made = of_rows(graph(mapped("m", "q", inside)), [{"a": "x", "b": ["y"]}], [{"a": "z", "b": 3}])
    lists = {each.name: each.lists for each in made.placeholders if each.lists is not None}
    assert lists["i.a"] == (("x",), ("z",))
    assert lists["m.b"] == (('["y"]',), ("3",))


@pytest.mark.parametrize(
    "raw",
    [
        graph(llm("a"), pick("parts", "a", split=" "), mapped("m", "parts", NOTES)),
        graph(
            loop("l", {"s": "q"}, body(text("t", "{{s}};x"), s="t")),
            pick("p", "l.s", split=";"),
            mapped("m", "p", NOTES),
        ),
    ],
)
def test_lists_that_a_run_makes_are_not_known(raw: dict[str, Any]) -> None:
    made = of_rows(raw, "a", "b;c")
    assert all(each.lists is None for each in made.placeholders)
    assert made.operators[-1].sure == (False, False)


def test_what_a_row_may_do_without_is_not_sure() -> None:
    case = switch("s", "q", x=body(llm("a"), v="a"))
    rounds = loop("l", {"s": "q"}, body(llm("b", "{{s}}"), pick("e", "b", matches="x"), s="b"), until="e", max_rounds=3)
    made = of_rows(graph(case, rounds, outputs={"s": "s", "l": "l.s"}), "x", "y")
    sure = {(each.node, *each.rounds): all(each.sure) for each in made.operators}
    assert sure == {("s[x].a",): False, ("l.b", 0): True, ("l.b", 1): False}


def test_a_loop_is_unrolled_for_its_expected_rounds() -> None:
    raw = graph(
        loop(
            "rounds",
            {"said": "q"},
            body(llm("say", "{{said}}"), pick("end", "say", matches="yes"), said="say"),
            until="end",
            max_rounds=9,
        ),
        llm("last", "{{rounds.said}}"),
    )
    made = unrolled(raw, {"rounds": {"rounds": 2.5}})
    assert [(each.node, each.rounds, each.calls, each.needs) for each in made.operators] == [
        ("rounds.say", (0,), 1.0, ()),
        ("rounds.say", (1,), 1.0, (0,)),
        ("rounds.say", (2,), 0.5, (1,)),
        ("last", (), 1.0, (2,)),
    ]
    assert prompt(made, made.operators[1])[1] == "rounds.say"
    many = unrolled(raw, {"rounds": {"rounds": 9}})
    assert sum(each.calls for each in many.operators) == 10
    assert len(many.operators) == 9


def test_cases_of_a_switch_share_the_rows() -> None:
    raw = graph(switch("which", "q", x=body(llm("a"), value="a"), y=body(llm("b"), value="b")), llm("c", "{{which}}"))
    even = unrolled(raw)
    assert [each.calls for each in even.operators] == [0.5, 0.5, 1.0]
    known = unrolled(raw, {"which": {"shares": {"cases[x]": 0.9, "cases[y]": 0.1}}})
    assert [each.calls for each in known.operators] == [0.9, 0.1, 1.0]
    assert [each.node for each in known.operators] == ["which[x].a", "which[y].b", "c"]
    assert known.operators[2].needs == (0, 1)


def test_bodies_wait_for_what_opens_them() -> None:
    """A case for the value that chooses it, items for their list, a round for the one before."""
    inside = body(llm("in", "Hi"), value="in")
    opened = [
        (switch("s", "first", x=inside), "s"),
        (mapped("m", "parts", inside), "joined"),
        (loop("l", {"x": "first"}, body(llm("in", "Hi"), x="in"), max_rounds=2), "l"),
    ]
    for node, value in opened:
        more = [function("joined", "join", of="{{m}}")] if value == "joined" else []
        parts = pick("parts", "first", split=" ")
        made = unrolled(graph(llm("first", "{{q}}"), parts, node, *more, llm("after", f"{{{{{value}}}}}")))
        assert len(made.operators) >= 3
        assert all(number - 1 in operator.needs for number, operator in enumerate(made.operators) if number)


def test_each_model_renders_and_tokenizes_its_own_prompts() -> None:
    tokens = {"m": WordTokens(), "other": WordTokens()}
    raw = graph(llm("a", "Hi"), llm("b", "Hi {{a}}", model="other"), outputs={"a": "a", "b": "b"})
    made = unroll(graph_from_dict(raw), tokens.__getitem__, Statistics(), "m")
    assert [operator.model for operator in made.operators] == ["m", "other"]
    assert [used.encoded for used in tokens.values()] == [
        ["<user> Hi <end> <assistant> "],
        ["<user> Hi ", " <end> <assistant> "],
    ]


def test_loops_in_loops_have_a_round_of_each() -> None:
    inner = loop("inner", {"x": "said"}, body(llm("say", "{{x}}"), x="say"), max_rounds=2)
    raw = graph(loop("outer", {"said": "q"}, body(inner, said="inner.x"), max_rounds=3), llm("end", "{{outer.said}}"))
    said = unrolled(raw).operators[:-1]
    assert {operator.node for operator in said} == {"outer.inner.say"}
    assert [operator.rounds for operator in said] == [(outer, inner) for outer in range(3) for inner in range(2)]


def test_a_text_of_a_user_is_never_taken_for_a_value() -> None:
    made = unrolled(graph(llm("a", f"{chr(FIRST_MARK)} {{{{q}}}}")))
    assert [element for element in made.operators[0].template if element < 0] == [-1]


def test_a_raw_prompt_has_no_roles() -> None:
    made = unrolled(graph({"id": "a", "op": "llm", "prompt": "Go on {{q}}"}))
    assert prompt(made, made.operators[0]) == [".", "q"]
    assert len(made.operators[0].template) == 3


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_nodes_makes_no_difference(order: int) -> None:
    nodes = [llm("a", "1 {{q}}"), llm("b", "2 {{a}}"), llm("c", "3 {{a}}"), llm("d", "{{b}} {{c}}")]
    raw = graph(*nodes[::order], outputs={"out": "d"})
    assert unrolled(raw) == unrolled(graph(*nodes, outputs={"out": "d"}))


@settings(max_examples=30)
@given(graphs())
def test_every_graph_has_operators_that_need_earlier_ones(raw: dict[str, Any]) -> None:
    made = unrolled(raw)
    for number, operator in enumerate(made.operators):
        assert all(need < number for need in operator.needs)
        assert all(-1 - element < len(made.placeholders) for element in operator.template)
        assert operator.calls > 0


def test_static_text_is_tokenized_between_values() -> None:
    tokens = WordTokens()
    assert template_of(f"a b{chr(FIRST_MARK)}{chr(FIRST_MARK + 3)} c", tokens) == (0, 1, -1, -4, 2)
    assert tokens.encoded == ["a b", " c"]


def test_texts_that_double_are_bounded() -> None:
    doubled = [text("t0", "{{q}}{{q}}"), *(text(f"t{n}", f"{{{{t{n - 1}}}}}{{{{t{n - 1}}}}}") for n in range(1, 60))]
    with pytest.raises(TooLarge, match="Mi characters"):
        unrolled(graph(*doubled, llm("a", "{{q}}"), outputs={"out": "t59", "a": "a"}))
