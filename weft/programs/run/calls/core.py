"""The Core trait: log, messages to and from whoever launched the run, sleep, models, HTTP, and giving calls up.

Owns the messages that came from outside and were not received yet. `weft.programs.run.context` calls it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque

import msgspec

from weft.abi.errors import InvalidRequest, Overloaded
from weft.programs.network.requests import HttpRequest
from weft.programs.run.calls.ordered_room import OrderedRoom
from weft.programs.run.calls.view import UNREADABLE, RunView, check_size
from weft.programs.run.messages import Queue, check_json, one_line
from weft.programs.run.runs import LINE_COST_BYTES

MAX_SLEEP_S = 30 * 86400.0
MAX_ABOUT_BYTES = 64 << 10
"""URL and headers of a request, as JSON."""
MAX_REQUESTS = 64
"""HTTP requests of one program at once; further ones wait in order, so that no program takes all connections."""
MAX_ANSWER_BYTES = 64 << 20
"""What the answers of those may have together; further requests wait likewise."""
_encode = msgspec.json.encode


class _HttpArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    method: str = "GET"
    headers: dict[str, str] = {}
    timeout_s: float = 30.0
    max_bytes: int = 1 << 20


_http_args = msgspec.json.Decoder(_HttpArgs)


class CoreCalls:
    """Of one run."""

    def __init__(self, view: RunView):
        self._view = view
        self._desk = view.desk
        self._inbox = Queue(view.budget.limits.pending_messages, view.waiting)
        self._receivers: deque[_Receiver] = deque()
        self._web = OrderedRoom(MAX_REQUESTS, MAX_ANSWER_BYTES)
        self.num_requests = 0
        """HTTP requests begun."""

    def deliver(self, message: bytes) -> None:
        """A message from outside. Raises `LimitExceeded` for one that is too long, `Overloaded` where too many wait."""
        self._view.check_message(message)
        while self._receivers:
            receiver = self._receivers.popleft()
            if receiver.receive(message):
                return
        if not self._inbox.put(message):
            raise Overloaded(f"{len(self._inbox)} messages wait unread by this program; try again later")

    def log(self, call: int, level: int, text: bytes) -> None:
        """Write a line."""
        self._view.budget.spend_log(len(text) + LINE_COST_BYTES)
        self._view.outlet.log(min(level, 3), text.decode(errors="replace"))

    def send(self, call: int, message: bytes) -> None:
        """A message to whoever listens."""
        self._view.check_message(message)
        check_json(message, "the message", "message")
        self._view.outlet.message(one_line(message))

    def receive(self, call: int) -> None:
        """The next message from there."""
        receiver = _Receiver(self._view, call)
        self._desk.begin(call, receiver)
        if len(self._inbox):
            receiver.receive(self._inbox.pop())
        else:
            self._receivers.append(receiver)

    def sleep(self, call: int, seconds: float) -> None:
        """Wait."""
        if not 0 <= seconds <= MAX_SLEEP_S or math.isnan(seconds):
            raise InvalidRequest(f"a program sleeps from 0 to {MAX_SLEEP_S:.0f} seconds, got {seconds}", "seconds")
        self._desk.check_free(call)
        self._desk.begin(call, _Sleep(self._view, call, seconds))

    def models(self, call: int) -> None:
        """What there is, the run's own first."""
        own = self._view.model
        others = [model for model in self._view.services.models() if model is not own]
        self._desk.check_free(call)
        self._desk.result(call, _encode([model.describe() for model in (own, *others)]))

    def cancel(self, call: int, other: int) -> None:
        """Give a call up."""
        self._desk.cancel(other)

    def http(self, call: int, about: bytes, body: bytes) -> None:
        """A request to the web."""
        check_size(about, MAX_ABOUT_BYTES, "http")
        try:
            args = _http_args.decode(about)
        except UNREADABLE as error:
            raise InvalidRequest(f"the request cannot be used: {error}", "http") from error
        request = HttpRequest(
            method=args.method,
            url=args.url,
            headers=args.headers,
            body=body,
            timeout_s=args.timeout_s,
            max_bytes=args.max_bytes,
        )
        self.num_requests += 1
        self._desk.run(call, self._fetch(request), held=len(body), waits=True)

    async def _fetch(self, request: HttpRequest) -> tuple[bytes, ...]:
        async with self._web.hold(min(max(0, request.max_bytes), MAX_ANSWER_BYTES)):
            response = await self._view.services.network.fetch(request, self._view.budget.limits.network)
        about = {"status": response.status, "headers": response.headers, "url": response.url}
        return _encode(about), response.body

    def close(self) -> None:
        """Forget what was not received."""
        self._receivers.clear()
        self._inbox.clear()


class _Receiver:
    """A program waits for a message."""

    def __init__(self, view: RunView, call: int):
        self._desk, self._call = view.desk, call
        self._since = view.desk.loop.time()

    def receive(self, message: bytes) -> bool:
        """Whether it still waited."""
        if not self._desk.is_pending(self._call, self):
            return False
        self._desk.waited_s += self._desk.loop.time() - self._since
        self._desk.result(self._call, message)
        return True

    def cancel(self) -> None:
        """The program gives up."""
        self._desk.cancelled(self._call)

    def drop(self) -> None:
        """Nothing is held."""


class _Sleep:
    """A program sleeps."""

    def __init__(self, view: RunView, call: int, seconds: float):
        self._desk, self._call = view.desk, call
        self._since = view.desk.loop.time()
        self._timer: asyncio.TimerHandle = self._desk.loop.call_later(seconds, self._over)

    def _over(self) -> None:
        if self._desk.is_pending(self._call, self):
            self._desk.waited_s += self._desk.loop.time() - self._since
            self._desk.result(self._call)

    def cancel(self) -> None:
        """The program gives up."""
        self._timer.cancel()
        self._desk.cancelled(self._call)

    def drop(self) -> None:
        """The run is over."""
        self._timer.cancel()
