"""The demo tests everything at once: the command, its processes, a real client, real signals."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from demo import scenes, server
from demo.scenes import Report, Stage


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_demo_finds_everything_as_expected() -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "demo.run"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_slow_machine_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(server.subprocess, "Popen", lambda command, **options: started.update(options))
    asyncio.run(server.ServerProcess()._http.aclose())
    assert float(started["env"]["WEFT_SERVER_DRAIN_S"]) == server.PATIENCE_S >= 600

    class SlowServer:
        polls = 0

        async def metrics(self) -> Counter[str]:
            self.polls += 1
            return Counter(num_sequences=self.polls < 500)

    monkeypatch.setattr(scenes, "POLL_S", 0)
    moments = iter(range(0, 10**6, 60))  # a minute passes at every look at the clock
    monkeypatch.setattr(scenes, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    slow = SlowServer()
    asyncio.run(Stage(slow, None, "model", Report()).settled(lambda metrics: not metrics["num_sequences"]))  # type: ignore[arg-type]
    assert slow.polls == 500
