"""The state of a training run: checkpoints that survive a crash, locks, pause, and the curriculum."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from bench import alone
from training.weft_tiny import control
from training.weft_tiny.curriculum import Curriculum
from training.weft_tiny.grammar import TOP
from training.weft_tiny.state import ProcessLock, RunState, holder, running_lock


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def writing(content: bytes) -> Callable[[BinaryIO], None]:
    def write(file: BinaryIO) -> None:
        file.write(content)

    return write


def content(state: RunState) -> bytes | None:
    with state.newest() as file:
        return None if file is None else file.read()


def test_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    state = RunState(tmp_path / "state")
    assert content(state) is None
    for tokens in (5, 900, 70):
        state.save(tokens, writing(b"%d" % tokens))
    assert content(state) == b"900"
    assert [path.name[-6:-3] for path in state.checkpoints()] == ["900", "070"]


@pytest.mark.parametrize("cut", [0, 10, 33])
def test_a_damaged_checkpoint_is_passed_over_and_logged(tmp_path: Path, cut: int) -> None:
    state = RunState(tmp_path)
    state.save(1, writing(b"older"))
    newest = state.save(2, writing(b"newer"))
    newest.write_bytes(newest.read_bytes()[:cut])
    assert content(state) == b"older"
    assert state.last("damaged") == {**(state.last("damaged") or {}), "file": newest.name}


def test_a_write_that_fails_leaves_the_checkpoints_as_they_were(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError("disk full")

    state = RunState(tmp_path)
    state.save(1, writing(b"whole"))
    with pytest.raises(OSError, match="disk full"):
        state.save(2, fail)
    assert content(state) == b"whole"


def test_a_log_line_that_a_crash_cut_short_is_skipped(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    state.note("progress", tokens=1)
    with state.log.open("a") as file:
        file.write('{"event": "progr')
    assert (state.last("progress") or {})["tokens"] == 1


def test_a_lock_has_one_holder_who_is_named(tmp_path: Path) -> None:
    first, second = (ProcessLock(tmp_path / "lock", tmp_path / name) for name in "ab")
    assert holder(first.path) is None
    first.acquire()
    assert (holder(first.path) or {})["state"] == str((tmp_path / "a").resolve())
    with pytest.raises(BlockingIOError):
        second.acquire()
    first.release()
    assert holder(first.path) is None
    second.acquire()
    assert (holder(first.path) or {})["state"] == str((tmp_path / "b").resolve())


def test_benchmarks_refuse_to_run_beside_training_and_run_while_it_is_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    alone.require()
    lock = ProcessLock(running_lock(), tmp_path)
    lock.acquire()
    with pytest.raises(SystemExit, match="pause it first"):
        alone.require()
    lock.release()
    alone.require()


def test_pause_waits_for_this_trainer_and_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []

    def watched(path: Path, wait: bool = False) -> object:
        waits.append(wait)
        return holder(path) if not wait else None

    monkeypatch.setattr(control, "holder", watched)
    mine, other = RunState(tmp_path / "mine"), RunState(tmp_path / "other")
    lock = ProcessLock(running_lock(), mine.directory)
    lock.acquire()
    assert control.pause(other) == "paused"
    assert waits == [False]
    assert control.pause(mine) == "paused"
    assert waits == [False, False, True]
    assert mine.pause.exists()
    control.resume(mine)
    assert not mine.pause.exists()


def test_status_tells_of_the_process_the_checkpoints_and_the_last_progress(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    assert control.status(state) == "not running\ncheckpoints: none"
    owner = ProcessLock(state.owner, tmp_path)
    owner.acquire()
    state.note("progress", tokens=7)
    state.save(7, writing(b"x"))
    running, kept, progress = control.status(state).splitlines()
    assert running.endswith("running")
    assert kept == "checkpoints: checkpoint-000000000000007.pt"
    assert json.loads(progress)["tokens"] == 7
    assert "already trains" in control.start(state, [])
    assert control.stop(RunState(tmp_path / "none")) == "no trainer runs here"


def count(curriculum: Curriculum, kind: str, level: int, answers: list[bool]) -> None:
    for right in answers:
        curriculum.count(kind, level, right)


def test_right_answers_at_the_current_level_raise_it() -> None:
    curriculum, rng = Curriculum(["chat", "list"]), random.Random(1)
    assert curriculum.levels == {"chat": 1, "list": 1}
    count(curriculum, "list", 1, [True] * 399)
    count(curriculum, "list", 3, [True] * 50)
    count(curriculum, "", 1, [True] * 50)  # conversations that were joined
    assert curriculum.levels["list"] == 1
    count(curriculum, "list", 1, [True])
    assert curriculum.levels == {"chat": 1, "list": 2}
    drawn = [curriculum.level("list", rng) for _ in range(300)]
    assert set(drawn) == set(range(1, TOP + 1))
    assert max(drawn, key=drawn.count) == 2
    count(curriculum, "list", 2, [False, True] * 400)
    assert curriculum.levels["list"] == 2
    for level in range(2, TOP + 2):
        count(curriculum, "list", level, [True] * 2000)
    assert curriculum.levels == {"chat": 1, "list": TOP}


def test_a_learnt_kind_gets_a_third_of_its_share_and_the_state_survives() -> None:
    curriculum = Curriculum(["chat", "json", "list"])
    for level in range(1, TOP + 1):
        count(curriculum, "chat", level, [True] * 900)
        count(curriculum, "list", level, [level < TOP] * 900)
    restored = Curriculum(["chat", "json", "list"])
    restored.load(json.loads(json.dumps(curriculum.dump())))
    mixture = restored.mixture({"chat": 0.3, "list": 0.3, "json": 0.4})
    assert mixture == pytest.approx({"chat": 0.1, "list": 0.3, "json": 0.4})
