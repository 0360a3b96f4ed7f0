"""`weft serve` as a child process: start it on a free port of the loopback interface, read its metrics, stop it.

Owns the process and its log file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_S = 600.0
"""Longest wait for any event, in seconds. It ends a tour that hangs; no expectation depends on it."""
POLL_S = 0.05


class ServerFailed(Exception):
    """The server ended before it was ready."""


class ServerProcess:
    """A server with the model in the package, and a data directory of its own."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.command = ["weft", "serve", "--port", str(port)]
        self._log = tempfile.NamedTemporaryFile(mode="w+", prefix="weft-demo-", suffix=".log")  # noqa: SIM115
        self._data = tempfile.TemporaryDirectory(prefix="weft-demo-")
        program = Path(sys.executable).with_name("weft")
        self._process = subprocess.Popen(
            [str(program), *self.command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"WEFT_DATA": self._data.name, "WEFT_SERVER_DRAIN_S": f"{PATIENCE_S:g}"},
        )
        self._http = httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, trust_env=False)

    async def wait_ready(self) -> None:
        """Return when `/ready` answers 200. Raises `ServerFailed` if the server ends, `TimeoutError`."""
        async with asyncio.timeout(PATIENCE_S):
            while self._process.poll() is None:
                try:
                    if (await self._http.get("/ready")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(POLL_S)
        raise ServerFailed(f"the server ended with code {self._process.returncode}")

    async def wait_not_ready(self) -> int:
        """Return the status of `/ready` once it is not 200. Raises `TimeoutError`."""
        async with asyncio.timeout(PATIENCE_S):
            while (status := (await self._http.get("/ready")).status_code) == 200:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        return status

    async def metrics(self) -> Counter[str]:
        """All samples of `/metrics`, each summed over its labels, by name without the prefix `weft:`."""
        response = await self._http.get("/metrics")
        response.raise_for_status()
        totals: Counter[str] = Counter()
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                totals[sample.name.removeprefix("weft:")] += sample.value
        return totals

    def terminate(self) -> None:
        """Send SIGTERM, on which the server finishes its requests and ends."""
        self._process.send_signal(signal.SIGTERM)

    async def wait_ended(self) -> int:
        """Return the exit code of the server once it has ended. Raises `TimeoutError`."""
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.to_thread(self._process.wait)

    def log(self, lines: int = 20) -> str:
        """The last lines of the server's output."""
        return "".join(Path(self._log.name).read_text().splitlines(keepends=True)[-lines:])

    async def close(self) -> None:
        """Kill the server if it still runs, and delete its log."""
        await self._http.aclose()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()
