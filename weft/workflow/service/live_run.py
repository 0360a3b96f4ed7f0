"""`WorkflowRun`: a run as its clients see it, while it is carried out and after its end.

Clients read what there is and wait for changes; nothing is queued for them, so slow ones cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from weft.workflow.run.feed import RunFeed
from weft.workflow.service.record import WorkflowRunRecord


class RunWait(NamedTuple):
    """A value that a run waits for."""

    number: int
    """In the order in which they were asked for."""
    id: str
    row: int
    node: str
    """Such as `notes[3].verdict`."""
    function: str | None
    """The function of the client whose result it is."""
    args: Mapping[str, Any] | None
    schema: Mapping[str, Any] | None
    since_s: float
    """Seconds since 1970, as the next."""
    until_s: float | None
    """When the row fails."""


class WorkflowRun:
    """Used from one event loop."""

    def __init__(self, record: WorkflowRunRecord):
        self.record = record
        self.on_cancel: Callable[[str], None] | None = None
        """Set while this process carries the run out."""
        self.waits: dict[str, RunWait] = {}
        """Values that the run waits for, by id, oldest first."""
        self.feed: RunFeed | None = None
        """What the run tells while this process carries it out."""
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        if record.ended:
            self._ended.set()

    @property
    def id(self) -> str:
        """The id of the run."""
        return self.record.id

    def update(self, **changes: object) -> None:
        """Change fields of the record, and wake those who wait for changes."""
        self.record = msgspec.structs.replace(self.record, **changes)
        self.notify()
        if self.record.ended:
            self._ended.set()

    def notify(self) -> None:
        """Wake those who wait for changes."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def changes(self) -> asyncio.Event:
        """What is set at the next change. Ask for it before reading, so that no change is missed."""
        return self._news

    async def wait(self) -> WorkflowRunRecord:
        """Wait for the end. Several tasks may wait."""
        await self._ended.wait()
        return self.record

    def cancel(self, reason: str = "the run was cancelled") -> None:
        """End the run as cancelled. Does nothing if it has ended."""
        if self.on_cancel is not None:
            self.on_cancel(reason)
