"""What the answer to one request of a program may cost its host: bytes received, reads, and pieces of the body.

Owns those counts. A server decides into how many reads and pieces its answer falls, and how much comes before it, so
each is bounded, and the event loop runs between reads. `weft.programs.network.client` makes a meter for each request
and wraps the streams of its connections; processor time is charged where the request was made
(`weft.programs.run.calls`).
"""

from __future__ import annotations

import asyncio
import ssl
from contextvars import ContextVar
from typing import Any

import httpcore

from weft.abi.errors import NetworkFailed

READ_BYTES = 8 << 10
"""Of a read, at most: what an HTTP library makes of it is some milliseconds, however small the parts are."""
MAX_READS = 16384
HEAD_BYTES = 1 << 20
"""What may come beside bodies: heads, interim answers and trailers, those of redirects included."""
MAX_PIECES = 32768
"""Pieces of a body (`Transfer-Encoding: chunked`)."""
PIECES_PER_TURN = 32


class HttpMeter:
    """Counts of one request, its redirects included. Every method raises `NetworkFailed` beyond a bound."""

    def __init__(self, max_bytes: int):
        # Small pieces have as many bytes around them as in them.
        self._max_bytes = HEAD_BYTES + 2 * max_bytes
        self._num_bytes = self._num_reads = self._num_pieces = 0

    def read(self, num_bytes: int) -> None:
        """So much was read at once."""
        self._num_reads += 1
        self._num_bytes += num_bytes
        if self._num_reads > MAX_READS:
            raise NetworkFailed(f"the answer came in more than {MAX_READS} reads; its server sends too little at once")
        if self._num_bytes > self._max_bytes:
            raise NetworkFailed(
                f"the server sent more than {self._max_bytes} bytes, which is more than an answer of the size asked "
                "for (max_bytes) needs"
            )

    async def piece(self) -> None:
        """A piece of the body; others get a turn of the loop now and then."""
        self._num_pieces += 1
        if self._num_pieces > MAX_PIECES:
            raise NetworkFailed(f"the answer came in more than {MAX_PIECES} pieces; its server sends too little each")
        if self._num_pieces % PIECES_PER_TURN == 0:
            await asyncio.sleep(0)


current_meter: ContextVar[HttpMeter | None] = ContextVar("current_meter", default=None)
"""Of the request that the current task makes: connections are used by one after the other."""


class MeteredStream(httpcore.AsyncNetworkStream):
    """A connection, whose reads the current request pays for."""

    def __init__(self, stream: httpcore.AsyncNetworkStream):
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """Some bytes; `READ_BYTES` at most."""
        await asyncio.sleep(0)
        data = await self._stream.read(min(max_bytes, READ_BYTES), timeout)
        meter = current_meter.get()
        if meter is not None:
            meter.read(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Write to the stream; only reads are metered."""
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close the stream that is measured."""
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        """As the stream; what comes through it is metered as decrypted."""
        return MeteredStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        """Information about the stream that is measured."""
        return self._stream.get_extra_info(info)
