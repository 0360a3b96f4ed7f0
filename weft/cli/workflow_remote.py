"""A run of a workflow on a server while this command waits for it: its id, the values it waits for, and signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Self

import typer

from weft.cli.workflow_runs import server_command
from weft.client import Client, WorkflowRunEvent
from weft.client.workflow_values import WaitFields
from weft.client.workflows import Workflows

MAX_WAITS = 10
"""Values of a run that are named, each with the command that sets it."""


class ToldWorkflows(Workflows):
    """The workflows of a server; the run that is followed tells its id, and the `external` values it waits for."""

    def __init__(self, client: Client, tell: Callable[[str], None], *, tells_id: bool):
        """`tell` takes a line."""
        super().__init__(client)
        self._url = client.url
        self._tell = tell
        self._tells_id = tells_id
        self._waits: set[str] = set()

    def workflow_server(self) -> Self:
        """As `Client.workflow_server`."""
        return self

    def events(self, run_id: str, after: int | str = 0) -> Generator[WorkflowRunEvent, None, None]:
        """As `Workflows.events`."""
        if self._tells_id:
            self._tell(f"run: {run_id}")
            self._tells_id = False
        with closing(super().events(run_id, after)) as events:
            for event in events:
                if event.wait is not None and event.wait.function is None:
                    self._tell_wait(run_id, event.wait)
                yield event

    def _tell_wait(self, run_id: str, wait: WaitFields) -> None:
        if wait.id in self._waits or len(self._waits) > MAX_WAITS:
            return
        self._waits.add(wait.id)
        if len(self._waits) <= MAX_WAITS:
            how = server_command(f"set {wait.id} VALUE", self._url)
            self._tell(f"row {wait.row} waits for {wait.node}: {how}")
        else:
            self._tell(f"the run waits for more values: {server_command(f'show {run_id}', self._url)}")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP (a closed terminal) end it as Ctrl-C does. Only the first of them does: a
    second one must not interrupt the cancellation of a run. Raises `typer.Exit` with the status of the signal."""
    caught: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not caught:
            caught.append(number)
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    # A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if caught:
            raise typer.Exit(128 + caught[0]) from None
        raise
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
