"""Figures of operators in the store: by tenant and model, the last used ones."""

from __future__ import annotations

from pathlib import Path

from weft.store.database import Database
from weft.store.statistics import StatisticsTable


def test_figures_are_those_of_a_tenant_and_a_model(tmp_path: Path) -> None:
    database = Database(tmp_path)
    table = StatisticsTable(database)
    table.put("a", "m", {"x": b"1", "y": b"2"}).result()
    table.put("b", "m", {"x": b"3"}).result()
    table.put("a", "n", {"x": b"4"}).result()
    table.put("a", "m", {"x": b"5"}).result()
    assert table.get("a", "m", ["x", "y", "z"]) == {"x": b"5", "y": b"2"}
    assert table.get("b", "m", ["x", "y"]) == {"x": b"3"}
    assert table.get("a", "n", ["x"]) == {"x": b"4"}
    database.close()
    again = Database(tmp_path)
    assert StatisticsTable(again).get("a", "m", ["x"]) == {"x": b"5"}
    again.close()


def test_a_tenant_has_so_many_and_the_ones_unused_for_longest_go() -> None:
    database = Database()
    table = StatisticsTable(database, max_operators=3)
    table.put("b", "m", {"other": b"0"}).result()
    for number in range(5):
        table.put("a", "m", {f"x{number}": b"1", "always": b"1"}).result()
    assert sorted(table.get("a", "m", [*(f"x{number}" for number in range(5)), "always"])) == ["always", "x3", "x4"]
    assert table.get("b", "m", ["other"]) == {"other": b"0"}
    database.close()
