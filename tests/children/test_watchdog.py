"""Which children the watchdog kills: those that hang, never one that makes progress. Tests set counters and clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.children import progress
from weft.children.progress import ProgressCounter, made_progress
from weft.children.watchdog import BUSY_FACTOR, BUSY_SHARE, MAX_GAP_S, Signs, Watchdog

DEADLINE_S = 30.0


def verdicts(cpu_share: float, progress_every_s: float | None, seconds: int) -> list[str]:
    """Every verdict on a child that uses the processor so much and makes progress so often, second by second."""
    watchdog = Watchdog(DEADLINE_S, Signs(0.0, 0, 0.0))
    found = []
    for second in range(1, seconds + 1):
        counter = 0 if progress_every_s is None else int(second // progress_every_s)
        verdict = watchdog.look(Signs(float(second), counter, second * cpu_share))
        if verdict is not None:
            found.append(verdict)
    return found


@pytest.mark.parametrize("cpu_share", [0.0, BUSY_SHARE, 1.0, 8.0])
@pytest.mark.parametrize("progress_every_s", [1.0, 10.0, DEADLINE_S])
def test_a_child_that_makes_progress_lives_however_late_it_answers(cpu_share: float, progress_every_s: float) -> None:
    assert verdicts(cpu_share, progress_every_s, 5000) == []


def test_a_child_that_does_nothing_is_killed_after_the_deadline() -> None:
    assert verdicts(0.0, None, int(DEADLINE_S)) == []
    assert verdicts(0.0, None, int(DEADLINE_S) + 1) == ["did not answer for 31 s and was killed"]
    # Its clock and its other threads use a little.
    assert verdicts(BUSY_SHARE / 2, None, int(DEADLINE_S) + 1) != []


def test_a_child_that_computes_is_killed_after_a_longer_deadline() -> None:
    longest = int(DEADLINE_S * BUSY_FACTOR)
    assert verdicts(1.0, None, longest) == []
    assert verdicts(1.0, None, longest + 1) == [f"computed without progress for {longest + 1} s and was killed"]


def test_a_child_that_stops_computing_has_no_more_time() -> None:
    watchdog = Watchdog(DEADLINE_S, Signs(0.0, 0, 0.0))
    found = [watchdog.look(Signs(float(second), 0, min(second * 0.9, 0.5))) for second in range(1, 52)]
    # 0.5 s of processor time is the share of a busy child for 50 s.
    assert found[:50] == [None] * 50
    assert found[50] is not None


def test_progress_after_a_long_silence_starts_anew() -> None:
    watchdog = Watchdog(DEADLINE_S, Signs(0.0, 0, 0.0))
    found = [watchdog.look(Signs(float(second), int(second >= 31), 0.0)) for second in range(1, 63)]
    # No progress up to second 30, one step of it at second 31, and none for 30 s after that.
    assert found[:61] == [None] * 61
    assert found[61] is not None


@pytest.mark.parametrize("pause_s", [DEADLINE_S + 1, 3600.0])
def test_a_pause_of_the_parent_is_no_silence_of_the_child(pause_s: float) -> None:
    """An idle child answers pings, and a parent that stood still has sent none."""
    watchdog = Watchdog(DEADLINE_S, Signs(0.0, 0, 0.0))
    assert watchdog.look(Signs(pause_s, 0, 0.0)) is None
    quiet = int(DEADLINE_S - MAX_GAP_S)
    for second in range(1, quiet + 1):
        assert watchdog.look(Signs(pause_s + second, 0, 0.0)) is None
    # One that hangs is still found, a little later.
    assert watchdog.look(Signs(pause_s + quiet + 1, 0, 0.0)) is not None


def test_the_counter_is_seen_from_the_other_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = ProgressCounter(tmp_path / "x.progress")
    made_progress()  # this process is no child
    monkeypatch.setattr(progress, "_own", ProgressCounter(tmp_path / "x.progress"))
    assert parent.read() == 0
    for _ in range(300):
        made_progress()
    assert parent.read() == 300
    parent.close()
