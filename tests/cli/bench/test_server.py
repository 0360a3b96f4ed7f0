"""The server that a benchmark starts: its data are apart from the user's, and it ends with the benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from weft.cli.bench import server
from weft.cli.settings import load
from weft.server.programs import data_folder


@pytest.mark.parametrize("where", ["WEFT_DATA", "WEFT_PROGRAMS_DATA_DIR", "the settings"])
def test_its_data_is_in_a_folder_of_its_own(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = tmp_path / "user"
    used: list[Path] = []

    @contextlib.contextmanager
    def instead(command: list[str], environment: Mapping[str, str], port: int) -> Iterator[server.ServerProcess]:
        with monkeypatch.context() as there:
            for name in ("WEFT_DATA", "WEFT_PROGRAMS_DATA_DIR"):
                there.delenv(name, raising=False)
            for name, value in environment.items():
                there.setenv(name, value)
            config = load(file=Path(command[command.index("--config") + 1]), environment=environment).config
            used.append(data_folder(config.programs))
        used[-1].mkdir(exist_ok=True)
        yield server.ServerProcess("http://127.0.0.1:1", cast(Any, None))

    monkeypatch.setattr(server, "server_process", instead)
    settings = load()
    if where == "the settings":
        settings = load(flags={"programs.data_dir": ("a flag", str(users))})
    else:
        monkeypatch.setenv(where, str(users))
        settings = load(environment={where: str(users)})
    for _ in range(2):
        with server.own_server(settings):
            assert not used[-1].is_relative_to(users)
            assert used[-1].parent.is_dir()
        assert not used[-1].exists(), "it goes with the server"
    assert used[0] != used[1]


BENCHMARK = """
import os, sys, time
from weft.cli.bench.server import free_port, server_process

port = free_port()
command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
with server_process(command, os.environ, port, ready="/", log=open(os.devnull, "wb")) as server:
    print(server._process.pid, flush=True)
    with server.stopped():
        print("stopped", flush=True)
        while True:
            time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_ends_with_a_benchmark_that_a_signal_ends(number: signal.Signals) -> None:
    # Where the tests themselves run under nohup, SIGHUP would be ignored.
    kept = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK], stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGHUP, kept)
    with benchmark:
        try:
            assert benchmark.stdout is not None
            pid = int(benchmark.stdout.readline())
            assert benchmark.stdout.readline() == "stopped\n"
            benchmark.send_signal(number)
            assert benchmark.wait(60) == 128 + number
        finally:
            benchmark.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
