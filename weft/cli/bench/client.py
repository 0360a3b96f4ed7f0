"""A client that measures: streams completions and notes when each event came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from weft.cli.bench.measure import Timing
from weft.core.errors import WeftError

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 600.0


@asynccontextmanager
async def open_load(url: str, model: str | None, api_key: str | None) -> AsyncIterator[Load]:
    """A client of a server, which is asked for its model where none is named. Raises `WeftError`."""
    import httpx

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
        yield Load(client, model or await _first_model(client))


class Load:
    """Sends requests to one model of one server."""

    def __init__(self, client: httpx.AsyncClient, model: str):
        self._client = client
        self.model = model

    async def complete(self, prompt: list[int], output_len: int) -> Timing:
        """Stream a completion of exactly `output_len` tokens. Raises `WeftError` for any other end."""
        import httpx

        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        came: list[float] = []
        num_tokens = 0
        sent = time.perf_counter()
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise WeftError(f"the server answered {response.status_code}: {response.text[:300]}")
                async for event in _events(response):
                    if event.get("choices"):
                        came.append(time.perf_counter())
                    if event.get("usage"):
                        num_tokens = int(event["usage"]["completion_tokens"])
        except httpx.HTTPError as error:
            raise WeftError(f"{type(error).__name__}: {error}") from error
        if num_tokens != output_len or not came:
            raise WeftError(f"{output_len} tokens were asked for and {num_tokens} came")
        return Timing(sent, came, num_tokens)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise WeftError(f"the server ended a request: {event['error']}")
            yield event


async def _first_model(client: httpx.AsyncClient) -> str:
    import httpx

    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        name: str = response.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise WeftError(f"{client.base_url} does not list its models: {error}") from error
    return name
