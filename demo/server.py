"""`weft serve` as a child process: start it on a free loopback port, read its metrics, stop it.

Owns the process and its log file. Knows nothing of what is done with the server.
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

START_S = 120.0
STOP_S = 60.0


class ServerFailed(Exception):
    """The server did not start."""


class ServerProcess:
    """One server with the model that ships in the package."""

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
            env=os.environ | {"WEFT_DATA": self._data.name},
        )
        self._http = httpx.AsyncClient(base_url=self.url, timeout=10, trust_env=False)

    async def wait_ready(self) -> None:
        """Until `/ready` says so. Raises `ServerFailed`."""
        for _ in range(int(START_S / 0.1)):
            if self._process.poll() is not None:
                raise ServerFailed(f"the server ended with code {self._process.returncode}")
            try:
                if (await self._http.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
        raise ServerFailed(f"the server was not ready after {START_S:.0f} s")

    async def wait_not_ready(self) -> int:
        """The status of `/ready` once it is no longer 200, or 200 if it stays so."""
        status = 200
        for _ in range(100):
            status = (await self._http.get("/ready")).status_code
            if status != 200:
                break
            await asyncio.sleep(0.01)
        return status

    async def metrics(self) -> Counter[str]:
        """Every sample of `/metrics`, summed over its labels, by name without the prefix `weft:`."""
        response = await self._http.get("/metrics")
        response.raise_for_status()
        totals: Counter[str] = Counter()
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                totals[sample.name.removeprefix("weft:")] += sample.value
        return totals

    def terminate(self) -> None:
        """Ask the server to finish what it has and end, as a process manager would."""
        self._process.send_signal(signal.SIGTERM)

    async def wait_ended(self) -> int:
        """The exit code. Raises `TimeoutError`."""
        async with asyncio.timeout(STOP_S):
            return await asyncio.to_thread(self._process.wait)

    def log(self, lines: int = 20) -> str:
        """The end of what the server has printed."""
        return "".join(Path(self._log.name).read_text().splitlines(keepends=True)[-lines:])

    async def close(self) -> None:
        """Leave nothing running, whatever has happened."""
        await self._http.aclose()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()
