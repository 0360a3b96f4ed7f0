from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Weft
from weft.cli.sim import parse_rates


@pytest.mark.parametrize(
    ("text", "rates"),
    [("2", [2.0]), ("0.5,1,4", [0.5, 1.0, 4.0]), ("0.5..2", [0.5, 1.0, 1.5, 2.0]), ("1..4:1,9", [1, 2, 3, 4, 9])],
)
def test_rates_are_numbers_lists_and_ranges(text: str, rates: list[float]) -> None:
    assert parse_rates(text) == rates


@pytest.mark.parametrize("text", ["", "0", "-1", "2..1", "1..x", "1..2:0", "inf", "nan", "1,,2"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        parse_rates(text)


def test_a_sweep_has_a_row_for_each_rate_and_a_file_with_every_run(weft: Weft, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    flags = ("--minutes", "0.2", "--kv-tokens", "12000", "--runs", "2", "--json", str(file))
    done = weft("sim", "interceptions", "--rate", "0.5..1", "--policy", "lru", *flags)
    assert done.exit_code == 0, done.output
    rows = [line.split()[:2] for line in done.output.splitlines() if " lru " in line]
    assert rows == [["0.5", "lru"], ["1", "lru"]]
    content = json.loads(file.read_text())
    assert [[run["seed"] for run in row["runs"]] for row in content["rows"]] == [[0, 1], [0, 1]]
    assert all(run["completed"] == run["arrived"] > 0 for row in content["rows"] for run in row["runs"])
    assert content["device"]["kv_tokens"] == 12000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policy", "fifo"), "policy 'fifo'"),
        (("--estimator", "guess"), "estimator 'guess'"),
        (("--device", "h100"), "device 'h100' is unknown"),
        (("--driving", "threads"), "--driving is programs or clients"),
        (("--generated", "9:3"), "'9:3' is not LOW:HIGH"),
        (("--rate", "fast"), "'fast' is not a rate"),
    ],
)
def test_mistakes_are_named(weft: Weft, flags: tuple[str, str], message: str) -> None:
    done = weft("sim", "interceptions", *flags)
    assert done.exit_code in (1, 2)
    assert message in " ".join(done.output.split()).replace("│ ", "")


def test_a_day_of_agents_shows_what_each_policy_saves(weft: Weft, tmp_path: Path) -> None:
    file = tmp_path / "day.json"
    flags = ("--sessions", "8", "--rate", "0.05", "--stride", "50", "--json", str(file))
    done = weft("sim", "agents", *flags)
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split()[1:] for line in done.output.splitlines() if line.strip()}
    content = json.loads(file.read_text())
    [run] = content["runs"]
    assert rows["lru"] == [f"{run['recomputed']['lru']:,}", "0"]
    assert rows["optimum"] == [f"{run['optimum']:,}", "100"]
    assert run["optimum"] <= min(run["recomputed"].values())
    gap = run["recomputed"]["lru"] - run["optimum"]
    saved = (run["recomputed"]["lru"] - run["recomputed"]["min_waste"]) / gap
    assert run["saved"]["min_waste"] == pytest.approx(saved)


def test_an_unknown_policy_of_a_day_is_named(weft: Weft) -> None:
    done = weft("sim", "agents", "--policy", "fifo")
    assert done.exit_code == 1
    assert "policy 'fifo'" in done.output
