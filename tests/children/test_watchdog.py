"""Who is killed, by counters and a clock that the tests turn: a child that is stuck, never one that gets on."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.children import progress
from weft.children.progress import ProgressCounter, made_progress
from weft.children.watchdog import BUSY_FACTOR, BUSY_SHARE, Signs, Watchdog

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
def test_who_makes_progress_lives_however_late_it_answers(cpu_share: float, progress_every_s: float) -> None:
    assert verdicts(cpu_share, progress_every_s, 5000) == []


def test_who_does_nothing_is_killed_after_the_deadline() -> None:
    assert verdicts(0.0, None, int(DEADLINE_S)) == []
    assert verdicts(0.0, None, int(DEADLINE_S) + 1) == ["did not answer for 31 s and was killed"]
    # Its clock and its other threads use a little.
    assert verdicts(BUSY_SHARE / 2, None, int(DEADLINE_S) + 1) != []


def test_who_computes_has_time_and_not_for_ever() -> None:
    longest = int(DEADLINE_S * BUSY_FACTOR)
    assert verdicts(1.0, None, longest) == []
    assert verdicts(1.0, None, longest + 1) == [f"computed without progress for {longest + 1} s and was killed"]


def test_who_stops_computing_has_no_more_time() -> None:
    watchdog = Watchdog(DEADLINE_S, Signs(0.0, 0, 0.0))
    assert watchdog.look(Signs(100.0, 0, 90.0)) is None
    assert watchdog.look(Signs(901.0, 0, 90.0)) is not None


def test_progress_after_a_long_silence_starts_anew() -> None:
    watchdog = Watchdog(DEADLINE_S, Signs(0.0, 0, 0.0))
    assert watchdog.look(Signs(29.0, 0, 0.0)) is None
    assert watchdog.look(Signs(31.0, 1, 0.0)) is None
    assert watchdog.look(Signs(60.0, 1, 0.0)) is None
    assert watchdog.look(Signs(62.0, 1, 0.0)) is not None


def test_the_counter_is_seen_from_the_other_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = ProgressCounter(tmp_path / "x.progress")
    made_progress()  # this process is no child
    monkeypatch.setattr(progress, "_own", ProgressCounter(tmp_path / "x.progress"))
    assert parent.read() == 0
    for _ in range(300):
        made_progress()
    assert parent.read() == 300
    parent.close()
