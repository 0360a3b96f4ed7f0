"""Processes that are killed while clients stream: nobody hangs, nothing is left over, the next request is answered."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cli.test_serve import SMALL, free_port, serving

pytestmark = pytest.mark.slow
BODY = {"prompt": "Once upon a time", "n": 4, "max_tokens": 1900, "ignore_eos": True}
SHORT = {"prompt": "Once upon a time", "max_tokens": 3}


def events(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


def engine_of(front: int) -> psutil.Process:
    [engine] = [child for child in psutil.Process(front).children() if "weft.engine.process" in child.cmdline()]
    return engine


def until_running(client: httpx.Client, count: int) -> None:
    while True:
        found = client.get("/metrics").text.splitlines()
        [running] = [line for line in found if line.startswith("weft:num_requests_running{")]
        if float(running.split()[-1]) >= count:
            return


def test_a_killed_front() -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        with serving(*SMALL, port=port, TMPDIR=folder) as (front, client):
            assert list(Path(folder).glob("weft-*/engine-*"))
            engine = engine_of(front.pid)
            with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
                stream = events(answer)
                next(stream)
                front.send_signal(signal.SIGKILL)
                with pytest.raises(httpx.TransportError):
                    list(stream)
        # At once, while the engine may still be about to end.
        with serving(*SMALL, port=port, TMPDIR=folder) as (front, client):
            assert client.post("/v1/completions", json=SHORT).status_code == 200
            assert not psutil.wait_procs([engine], timeout=60)[1]
            assert len(list(Path(folder).iterdir())) == 1
            front.send_signal(signal.SIGTERM)
            front.communicate(timeout=60)
        assert not list(Path(folder).iterdir())


def test_a_killed_engine() -> None:
    with serving(*SMALL) as (front, client), ThreadPoolExecutor(1) as pool:
        whole = pool.submit(client.post, "/v1/completions", json=BODY)
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            stream = events(answer)
            next(stream)
            until_running(client, 8)
            engine = engine_of(front.pid)
            engine.kill()
            *_, last = stream
            error = json.loads(last)["error"]
        assert (answer.status_code, error["type"], error["code"]) == (200, "server_error", "engine_unavailable")
        refused = whole.result(60)
        assert refused.status_code == 503
        assert refused.json()["error"] == error
        assert int(refused.headers["retry-after"]) > 0
        while client.get("/ready").status_code != 200:
            assert front.poll() is None
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        assert engine_of(front.pid).pid != engine.pid
