"""A whole engine on a fake worker that can be killed and replaced, as an `EngineClient`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from tests.programs.stepped_engine import SteppedEngine
from weft.abi.errors import EngineDead
from weft.core.wire import Command, EngineInfo, Envelope


class KillableEngine(SteppedEngine):
    """Dies in place of sending the messages of these numbers, and is back in the next turn of the loop."""

    def __init__(self, dies_at: Collection[int] = (), **spec: object):
        self._dies_at, self._spec = set(dies_at), spec
        self._is_dying = False
        self.num_messages = 0
        self.num_deaths = 0
        self.num_lease_ends = 0
        self.delivered: list[Command] = []
        """To the engine that is there."""
        super().__init__(**spec)

    async def wait_ready(self) -> EngineInfo:
        """Until it is restarted."""
        return await self._requests.until_ready()

    def die(self) -> None:
        """The process is gone, with the messages on their way to and from it."""
        self.num_deaths += 1
        self._is_dying = False
        self._inbox.clear()
        self.engine.close()
        self._requests.fail(EngineDead("the engine was killed; it is being restarted, try again in a moment"))

    def restart(self) -> None:
        """Another engine takes its place. Its client is the same."""
        client = self._requests
        self.delivered.clear()
        super().__init__(**self._spec)
        self._requests = client
        client.begin(self.engine.info)

    def end_lease(self) -> None:
        """The engine drops its client, which hears of operations under way, and of nothing else."""
        self.num_lease_ends += 1
        self.engine.drop_client(1)

    def _receive(self, envelope: Envelope) -> None:
        self.num_messages += 1
        if self._is_dying or self.num_messages in self._dies_at:
            self._is_dying = True
        else:
            super()._receive(envelope)

    def _deliver(self, commands: list[Command]) -> None:
        self.delivered += commands
        super()._deliver(commands)

    def _turn(self) -> None:
        if self.ready:
            super()._turn()
            if self._is_dying:
                self.die()
                asyncio.get_running_loop().call_soon(self.restart)
