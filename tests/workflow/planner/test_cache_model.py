"""What a prefix cache is expected to have of each prompt, by hand and against prompts that are written out."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workflow.planner.analysed import analysed, words
from tests.workflow.shapes import body, graph, llm, mapped, pick
from weft.workflow.planner.cache_model import CacheModel, PromptSources
from weft.workflow.planner.place import PlanEngine


def replayed(
    raw: dict[str, Any], rows: Any, calls: list[tuple[int, int]], kv_tokens: int = 10**6, **known: Any
) -> list[PromptSources]:
    work = analysed(raw, rows, known)
    engine = PlanEngine(model="m", kv_tokens=kv_tokens, page_size=1)
    model = CacheModel(work.unrolled, work.tree, work.prompts, [engine])
    return model.replay((operator, row, 0) for operator, row in calls)


# `<user>`, 50 words, the question's two, `<end>`, `<assistant>`
TWO = graph(llm("a", f"{words(50)} {{{{q}}}}"), llm("b", f"{words(50)} {{{{q}}}} again"), outputs={"a": "a", "b": "b"})
ROWS = [{"q": "x y"}, {"q": "z y"}]


def test_prompts_find_what_earlier_ones_have() -> None:
    a, b = replayed(TWO, ROWS, [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert a == PromptSources(110, 51, 0)
    assert b == PromptSources(112, 53 + 53, 0)


def test_what_was_used_longest_ago_is_gone_where_there_is_no_room() -> None:
    raw = graph(llm("a", words(50, "a")), llm("b", words(50, "b")), outputs={"a": "a", "b": "b"})
    alternating = [(0, 0), (1, 0), (0, 1), (1, 1)]
    one_by_one = [(0, 0), (0, 1), (1, 0), (1, 1)]
    known = {name: {"output_tokens": 5} for name in "ab"}
    # All begin with `<user>`.
    for calls, found in ((alternating, [1, 2]), (one_by_one, [52, 53])):
        assert [each.cached_tokens for each in replayed(raw, 2, calls, kv_tokens=80, **known)] == found


def test_an_answer_that_a_conversation_goes_on_with_is_continued() -> None:
    raw = graph(
        llm("a", "{{q}}"), {"id": "b", "op": "llm", "messages": [{"chat": "a"}, {"role": "user", "content": "?"}]}
    )
    _, b = replayed(raw, ROWS, [(0, 0), (0, 1), (1, 0), (1, 1)], a={"output_tokens": 7})
    assert (b.cached_tokens, b.continued_tokens) == (0, 2 * (5 + 7))


def test_items_of_a_map_find_what_is_before_them() -> None:
    raw = graph(
        pick("parts", "q", split=";"),
        mapped("each", "parts", body(llm("note", f"{words(30)} {{{{i}}}}"), value="note")),
    )
    known = {"each": {"items": 4}, "each.i": {"output_tokens": 10}}
    (note,) = replayed(raw, 1, [(0, 0)], **known)
    assert note == PromptSources(4 * 43, 3 * 31, 0)


def test_of_a_page_that_is_shared_in_part_nothing_is_found() -> None:
    work = analysed(TWO, ROWS)
    model = CacheModel(work.unrolled, work.tree, work.prompts, [PlanEngine(model="m", kv_tokens=10**6, page_size=16)])
    assert model.replay([(0, 0, 0), (0, 1, 0)])[0].cached_tokens == 48


@settings(max_examples=30, deadline=None)
@given(st.permutations([(operator, row) for operator in range(3) for row in range(3)]))
def test_with_room_for_all_each_different_token_is_computed_once(calls: list[tuple[int, int]]) -> None:
    raw = graph(
        llm("a", "one {{q}}"), llm("b", "one {{q}} two"), llm("c", "{{q}}"), outputs={name: name for name in "abc"}
    )
    rows = [{"q": "x y"}, {"q": "z y"}, {"q": "x y"}]
    prefixes: set[tuple[str, ...]] = set()
    computed = 0
    for operator, row in calls:
        said = [
            "<user>",
            *[["one"], ["one"], []][operator],
            rows[row]["q"],
            *[[], ["two"], []][operator],
            "<end>",
            "<assistant>",
        ]
        whole = " ".join(said).split()
        new = {tuple(whole[: at + 1]) for at in range(len(whole))} - prefixes
        computed += max(len(new), 1)
        prefixes |= new
    found = sum(each.prefill_tokens for each in replayed(raw, rows, calls))
    # A value is found as a whole or not at all; these differ in their first word.
    assert found == computed
