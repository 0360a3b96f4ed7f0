"""Schedules of more rows than fit an engine: those of one window before the next ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.workflow.planner.analysed import scheduled, words
from tests.workflow.shapes import graph, llm
from weft.testing.word_tokens import WordTokens
from weft.workflow import plan
from weft.workflow.planner.place import PlanEngine
from weft.workflow.planner.plan import Plan
from weft.workflow.planner.windows import MAX_PARTS

ROWS = 80
FACTS = {"op": "llm", "messages": [{"role": "user", "content": words(60, "rule") + " {{q}}"}]}
DEBATE = graph(
    {"id": "say", **FACTS},
    {"id": "think", "op": "llm", "messages": [{"chat": "say"}, {"role": "user", "content": "Think again."}]},
    llm("judge", "Judge {{think}}"),
)


def planned(*kv_tokens: int, rows: int = ROWS, raw: dict[str, Any] = DEBATE) -> Plan:
    tokens = WordTokens()
    engines = [PlanEngine(model="m", kv_tokens=each, replica=number) for number, each in enumerate(kv_tokens)]
    values = [{"q": words(20, f"q{row}")} for row in range(rows)]
    statistics = {node: {"output_tokens": 10} for node in ("say", "think", "judge")}
    return plan(raw, values, "m", engines=engines, statistics=statistics, tokens=lambda model: tokens)


def windows(made: Plan, engine: int = 0) -> list[set[int]]:
    """The rows of each stretch of the schedule in which rows that have begun end before others begin."""
    found: list[set[int]] = []
    left: dict[int, int] = {}
    for call in (call for call in scheduled(made) if call.engine == engine):
        if not left:
            found.append(set())
        found[-1].add(call.row)
        left[call.row] = left.get(call.row, 3) - 1
        if not left[call.row]:
            del left[call.row]
    return found


def test_where_all_rows_fit_there_is_one_window() -> None:
    assert windows(planned(100_000)) == [set(range(ROWS))]


def test_rows_of_a_window_fit_the_engine() -> None:
    made = planned(4_000)
    found = windows(made)
    assert len(found) > 1
    assert sorted(row for rows in found for row in rows) == list(range(ROWS))
    # A row's own KV: its question and answers, in the conversation and before the judge. The rules are of all rows.
    own = made.analysed.prompts.depths[-1][0] + 3 * 10
    assert all(len(rows) * own < 4_000 for rows in found)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_calls_and_starts_are_in_order() -> None:
    made = planned(4_000)
    calls = [(call.label, call.row) for call in scheduled(made)]
    assert sorted(calls) == sorted((node, row) for node in ("say", "think", "judge") for row in range(ROWS))
    at = {call: number for number, call in enumerate(calls)}
    assert all(at["say", row] < at["think", row] < at["judge", row] for row in range(ROWS))
    starts = [part.start for part in made.arrangement.parts]
    assert starts == sorted(starts)
    assert starts[0] >= 0
    assert starts[-1] < made.arrangement.token_steps


def test_each_engine_has_windows_of_its_own() -> None:
    made = planned(100_000, 4_000)
    assert len(windows(made, 0)) == 1
    mine = [row for rows in windows(made, 1) for row in rows]
    assert mine
    assert sorted(mine) == list(range(min(mine), ROWS))
    for engine in (0, 1):
        starts = [part.start for part in made.arrangement.parts if part.group.engine == engine]
        assert all(one <= other for one, other in pairwise(starts))


@pytest.mark.parametrize("kv_tokens", [50, 100])
def test_an_engine_that_has_no_room_for_a_row_has_one_window(kv_tokens: int) -> None:
    assert len(made_parts := planned(kv_tokens).arrangement.parts) <= MAX_PARTS
    assert {part.group.rows for part in made_parts} == {part.group.rows for part in planned(100_000).arrangement.parts}


@pytest.mark.parametrize(("kv_tokens", "most"), [(150, 1), (250, 2)])
def test_where_half_of_an_engine_is_too_little_for_a_row_windows_fill_it(kv_tokens: int, most: int) -> None:
    assert {len(rows) for rows in windows(planned(kv_tokens))} == {most}
    apart = graph({"id": "say", **FACTS}, llm("think", "Of {{say}}"), llm("judge", "Judge {{think}}"))
    assert windows(planned(kv_tokens, raw=apart)) == [set(range(ROWS))], "no call goes on with what another has read"


def test_a_schedule_that_would_have_too_many_parts_stays_whole() -> None:
    made = planned(600, rows=4_000)
    assert len(made.arrangement.parts) <= MAX_PARTS
    assert windows(made) == [set(range(4_000))]
