"""A `weft serve` process, or another server, that a benchmark starts."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from weft.abi.errors import WeftError
from weft.cli.settings import Settings, as_toml, keys, variable, with_setting
from weft.cli.signals import ended_by_signals

HOST = "127.0.0.1"
POLL_S = 0.1
STOP_S = 60


@contextlib.contextmanager
def own_server(settings: Settings) -> Iterator[str]:
    """Start a server with these engine settings and no data: neither the user's nor that of another benchmark, whose
    programs and measured workflows would change what is measured. Yields its URL when it is ready. Raises `WeftError`
    if it ends before."""
    port = free_port()
    source = "the benchmark"
    environment = {name: value for name, value in os.environ.items() if name not in set(map(variable, keys()))}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        for key, value in {
            "server.host": HOST,
            "server.port": port,
            "server.api_keys": [],
            "server.ssl_certfile": None,
            "server.ssl_keyfile": None,
            "server.log_level": "warning",
            "programs.data_dir": str(Path(folder) / "data"),
        }.items():
            settings = with_setting(settings, key, value, source)
        file = Path(folder) / "weft.toml"
        file.write_text(as_toml(settings), encoding="utf-8")
        command = [sys.executable, "-m", "weft.cli.main", "serve", "--config", str(file)]
        with server_process(command, environment, port) as server:
            yield server.url


class ServerProcess:
    """A server that is ready, and the processes that it has started."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]):
        self.url = url
        self._process = process

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Within, it takes no processor time: some servers look for requests without a pause."""
        import psutil

        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self._process.pid)
            processes = [server, *server.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        if processes:
            # Sent is not stopped yet: wait for that, or for its end, which is left for `Popen` to see.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()


@contextlib.contextmanager
def server_process(
    command: list[str],
    environment: Mapping[str, str],
    port: int,
    *,
    ready: str = "/ready",
    log: IO[bytes] | None = None,
) -> Iterator[ServerProcess]:
    """Start a server; yields it when it answers the path `ready`, and ends it, also when a signal ends the benchmark.
    Raises `WeftError` if it ends before. It writes to `log`, or to the benchmark's own output."""
    with ended_by_signals():
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)  # noqa: S603
        try:
            _wait_ready(process, port, ready)
            yield ServerProcess(f"http://{HOST}:{port}", process)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, ready: str) -> None:
    """Wait without a time limit, because a server that cannot load its model exits."""
    import httpx

    with httpx.Client(base_url=f"http://{HOST}:{port}") as client:
        while process.poll() is None:
            try:
                if client.get(ready).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(POLL_S)
    raise WeftError(f"the benchmark's server ended with status {process.returncode}; see its messages above")


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port
