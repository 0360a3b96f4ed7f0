"""Two thousand concurrent requests through HTTP to a server process; a tenth of the clients leave early."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

REQUESTS = 2000
SHARED = "You are a patient assistant who knows the harbour, the mill and the market of this town. " * 4


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "weft.cli.main", "serve", "--port", str(port), "--num-pages", "1500"]
    command += ["--max-context", "512", "--log-level", "error"]
    process = subprocess.Popen(command, env=os.environ | {"WEFT_SERVER_MAX_CONCURRENT_REQUESTS": "4096"})
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(_ready(url, process))
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


async def _ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(120):
        while process.poll() is None:
            try:
                if (await client.get(url + "/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
        raise AssertionError(f"the server ended with status {process.returncode}")


async def _metrics(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    text = (await client.get(url + "/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^weft:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)}


async def _one(client: httpx.AsyncClient, url: str, index: int) -> str:
    body = {
        "messages": [
            {"role": "system", "content": SHARED if index % 3 else SHARED[: index % 200]},
            {"role": "user", "content": f"Question {index}: what is {index} plus {index % 7}?"},
        ],
        "max_tokens": 1 + index % 16,
        "seed": index,
        "priority": index % 3,
        "stream": index % 2 == 0,
        "n": 2 if index % 17 == 0 else 1,
    }
    if index % 10 == 0:
        async with client.stream("POST", url + "/v1/chat/completions", json=body | {"max_tokens": 300, "stream": True}):
            return "left"  # the head has come with the first token; leaving closes the connection
    response = await client.post(url + "/v1/chat/completions", json=body)
    if response.status_code != 200:
        return f"{response.status_code}: {response.text[:200]}"
    if body["stream"]:
        return "done" if response.text.rstrip().endswith("data: [DONE]") else "cut"
    return "done" if all(c["finish_reason"] for c in response.json()["choices"]) else "unfinished"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_none_hangs_and_no_page_is_left(url: str) -> None:
    async def test() -> tuple[list[str], dict[str, float]]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=600) as client:
            results = await asyncio.gather(*(_one(client, url, index) for index in range(REQUESTS)))
            async with asyncio.timeout(60):
                while (await _metrics(client, url))["num_sequences"]:  # noqa: ASYNC110  nothing to wait on
                    await asyncio.sleep(0.1)
            return results, await _metrics(client, url)

    results, metrics = asyncio.run(test())
    assert {result: results.count(result) for result in set(results)} == {"done": 1800, "left": 200}
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_pages_free"] + metrics["kv_pages_cached"] == metrics["kv_pages"]
    assert metrics["kv_cache_usage_perc"] == 0
    assert metrics["prefix_cache_hits_total"] > 0.5 * metrics["prefix_cache_queries_total"]
