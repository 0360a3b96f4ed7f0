"""The environment of an application that is a remote client of `/v1/completions`.

Prompts and answers are token ids, so that nothing is tokenized twice, and the client is a few lines over asyncio's
streams: its processor time is small, because on one machine it is taken from the server.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from bench.programs.applications import Counted, Mailbox, Text, Tokens
from bench.programs.beside import CHILD

Json = dict[str, Any]


class Wire:
    """HTTP/1.1 to one server over connections that stay open. `distance_s`: added to every round trip, half before the
    request and half after it."""

    def __init__(self, url: str, distance_s: float = 0.0, model: str = ""):
        self.model = model
        """The model that is asked for; empty: the first that the server lists."""
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._half_s = distance_s / 2
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes) -> bytes:
        """Send a request and return the body of the response. Raises `RuntimeError` for an error status."""
        if self._half_s:
            await asyncio.sleep(self._half_s)
        # Servers close connections that were idle for some seconds.
        while self._idle and self._idle[-1][0].at_eof():
            self._idle.pop()[1].close()
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        top = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        fields = dict(line.lower().split(": ", 1) for line in top.split("\r\n")[1:] if line)
        answer = await reader.readexactly(int(fields["content-length"]))
        self._idle.append((reader, writer))
        if top.split(" ", 2)[1] not in ("200", "202"):
            raise RuntimeError(f"{path} answered {top.split(chr(13), 1)[0]}: {answer[:500].decode(errors='replace')}")
        if self._half_s:
            await asyncio.sleep(self._half_s)
        return answer

    async def ask(self, path: str, body: Json) -> Json:
        """Post a JSON value and return the JSON answer."""
        found: Json = json.loads(await self.post(path, json.dumps(body).encode()))
        return found

    def close(self) -> None:
        """Close all open connections to the server."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


class Afar:
    """A `World` whose texts are lists of tokens, sent whole with every request; the server may have them cached."""

    def __init__(self, server: Wire, tools: Wire):
        self.counted = Counted()
        self._server, self._tools = server, tools

    def text(self) -> Text:
        return AfarText(self.counted, self._server)

    async def tool(self, tokens: Tokens) -> None:
        # No latency here: the paper adds it only between client and server.
        await self._tools.post("/tool", bytes(len(tokens)))

    async def execute(self, number: int) -> int:
        names: dict[str, Any] = {}
        exec(CHILD, names)
        return int(names["main"](number))

    def mailbox(self, name: str) -> Mailbox:
        return AfarMailbox()

    async def repeat(self, prompt: Tokens, count: int) -> Tokens:
        text = self.text()
        text.fill(prompt)
        return await text.generate(count)


class AfarText:
    def __init__(self, counted: Counted, server: Wire, tokens: Tokens | None = None):
        self._counted, self._server = counted, server
        self._tokens: Tokens = list(tokens or ())

    def fill(self, tokens: Tokens) -> None:
        self._counted.filled += len(tokens)
        self._tokens += tokens

    async def generate(self, count: int) -> Tokens:
        found = await complete(self._server, self._tokens, count)
        self._counted.generated += len(found)
        self._tokens += found
        return found

    def fork(self) -> Text:
        return AfarText(self._counted, self._server, self._tokens)

    def drop(self) -> None:
        pass


class AfarMailbox:
    def __init__(self) -> None:
        self._queue: asyncio.Queue[Tokens] = asyncio.Queue()

    def send(self, tokens: Tokens) -> None:
        self._queue.put_nowait(tokens)

    async def get(self) -> Tokens:
        return await self._queue.get()


async def complete(server: Wire, prompt: Tokens, count: int) -> Tokens:
    """Generate exactly `count` further greedy tokens."""
    body: Json = {"model": server.model} if server.model else {}
    body |= {
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = await server.ask("/v1/completions", body)
    return list(answer["choices"][0]["token_ids"])
