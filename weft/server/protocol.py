"""HTTP/1.1 and WebSockets on one connection: the checks that uvicorn's protocols lack.

Owns the checks before the application gets a request: heads that are too long or too slow, requests that a proxy in
front of the server could parse differently (`Host`, `Transfer-Encoding`), upgrades that are not supported, and refused
handshakes. Owns the bounds on the frames of WebSockets. It does not know the application.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from weft.endpoints.errors import ErrorBody, ErrorResponse
from weft.server.connections import Connections

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of a request line with all headers."""

MAX_PIPELINED = 500
"""Most requests in one read of a connection, 256 KB: each takes its time, and the event loop waits for all."""

WS_PART_BYTES, WS_TURN_FRAMES = 2 * 1024, 256
"""Received bytes of a WebSocket are parsed in parts of this size, until this many frames are parsed in one turn of the
event loop. A frame has at least 6 bytes, so a turn parses fewer than 600."""

MAX_FRAGMENTS = 1000
"""Most frames of one WebSocket message: empty ones do not count against its size."""

MAX_UNSENT_PONGS = 1000
"""Most pings of a WebSocket that are answered while the client does not read the answers."""

_CLOSE_POLICY = 1008

_NOT_HTTP = (400, "This is not a valid HTTP/1.1 request.")


