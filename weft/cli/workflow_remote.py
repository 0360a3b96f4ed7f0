"""A run of a workflow on a server while this command waits for it: its id, and the values it waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Self

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
