"""A client that streams answers of any server with OpenAI's API and records the time of each event.

Token counts are the server's (`usage` of the last event), never estimates. Every request results in one `Outcome`; an
error is a `Failure`, and is not raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from weft.abi.errors import WeftError
from weft.cli.bench.measure import Failure, Outcome, Timing
from weft.cli.bench.server_counts import read_counts
from weft.cli.bench.workload import BenchRequest

if TYPE_CHECKING:
    import httpx

Endpoint = Literal["completions", "chat"]
PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
TIMEOUT_S = 600.0
_SHOWN_CHARS = 300


class Target(NamedTuple):
    """A server and the options of requests to it."""

    url: str | None
    """None: the benchmark starts a server."""
    model: str | None = None
    """None: the first model that the server lists."""
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    ignore_eos: bool = True
    """Request answers of an exact length. An extension of OpenAI's API in Weft, vLLM and SGLang."""
    timeout_s: float = TIMEOUT_S
    """Time limit of one request, from its first byte to its last."""


class StreamedAnswer:
    """The events of one request so far."""

    def __init__(self) -> None:
        self.came_s: list[float] = []
        self.text: list[str] = []
        self.token_ids: list[int] = []
        """Present if the request asked for them (`return_token_ids`) and the server supports the field."""
        self.usage: dict[str, Any] | None = None


@asynccontextmanager
async def open_client(target: Target) -> AsyncIterator[LoadClient]:
    """A client of a server. Raises `WeftError` if no model is named and the server lists none."""
    import httpx

    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = (target.url or "").rstrip("/").removesuffix("/v1")
    # A request has one overall time limit, set in `send`; httpx's limits apply to single reads.
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=None, limits=limits) as http:  # noqa: S113
        yield LoadClient(http, target, target.model or await _first_model(http, target.timeout_s))


class LoadClient:
    """Sends requests to one model of one server."""

    def __init__(self, http: httpx.AsyncClient, target: Target, model: str):
        self._http = http
        self._target = target
        self._path = PATHS[target.endpoint]
        self.model = model

    async def send(self, request: BenchRequest, due_s: float, answer: StreamedAnswer | None = None) -> Outcome:
        """Stream the answer to its end. `answer` collects the text and ids, for a caller that continues them."""
        import httpx

        answer = answer or StreamedAnswer()
        sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self._stream(self._body(request), answer)
        except _Failed as error:
            return Failure(error.kind, error.message)
        except TimeoutError:
            return Failure("timeout", f"no answer within {self._target.timeout_s:g} s")
        except httpx.ConnectError as error:
            return Failure("connect", f"{self._http.base_url} cannot be reached: {error}")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Failure("disconnected", f"{type(error).__name__}: {error}")
        return self._outcome(request, answer, due_s, sent_s)

    async def counts(self) -> dict[str, float]:
        """What the server has counted so far, by figure (`server_counts`); empty for a server that is not Weft."""
        import httpx

        try:
            response = await self._http.get("/metrics", timeout=self._target.timeout_s)
            return read_counts(response.text) if response.status_code == httpx.codes.OK else {}
        except (httpx.HTTPError, ValueError):
            return {}

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if self._target.endpoint == "chat":
            content = request.prompt
            prompt = {"messages": [{"role": "user", "content": content}] if isinstance(content, str) else content}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": request.output_len,
            "temperature": 0,
            **({"ignore_eos": True} if self._target.ignore_eos else {}),
            **request.fields,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _stream(self, body: dict[str, Any], answer: StreamedAnswer) -> None:
        content = msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        async with self._http.stream("POST", self._path, content=content, headers=headers) as response:
            if response.status_code != 200:
                await response.aread()
                raise _Failed(f"http_{response.status_code}", response.text[:_SHOWN_CHARS])
            ended = False
            async for event in _events(response):
                if event == b"[DONE]":
                    ended = True
                else:
                    _take(event, answer)
            if not ended:
                raise _Failed("disconnected", "the stream ended without [DONE]")

    def _outcome(self, request: BenchRequest, answer: StreamedAnswer, due_s: float, sent_s: float) -> Outcome:
        if answer.usage is None:
            return Failure("no_usage", "the stream has no usage, and tokens are not estimated from events")
        try:
            prompt, output = int(answer.usage["prompt_tokens"]), int(answer.usage["completion_tokens"])
            cached = (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except (LookupError, TypeError, ValueError, AttributeError):
            return Failure("malformed", f"this usage cannot be read: {str(answer.usage)[:_SHOWN_CHARS]}")
        if not answer.came_s or not output:
            return Failure("empty", "the answer has no tokens")
        if self._target.ignore_eos and output != request.output_len:
            return Failure("length", f"{request.output_len} tokens were requested and {output} received")
        return Timing(due_s, sent_s, answer.came_s, output, prompt, cached)


class _Failed(Exception):
    def __init__(self, kind: str, message: str):
        self.kind, self.message = kind, message


def _take(data: bytes, answer: StreamedAnswer) -> None:
    """Record the content of an event, and its time if it has a part of the answer."""
    came_s = time.perf_counter()
    try:
        event = msgspec.json.decode(data)
        if error := event.get("error"):
            raise _Failed("server_error", str(error)[:_SHOWN_CHARS])
        for choice in event.get("choices") or ():
            if _brings_tokens(choice):
                answer.came_s.append(came_s)
            answer.text.append(_text(choice) or "")
            answer.token_ids.extend(choice.get("token_ids") or ())
        if usage := event.get("usage"):
            answer.usage = usage
    except (msgspec.DecodeError, AttributeError, TypeError) as error:
        raise _Failed("malformed", f"{error} in {data[:_SHOWN_CHARS]!r}") from error


def _text(choice: dict[str, Any]) -> str | None:
    text: str | None = choice["delta"].get("content") if "delta" in choice else choice.get("text")
    return text


def _brings_tokens(choice: dict[str, Any]) -> bool:
    """Whether an event has tokens. In a chat, an event with only a role or a finish reason has none. In a completion
    every event has some: a token without text may be a part of a character."""
    if "delta" not in choice:
        return "text" in choice
    delta = choice["delta"]
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")) or bool(
        choice.get("token_ids")
    )


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event; comments and other fields are skipped."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


async def _first_model(http: httpx.AsyncClient, timeout_s: float) -> str:
    import httpx

    try:
        response = await http.get("/v1/models", timeout=timeout_s)
        response.raise_for_status()
        name: str = response.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, httpx.HTTPStatusError):
            status = error.response.status_code
            if status in (401, 403):
                raise WeftError(f"{http.base_url} wants another key: set WEFT_API_KEY or --api-key") from error
            raise WeftError(
                f"{http.base_url} does not list its models (status {status}), so name one with --model"
            ) from error
        raise WeftError(f"{http.base_url} does not list its models, so name one with --model: {error}") from error
    return name