class _BadHeadError(Exception):
    """Raised in a callback of the parser, which converts it to its own error; `_refusal` has the response."""


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration, and the state that its connections share."""

    def __init__(self, app: ASGIApp, limits: Connections[BoundedHttpProtocol], **options: Any):
        super().__init__(app, http=BoundedHttpProtocol, ws=BoundedWebSocketProtocol, **options)
        self.limits = limits


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with a bounded and unambiguous head."""

    _limits: Connections[BoundedHttpProtocol]
    _head_bytes = 0
    _fed_bytes = 0
    """Bytes of a head that spans several reads: the parser reports a header only when it is complete."""
    _in_head = False
    _num_begun = 0
    """Requests that began in the read that is parsed."""
    _refusal = _NOT_HTTP
    """Status and message with which the next parser error is answered."""
    _ignored_upgrade: bytes | None = None
    """Head, without its upgrade, of a request for an unsupported upgrade; it is parsed again."""
    _head_timer: asyncio.TimerHandle | None = None
    _has_asked = False
    """Whether the connection has had a request with a complete head."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._unanswered: deque[RequestResponseCycle] = deque()
        """Requests whose responses are not complete, in order; the first is in progress."""
        self._body: list[bytes] = []
        """Parts of a body in the read that is parsed. Each alone would cost a copy of what the application has not read
        yet, and a client decides how small they are."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request. If there are too many connections, the one that has waited longest is closed."""
        super().connection_made(transport)
        self._limits = cast(HttpConfig, self.config).limits
        self._limits.waits(self)
        self._start_timer()
        if len(self.connections) > self._limits.most:
            self._limits.longest_waiting().give_up()

    def give_up(self) -> None:
        """Close the connection, which waits for a request. If it has had none yet, send a response with the reason."""
        self._limits.works(self)
        self._refusal = (503, "This server has as many connections as it may; try again shortly.")
        if self._has_asked:
            self.transport.close()
        else:
            self.send_400_response("")

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer of the head, and notify every request: uvicorn notifies only the latest."""
        self._limits.works(self)
        self._stop_timer()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has arrived already."""
        self._unanswered.popleft()
        super().on_response_complete()
        if not self._unanswered and not self.transport.is_closing():
            self._limits.waits(self)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes, and refuse a head that is too long."""
        self._unset_keepalive_if_required()
        was_in_head, self._num_begun = self._in_head, 0
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        finally:
            self._hand_over_body()
        self._wait_again()
        if self._in_head and was_in_head:
            self._fed_bytes += len(data)
            if self._fed_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refusal = _too_large()
                self.send_400_response("")

    def _wait_again(self) -> None:
        """Wait for a request again if the bytes did not begin one: an empty line, or the rest of the body of an
        answered request."""
        is_timed = self._head_timer is not None or self.timeout_keep_alive_task is not None
        if not is_timed and not self._unanswered and self in self.connections and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        """Reset the counts of the head, and start its timer."""
        super().on_message_begin()
        self._num_begun += 1
        if self._num_begun > MAX_PIPELINED:
            self._refuse(400, "This connection sends too many requests at once.")
        self._in_head, self._head_bytes, self._fed_bytes = True, 0, 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        """Count a part of the request line against `MAX_HEAD_BYTES`."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header against `MAX_HEAD_BYTES`. Those behind a body are ignored: the application has the head."""
        self._count(len(name) + len(value) + 4)
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._body.append(body)

    def on_headers_complete(self) -> None:
        """The head is complete; the application takes over."""
        self._check_head()
        self._in_head = False
        self._has_asked = True
        self._stop_timer()
        self._limits.works(self)
        if self.parser.should_upgrade() and not self._should_upgrade():
            self._ignored_upgrade = self._head_without_upgrade()
            return
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        """The request is complete, unless it is to be parsed again."""
        self._hand_over_body()
        if self._ignored_upgrade is None:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse the received bytes, in the shape of all errors, and close the connection.

        While another response is being written there is no refusal: it would become part of that response's body.
        """
        status, text = self._refusal
        self.logger.info("refused a connection's bytes with status %d: %s", status, text)
        if self.cycle is None or self.cycle.response_complete:
            body = msgspec.json.encode(ErrorResponse(ErrorBody(message=text, type="invalid_request_error")))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _feed(self, data: bytes) -> None:
        """Parse bytes. Raises `httptools.HttpParserError`."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head, self._ignored_upgrade = self._ignored_upgrade, None
            if head is None:
                self.handle_websocket_upgrade()
                return
            # An unsupported upgrade (HTTP/2, which Java's client requests first) is ignored; RFC 9110, 7.8. The parser
            # would treat the body as another protocol, so the request is parsed again without the header.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # the same as in uvicorn
            self._feed(head + data[upgrade.args[0] :])

    def _hand_over_body(self) -> None:
        if self._body:
            body, self._body = b"".join(self._body), []
            super().on_body(body)

    def _should_upgrade(self) -> bool:
        # The handshake is a GET; the header is ignored in any other request. It is also ignored after requests that are
        # not answered yet, which need the connection.
        return self.parser.get_method() == b"GET" and not self._unanswered and super()._should_upgrade()

    def _head_without_upgrade(self) -> bytes:
        line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = (header for header in self.headers if header[0] not in (b"upgrade", b"http2-settings"))
        return line + b"".join(b"%s: %s\r\n" % (name, _without_upgrade(name, value)) for name, value in kept) + b"\r\n"

    def _check_head(self) -> None:
        """Raise for a head that another parser could read differently."""
        if self.parser.get_method() == b"CONNECT":
            self._refuse(501, "This server is not a proxy: it has no method CONNECT.")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() != "1.0"):
            self._refuse(400, f"A request must have one Host header; this one has {hosts}.")
        codings = b", ".join(value for name, value in self.headers if name == b"transfer-encoding")
        if codings and codings.strip().lower() != b"chunked":
            self._refuse(501, "The only transfer coding that is supported is chunked; send the body without another.")

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(*_too_large())

    def _refuse(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        raise _BadHeadError

    def _start_timer(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _too_large() -> tuple[int, str]:
    return 431, f"The request's headers exceed {MAX_HEAD_BYTES} bytes."


def _without_upgrade(name: bytes, value: bytes) -> bytes:
    if name != b"connection":
        return value
    options = (option.strip() for option in value.split(b","))
    return b", ".join(option for option in options if option.lower() not in (b"upgrade", b"http2-settings"))


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol with bounded frames, extended to close the connection of every refused handshake."""

    _next_parse: asyncio.Handle | None = None
    """The call of `_parse` that the next turn of the loop makes. Until then, reading is paused."""
    _num_frames = 0
    """Frames that this turn of the loop has parsed."""
    _num_unsent_pongs = 0

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._unparsed = bytearray()

    def data_received(self, data: bytes) -> None:
        """Parse the bytes, in this turn of the loop and in the next ones. A client that sends frames before it gets the
        response of its handshake, against RFC 6455, 4.1, is disconnected."""
        if self.handshake_initiated and not self.handshake_complete:
            self.transport.close()
            return
        self._unparsed += data
        if self._next_parse is None:
            self._parse()
        else:
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the bytes that are not parsed, and end the connection."""
        self._stop_parsing()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Count the parsed frames, and handle them."""
        self._num_frames += len(self.conn.events)
        super().handle_events()

    def handle_cont(self, event: Frame) -> None:
        """Take a further fragment of a message, unless there are too many."""
        super().handle_cont(event)
        if len(self.frames) > MAX_FRAGMENTS:
            self._refuse(f"A message may have at most {MAX_FRAGMENTS} fragments.")

    def handle_ping(self) -> None:
        """Answer a ping, unless the client does not read the answers."""
        super().handle_ping()
        self._num_unsent_pongs = 0 if self.writable.is_set() else self._num_unsent_pongs + 1
        if self._num_unsent_pongs > MAX_UNSENT_PONGS:
            self._refuse("Read the answers of pings before you send more.")

    async def receive(self) -> Any:
        """The next message. uvicorn resumes reading when there is no further one; bytes that are not parsed yet go
        first, or a client could send faster than they are parsed."""
        message = await super().receive()
        if self._next_parse is not None and not self.transport.is_closing():
            self.transport.pause_reading()
        return message

    def _parse(self) -> None:
        """Parse received bytes, until there are no more or the frames of one turn of the loop are parsed. A handshake
        that is too large gets a response, and its connection is closed."""
        was_paused, self._next_parse, self._num_frames = self._next_parse is not None, None, 0
        while self._unparsed and self._num_frames < WS_TURN_FRAMES and not self.transport.is_closing():
            part = bytes(self._unparsed[:WS_PART_BYTES])
            del self._unparsed[:WS_PART_BYTES]
            super().data_received(part)
            if self.conn.handshake_exc is not None and not self.handshake_initiated:
                self.transport.write(b"".join(self.conn.data_to_send()))
                self.transport.close()
        if self.transport.is_closing():
            self._stop_parsing()
        elif self._unparsed:
            self._next_parse = self.loop.call_soon(self._parse)
            self.transport.pause_reading()
        elif was_paused and not self.read_paused:
            self.transport.resume_reading()

    def _stop_parsing(self) -> None:
        self._unparsed.clear()
        if self._next_parse is not None:
            self._next_parse.cancel()
            self._next_parse = None

    def _refuse(self, reason: str) -> None:
        """Close the connection for a breach of a bound."""
        if not self.transport.is_closing():
            self.frames = []
            self.conn.fail(_CLOSE_POLICY, reason)
            self.handle_parser_exception()

    async def send(self, message: Any) -> None:
        """Send a message. A refusal completes the handshake, which uvicorn would otherwise report as an error."""
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True
