"""`weft serve` in a separate process with uploaded programs, and a web API for tools, for measurements of applications.

Owns processes, ports and folders; independent of the measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.programs.afar import Json, Wire
from weft.abi.errors import WeftError
from weft.models.random_checkpoints import QWEN3_0_6B, write_checkpoint
from weft.version import __version__
from weft.worker.memory import usable_cores

DISTANCE_MS = 30.0
START_S = 120.0
RANDOM_SHAPES: Mapping[str, Mapping[str, Any]] = {"qwen3-0.6b": QWEN3_0_6B}


class Tools:
    """A web API that answers every request after `work_s`, on this loop."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.work_s = 0.0
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Start the server and return its address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                top = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(top.split(b"content-length:")[1].split(b"\r\n", 1)[0]))
                self.num_requests += 1
                if self.work_s:
                    await asyncio.sleep(self.work_s)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()


class Peer(NamedTuple):
    """Another server of the OpenAI API, which serves the same weights."""

    url: str
    model: str


class Served:
    """A server that is up, as the benchmarks use it."""

    def __init__(self, url: str, tools: Tools, tool_url: str, distance_s: float, peer: Peer | None = None):
        self.tools, self.tool_url = tools, tool_url
        self.tool_wire = Wire(tool_url)
        self.wire = Wire(url, distance_s)
        """As far away as the client is."""
        self.asked = Wire(peer.url, distance_s, peer.model) if peer else self.wire
        """Whom clients ask for completions."""
        self.near = Wire(url)
        self.trusted = False

    async def upload(self, name: str, source: str) -> None:
        """Upload a sandboxed program under this name. Trusted programs are in their folder already."""
        if not self.trusted:
            await self.near.ask("/v1/programs", {"name": name, "source": source})

    async def run(self, name: str, args: Json, *, wire: Wire | None = None) -> Any:
        """Run a program with one request of the client, and return its result. Raises `RuntimeError` if it fails."""
        limits = {"network": [self.tool_url.removeprefix("http://")], "cpu_s": 300}
        run = await (wire or self.wire).ask(f"/v1/programs/{name}/runs", {"args": args, "limits": limits})
        if run["status"] != "finished":
            raise RuntimeError(f"the program {name} ended as {run['status']}: {run.get('error')}")
        return run["result"]

    def close(self) -> None:
        for wire in (self.wire, self.near, self.tool_wire, self.asked):
            wire.close()
        self.tools.close()


@contextlib.asynccontextmanager
async def served(
    model: str,
    programs: Mapping[str, str],
    *,
    trusted: bool = False,
    distance_ms: float = DISTANCE_MS,
    threads: int | None = None,
    engine: Sequence[str] = (),
    peer: Peer | None = None,
) -> AsyncIterator[Served]:
    """A server with these programs by name. `model`: a name, or one of `RANDOM_SHAPES` for random weights;
    `threads`: of the engine's kernels, by default half the cores: a thread that others keep waiting delays all, and
    the program host, the server and the clients are on this machine too. `engine`: further flags of `weft serve`;
    `peer`: a server that clients use instead."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as text, socket.socket() as probe:
        folder = Path(text)
        tools = Tools()
        tool_url = await tools.start()
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        if model in RANDOM_SHAPES:
            shape = RANDOM_SHAPES[model]
            model = str(write_checkpoint(folder / model, shape, dtype=torch.bfloat16, tokenizer=True))
        environment = _environment(folder, tool_url)
        if trusted:
            _lay_out(folder, programs, environment)
        log = (folder / "log").open("w+")
        command = [str(Path(sys.executable).with_name("weft")), "serve", model, "--port", str(port)]
        command += ["--threads", str(threads or max(1, usable_cores() // 2)), *engine]
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        server = Served(f"http://127.0.0.1:{port}", tools, tool_url, distance_ms / 1000, peer)
        server.trusted = trusted
        try:
            await _wait_ready(port, process, folder / "log")
            for name, source in programs.items():
                await server.upload(name, source)
            yield server
        finally:
            server.close()
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                try:
                    await asyncio.wait_for(process.wait(), 20)
                except TimeoutError:
                    process.kill()
                    await process.wait()
            log.close()


def _environment(folder: Path, tool_url: str) -> dict[str, str]:
    return os.environ | {
        "WEFT_PROGRAMS_DATA_DIR": str(folder / "data"),
        "WEFT_PROGRAMS_NETWORK": tool_url.removeprefix("http://"),
        "WEFT_PROGRAMS_START": "eager",
        "WEFT_PROGRAMS_MAX_RUNS_PER_TENANT": "1024",
        "WEFT_SERVER_LOG_LEVEL": "warning",
    }


def _lay_out(folder: Path, programs: Mapping[str, str], environment: dict[str, str]) -> None:
    (folder / "trusted").mkdir()
    for name, source in programs.items():
        (folder / "trusted" / f"{name}.py").write_text(source)
    environment["WEFT_PROGRAMS_TRUSTED_DIR"] = str(folder / "trusted")


async def _wait_ready(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    request = b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    for _ in range(int(START_S / 0.1)):
        if process.returncode is not None:
            raise WeftError(f"weft {__version__} ended with code {process.returncode}: {_end_of(log)}")
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
        await asyncio.sleep(0.1)
    raise WeftError(f"the server was not ready after {START_S:.0f} s: {_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text()[-2000:]
