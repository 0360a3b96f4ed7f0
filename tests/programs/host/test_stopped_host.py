"""A program host that is stopped by the system for longer than its deadline is replaced, and its runs end."""

from __future__ import annotations

import os
import signal

import pytest

from tests.programs.host.test_process import CALLER, ECHO, run, spec
from weft.abi.errors import HostDead
from weft.config import ProgramsConfig
from weft.programs.host.client import HostClient


def test_a_stopped_host_is_replaced_and_its_runs_end() -> None:
    async def test(client: HostClient) -> None:
        waiting = [await client.start(spec(ECHO), CALLER) for _ in range(2)]
        listener = waiting[0].messages()
        await anext(listener)
        stopped = client.pid or 0
        os.kill(stopped, signal.SIGSTOP)
        waiting[1].cancel()  # which it does not hear
        for one in waiting:
            with pytest.raises(HostDead, match="did not answer"):
                await one.answer()
        again = await client.start(spec(ECHO), CALLER)
        again.send(b"2")
        assert await again.answer() == b"2"
        assert client.pid != stopped
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)

    run(test, ProgramsConfig(progress_deadline_s=1.0))
