"""Signals to the whole process group of `weft serve`, as `timeout`, a terminal and service managers send them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.cli.test_serve import SMALL, serving
from weft.client import AsyncClient, Run, ServerError

pytestmark = pytest.mark.slow
TOKENS = 400
DRAIN_S = 1.0
INTERCEPTED = """
from weft.sdk import Context, run

async def main(number):
    ctx = Context().fill(f"Number {number} waits for a tool that does not return.")
    await ctx.generate_until(max_tokens=2)
    run.send("waiting")
    await run.receive()
"""
STREAM = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "logprobs": 0}


def signal_group(front: subprocess.Popen[str], number: signal.Signals) -> None:
    os.killpg(os.getpgid(front.pid), number)


def ended_well(front: subprocess.Popen[str]) -> str:
    """The log of a server that has ended with status 0 and without a traceback."""
    _, log = front.communicate(timeout=60)
    assert front.returncode == 0, log
    assert "Traceback" not in log
    assert "Error" not in log, log
    return log


def num_tokens(answer: httpx.Response) -> int:
    """Tokens of a stream that is complete."""
    *events, last = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
    assert last == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return sum(len(choice["logprobs"]["tokens"]) for choice in choices)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_stream_is_finished_before_the_server_ends(number: signal.Signals) -> None:
    with serving(*SMALL, own_group=True) as (front, client):
        with client.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = answer.iter_raw()
            first = next(lines)
            signal_group(front, number)
            rest = b"".join(lines)
        whole = httpx.Response(200, content=first + rest)
        assert num_tokens(whole) == TOKENS
        ended_well(front)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_an_idle_server_ends_without_a_word(number: signal.Signals) -> None:
    with serving(*SMALL, own_group=True, WEFT_PROGRAMS_START="eager") as (front, client):
        assert client.post("/v1/completions", json=STREAM | {"stream": False, "max_tokens": 2}).status_code == 200
        signal_group(front, number)
        assert "killed by" not in ended_well(front)


def test_a_signal_that_is_repeated_at_once_counts_once() -> None:
    """As from `timeout`, which signals its child and then the process group."""
    with serving(*SMALL, own_group=True) as (front, client):
        with client.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = answer.iter_raw()
            first = next(lines)
            front.send_signal(signal.SIGTERM)
            signal_group(front, signal.SIGTERM)
            rest = b"".join(lines)
        assert num_tokens(httpx.Response(200, content=first + rest)) == TOKENS
        ended_well(front)


async def ends_of_intercepted(url: str, front: subprocess.Popen[str], num_runs: int) -> list[str | None]:
    """What the readers of runs are told after a signal: the status of the run, or the code of an error."""
    async with AsyncClient(url) as client:
        runs = [await client.programs.start("waits", number) for number in range(num_runs)]
        waiting = asyncio.Semaphore(0)

        async def follow(run: Run) -> str | None:
            last = None
            try:
                async for event in client.runs.messages(run.id):
                    if event.type == "message":
                        waiting.release()
                    last = event.run
            except ServerError as error:
                return error.code
            return None if last is None else last.status

        following = [asyncio.create_task(follow(run)) for run in runs]
        for _ in runs:
            await waiting.acquire()
        signal_group(front, signal.SIGTERM)
        return await asyncio.gather(*following)


def drained(num_runs: int, folder: Path, exit_s: float) -> None:
    """A server drains while runs wait: each reader is told an end, every process ends and no file is left."""
    with tempfile.TemporaryDirectory() as temporary:  # paths of sockets are short: no room for a test's own folder
        drained_in(temporary, num_runs, folder, exit_s)
        assert os.listdir(temporary) == []


def drained_in(temporary: str, num_runs: int, folder: Path, exit_s: float) -> None:
    (folder / "waits.py").write_text(INTERCEPTED)
    settings = {
        "TMPDIR": temporary,
        "WEFT_SERVER_DRAIN_S": str(DRAIN_S),
        "WEFT_PROGRAMS_TRUSTED_DIR": str(folder),
        "WEFT_PROGRAMS_DATA_DIR": str(folder / "data"),
        "WEFT_PROGRAMS_MAX_RUNS_PER_TENANT": str(num_runs),
    }
    # Nothing reads the log while the runs start, and a server waits for the reader of a full pipe.
    with serving(*SMALL, "--log-level", "error", own_group=True, **settings) as (front, client):
        answered = client.post("/v1/completions", json=STREAM | {"stream": False, "max_tokens": 2})
        assert answered.status_code == 200, "a plain turn, which nobody will extend"
        ends = asyncio.run(ends_of_intercepted(str(client.base_url), front, num_runs))
        _, log = front.communicate(timeout=exit_s)
        with pytest.raises(ProcessLookupError):
            os.killpg(front.pid, 0)
    assert front.returncode == 0, log
    assert "Traceback" not in log
    assert len(ends) == num_runs
    assert set(ends) <= {"cancelled", "shutting_down"}


def test_programs_that_wait_are_told_of_a_drain(tmp_path: Path) -> None:
    drained(20, tmp_path, exit_s=60)


@pytest.mark.soak
@pytest.mark.timeout(540)
def test_a_thousand_programs_that_wait_are_told_of_a_drain(tmp_path: Path) -> None:
    drained(1000, tmp_path, exit_s=120)
