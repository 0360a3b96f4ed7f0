"""Ends runs of this process from within, as Ctrl-C does from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.workflow.run.instructions import TaskName
from weft.workflow.run.journal import RunJournal


class Interrupted(BaseException):
    """What ends a run."""


def interrupt_when(is_time: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a run that keeps its values, before it keeps the next one."""
    keep = RunJournal.keep

    def keep_or_end(journal: RunJournal, task: TaskName, value: Any) -> None:
        if is_time():
            raise Interrupted
        keep(journal, task, value)

    monkeypatch.setattr(RunJournal, "keep", keep_or_end)
