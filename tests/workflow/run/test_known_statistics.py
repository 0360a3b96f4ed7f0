"""Figures of earlier runs: of operators, whatever they are called and in whatever graph they stand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.workflow.run.caching_backend import CachingBackend
from tests.workflow.shapes import Json, body, graph, llm, loop, pick, switch
from weft.abi.errors import StorageFailed
from weft.store.database import Database
from weft.store.statistics import StatisticsTable
from weft.workflow import api, targets
from weft.workflow.graph import canonical, graph_from_dict
from weft.workflow.run.known_statistics import KnownStatistics, with_given


def known(table: StatisticsTable, raw: Json, model: str = "m", tenant: str = "") -> KnownStatistics:
    return KnownStatistics(table, canonical(graph_from_dict(raw)), model, tenant)


@pytest.fixture
def table() -> Any:
    database = Database()
    yield StatisticsTable(database)
    database.close()


def kept(table: StatisticsTable, raw: Json, measured: dict[str, Any], **whose: str) -> None:
    one = known(table, raw, **whose)
    one.load()
    one.keep(measured)


def test_an_operator_is_known_by_what_it_does(table: StatisticsTable) -> None:
    kept(table, graph(llm("a", "Say {{q}}", max_tokens=9), llm("b", "So {{a}}")), {"a": {"output_tokens": 7.0}})
    renamed = graph(llm("first", "{{q}}"), llm("other", "Say {{first}}", max_tokens=9, cache_salt="s"))
    assert known(table, renamed).load() == {"other": {"output_tokens": 7.0}}
    assert known(table, graph(llm("a", "Say {{q}}", max_tokens=8))).load() == {}
    assert known(table, graph(llm("a", "Say {{q}}!", max_tokens=9))).load() == {}


def test_figures_are_those_of_a_tenant_and_a_model(table: StatisticsTable) -> None:
    raw = graph(llm("a", "{{q}}"))
    kept(table, raw, {"a": {"output_tokens": 7.0}}, tenant="x")
    assert known(table, raw, tenant="x").load() == {"a": {"output_tokens": 7.0}}
    assert known(table, raw, tenant="y").load() == {}
    assert known(table, raw, tenant="x", model="n").load() == {}


def test_a_later_run_counts_as_much_as_all_before(table: StatisticsTable) -> None:
    raw = graph(
        {"id": "each", "op": "map", "over": "q", "item": "i", "body": body(llm("note", "{{i}}"), v="note")},
        loop("again", {"x": "q"}, body(llm("say", "So {{x}}"), pick("end", "q", matches="a"), x="say"), until="end"),
        switch("which", "q", **{"a": body(llm("c"), v="c"), "x": body(llm("d"), v="d")}),
        outputs={"a": "each.v", "b": "again.x", "c": "which.v"},
    )
    for tokens, items, rounds, shares in ((4.0, 3.0, 2.0, {"cases[a]": 1.0}), (8.0, 5.0, 1.0, {"cases[x]": 1.0})):
        kept(
            table,
            raw,
            {
                "each.note": {"output_tokens": tokens},
                "each": {"items": items},
                "again": {"rounds": rounds},
                "which": {"shares": shares},
            },
        )
    assert known(table, raw).load() == {
        "each.note": {"output_tokens": 6.0},
        "each": {"items": 4.0},
        "again": {"rounds": 1.5},
        "which": {"shares": {"cases[a]": 0.5, "cases[x]": 0.5}},
    }


def test_what_a_user_gives_comes_first() -> None:
    stored = {"a": {"output_tokens": 7.0, "items": 2.0}, "b": {"output_tokens": 1.0}}
    found = with_given(stored, {"a": {"output_tokens": 3}, "c": {"rounds": 2}})
    assert found == {"a": {"output_tokens": 3, "items": 2.0}, "b": {"output_tokens": 1.0}, "c": {"rounds": 2}}


def test_a_store_that_cannot_be_read_or_written_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database()
    table = StatisticsTable(database)
    database.close()
    one = known(table, graph(llm("a", "{{q}}")))
    assert one.load() == {}
    one.keep({"a": {"output_tokens": 1.0}})
    with pytest.raises(StorageFailed):
        table.get("", "m", ["a"])


def test_the_next_run_with_the_same_folder_needs_no_sample(tmp_path: Path) -> None:
    raw = graph_from_dict(graph(llm("a", "{{q}} a"), llm("b", "{{a}} b")))
    rows = [{"q": f"question {number}"} for number in range(20)]
    plans = []
    for number in range(2):
        given = [{"q": f"{number} {row['q']}"} for row in rows]
        options: targets.RunOptions = {"cache": tmp_path}
        run = api.GraphRun(raw, given, "", options)

        async def collected(run: api.GraphRun = run) -> int:
            backend = CachingBackend(4000)
            return len([each async for each in run.on_loop(iter(enumerate(run.rows)), backend)])

        assert asyncio.run(collected()) == 20
        assert run.planner is not None
        plans.append(run.planner.rounds.num_plans)
        assert run.planner.rounds.known == {name: {"output_tokens": 20} for name in "ab"}
    # The first run plans its sample and the others, and perhaps once more when the sample has ended.
    assert plans[0] >= 2
    assert plans[1] == 1
