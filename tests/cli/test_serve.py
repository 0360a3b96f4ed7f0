"""`weft serve` as its users start it: a process, requests, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from weft.models.random_checkpoints import write_tiny

pytestmark = pytest.mark.slow
SMALL = ("--num-pages", "256", "--max-running", "8", "--threads", "1")
HEADERS = {"authorization": "Bearer secret"}


def start(*arguments: str, own_group: bool = False, **environment: str) -> subprocess.Popen[str]:
    """`own_group`: so that a signal to its process group spares the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    return subprocess.Popen(
        [sys.executable, "-m", "weft.cli.main", "serve", *arguments],
        env=clean | environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=own_group,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(
    *arguments: str, port: int | None = None, own_group: bool = False, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    port = port or free_port()
    process = start(*arguments, "--port", str(port), own_group=own_group, **environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=60) as client:
            while True:
                assert process.poll() is None, process.stderr.read()
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/ready").status_code == 200:
                        break
                time.sleep(0.1)
            yield process, client
    finally:
        process.kill()
        process.communicate()


def test_two_models_keys_and_a_signal(tmp_path: Path, weft):
    other = write_tiny(tmp_path / "other", tokenizer=True)
    arguments = ("weft-tiny", str(other), "--served-model-name", "one", "--served-model-name", "two", *SMALL)
    with serving(*arguments, WEFT_SERVER_API_KEYS="somebody=secret") as (process, client):
        assert {model["id"] for model in client.get("/v1/models").json()["data"]} == {"one", "two"}
        for model in ("one", "two"):
            body = {"model": model, "prompt": "Once upon a time", "max_tokens": 3, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 3
        url = str(client.base_url)
        chat = weft("chat", "one", "--url", url, "--api-key", "secret", "--max-tokens", "3", input="Hello\n")
        assert chat.exit_code == 0, chat.stderr
        assert chat.stdout.strip()
        assert "answered 401" in weft("chat", "one", "--url", url, "--api-key", "wrong", input="Hello\n").stderr
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "secret" not in log
    assert "Traceback" not in log


def test_a_port_that_is_taken_is_told_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start("--port", port)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert (
        err
        == f"weft: the server cannot listen on 127.0.0.1 port {port}: Address already in use; see --host and --port\n"
    )


def test_a_setting_that_does_not_fit_ends_the_server():
    process = start("--port", str(free_port()), "--max-context", "99999", "--log-level", "error")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("weft: max_context 99999 exceeds the 2048 positions")


def engines_of(front: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(front.pid).children() if "weft.engine.process" in child.cmdline()]


def test_an_interrupt_does_not_wait_for_a_tokenizer():
    slow = (
        "import sys, time, weft.server.run as run\n"
        "run.prepare = lambda configs: (print('loading', file=sys.stderr, flush=True), time.sleep(3600))\n"
        "from weft.cli.main import main\n"
        f"sys.argv = ['weft', 'serve', '--port', '{free_port()}', *{SMALL!r}]\n"
        "main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", slow], stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "loading\n"
    while not (engines := engines_of(process)):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    engines[0].wait(60)


def test_a_model_without_a_tokenizer_ends_the_engine_that_loads_it(tmp_path: Path):
    write_tiny(tmp_path / "model")
    with tempfile.TemporaryDirectory() as sockets:  # pytest's own folders are too long for sockets
        process = start(str(tmp_path / "model"), "--port", str(free_port()), TMPDIR=sockets)
        _, err = process.communicate(timeout=60)
        assert list(Path(sockets).glob("weft-*")) == [], "the engine has ended, and its folder is gone"
    assert process.returncode == 1
    assert "has no tokenizer.json" in err.splitlines()[-1]
