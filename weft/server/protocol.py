"""HTTP/1.1 on one connection, with bounds that uvicorn's parser does not have: size of a head and time to send it.

Owns what happens before there is a request to answer: heads that are too long, too slow, or not HTTP. It knows nothing
of the application.
"""

from __future__ import annotations

import asyncio

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from weft.server.errors import ErrorBody, ErrorResponse

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line with all headers."""
HEAD_TIMEOUT_S = 30.0
"""From the first byte of a request, or the opening of its connection, to the end of its headers."""


class _HeadTooLarge(Exception):
    pass


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a bounded head."""

    _head_bytes = 0
    _fed_bytes = 0
    """Of a head that spans several reads; the parser tells a header only when it is complete."""
    _in_head = False
    _too_large = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse a head that does not end."""
        was_in_head = self._in_head
        super().data_received(data)
        if self._in_head and was_in_head:
            self._fed_bytes += len(data)
            if self._fed_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._too_large = True
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._fed_bytes = True, 0, 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete; the application takes over."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not a request, in the shape of all errors, and close."""
        status, text = 400, "This is not a valid HTTP/1.1 request."
        if self._too_large:
            status, text = 431, f"The request's headers exceed {MAX_HEAD_BYTES} bytes."
        body = msgspec.json.encode(ErrorResponse(ErrorBody(message=text, type="invalid_request_error")))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._too_large = True
            # The parser turns it into an error of its own, which `data_received` answers with `send_400_response`.
            raise _HeadTooLarge

    def _start_timer(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
