"""Pins: prefixes that a schedule comes back to, by tokens saved per page, within a budget, until their last call."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workflow.planner.analysed import words
from tests.workflow.shapes import Json, graph, llm
from weft.abi.errors import InvalidRequest
from weft.testing.word_tokens import WordTokens
from weft.workflow.planner.pins import prefix_pins
from weft.workflow.planner.plan import Plan
from weft.workflow.planning import plan

PAGE = 4


def agent(name: str, role: str, user: str, tokens: int = 60, **fields: Any) -> Json:
    messages = [{"role": "system", "content": words(tokens, role)}, {"role": "user", "content": user}]
    return {"id": name, "op": "llm", "messages": messages, **fields}


def rows_of(count: int) -> list[Json]:
    return [{"q": words(15, f"row{row}_")} for row in range(count)]


def made(raw: Json, rows: int, kv_tokens: int, *, engines: int = 1, **options: Any) -> Plan:
    tokens = WordTokens()
    statistics = {node["id"]: {"output_tokens": 20} for node in raw["nodes"]}
    engine = {"model": "m", "kv_tokens": kv_tokens, "page_size": PAGE}
    return plan(raw, rows_of(rows), "m", [engine] * engines, statistics, tokens=lambda name: tokens, **options)


def back_and_forth() -> Json:
    """Two roles by turns, each call needing the one before: no order brings a role's calls together."""
    nodes = [agent("a0", "one_", "{{q}}")]
    for number in range(1, 6):
        role = "one_" if number % 2 == 0 else "two_"
        nodes.append(agent(f"a{number}", role, f"{{{{q}}}} {{{{a{number - 1}}}}}"))
    return graph(*nodes)


def test_what_a_schedule_comes_back_to_is_pinned_until_its_last_call() -> None:
    found = made(back_and_forth(), 1, 600)
    parts = [[found.analysed.unrolled.operators[each].node for each in part.group.operators] for part in
             found.arrangement.parts]  # fmt: skip
    pins = found.to_dict()["pins"]
    assert [pin["users"] for pin in pins] == [["a0", "a2", "a4"], ["a1", "a3", "a5"]]
    for pin in pins:
        used = [number for number, nodes in enumerate(parts) if set(nodes) & set(pin["users"])]
        assert (pin["from"], pin["until"]) == (used[0], used[-1])
        # `<system>`, 60 words, `<end>` and `<user>`, in whole pages, and one token of the prompt beside them.
        assert pin["tokens"] == 60
        assert pin["engine"] == 0


def test_a_pinned_prefix_is_predicted_to_be_computed_once() -> None:
    pinned, plain = made(back_and_forth(), 8, 400), made(back_and_forth(), 8, 400, pinned_part=0)
    assert plain.to_dict()["pins"] == []
    assert pinned.pins
    assert pinned.predicted.prefill_tokens < plain.predicted.prefill_tokens
    assert pinned.predicted.min_prefill_tokens == plain.predicted.min_prefill_tokens
    prompt = pinned.predicted
    assert prompt.prompt_tokens == prompt.cached_tokens + prompt.continued_tokens + prompt.prefill_tokens


@pytest.mark.parametrize("part", [0.1, 0.25, 0.5])
def test_pins_hold_no_more_than_their_part_of_the_pages_at_any_time(part: float) -> None:
    chain = [agent("a0", "r0_", "{{q}}")]
    chain += [agent(f"a{n}", f"r{n % 5}_", f"{{{{q}}}} {{{{a{n - 1}}}}}", 20 + 13 * (n % 5)) for n in range(1, 25)]
    found = made(graph(*chain), 1, 800, pinned_part=part)
    for at in range(len(found.arrangement.parts)):
        held = sum(len(pin.tokens) // PAGE for pin in found.pins if pin.start <= at <= pin.end)
        assert held <= part * (800 // PAGE)
    assert found.pins or part == 0.1


def test_where_room_is_short_the_prefix_is_pinned_that_saves_most_per_page() -> None:
    """Both roles are as long; one comes back three times as often."""
    order = ["x", "y", "x", "z", "x", "z", "x", "y", "x"]
    nodes = [agent("n0", "x_", "{{q}}")]
    nodes += [agent(f"n{at}", f"{role}_", f"{{{{n{at - 1}}}}}") for at, role in enumerate(order) if at]
    found = made(graph(*nodes), 1, 400, pinned_part=0.15)
    assert [pin["users"] for pin in found.to_dict()["pins"]] == [["n0", "n2", "n4", "n6", "n8"]]


def test_what_is_never_left_is_not_pinned() -> None:
    raw = graph(llm("a", f"{words(60)} {{{{q}}}}"), llm("b", f"{words(60)} {{{{q}}}} {{{{a}}}}"))
    assert made(raw, 10, 400).to_dict()["pins"] == []


def test_calls_with_a_salt_have_pins_of_their_own() -> None:
    raw = back_and_forth()
    raw["nodes"] = [node | {"cache_salt": "s" if node["id"] in ("a0", "a4") else "t"} for node in raw["nodes"]]
    found = made(raw, 1, 600)
    users = {(pin["users"][0], pin["users"][-1]) for pin in found.to_dict()["pins"]}
    assert ("a0", "a4") in users
    assert {pin.salt for pin in found.pins} == {"s", "t"}
    assert not any("a2" in pin["users"] and "a0" in pin["users"] for pin in found.to_dict()["pins"])


def test_each_engine_has_its_own() -> None:
    found = made(back_and_forth(), 4, 400, engines=2)
    assert {pin["engine"] for pin in found.to_dict()["pins"]} == {0, 1}


def test_a_plan_that_goes_on_from_another_keeps_what_that_one_computed() -> None:
    """Each role has one call; but a sample of the rows has computed all of them."""
    experts = [agent(f"expert{number}", f"role{number}_", "{{q}}") for number in range(8)]
    answers = " ".join(f"{{{{expert{number}}}}}" for number in range(8))
    found = made(graph(*experts, agent("summary", "summary_", f"{{{{q}}}} {answers}")), 1, 2000)
    assert found.pins == []
    pins = prefix_pins(found.analysed, found.arrangement, found.engines, is_continued=True)
    assert pins
    assert {pin.start for pin in pins} == {0}


def test_nested_prefixes_are_one_pin_where_the_longer_one_serves_all() -> None:
    """What all calls begin with is never left; each half of them goes on alike."""
    shared = words(40, "all_")
    nodes = [llm("n0", f"{shared} {words(40, 'x_')} {{{{q}}}}")]
    for at in range(1, 8):
        nodes.append(llm(f"n{at}", f"{shared} {words(40, 'xy'[at % 2] + '_')} {{{{n{at - 1}}}}}"))
    found = made(graph(*nodes), 1, 500, pinned_part=0.5)
    assert sorted(len(pin.tokens) for pin in found.pins) == [80, 80]


def test_a_part_is_between_nothing_and_all() -> None:
    with pytest.raises(InvalidRequest, match="pinned_part"):
        made(back_and_forth(), 1, 400, pinned_part=1.5)
