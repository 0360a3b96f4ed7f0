"""The Core trait: log, messages to and from the launcher of the run, sleep, models, HTTP, and giving calls up.

Owns the messages that came from outside and were not received yet. `weft.programs.run.context` calls it.
"""

from __future__ import annotations

import asyncio
import math

import msgspec

from weft.abi.errors import InvalidRequest, Overloaded
from weft.core.waits import WaitKind
from weft.programs.network.requests import HttpRequest
from weft.programs.run.calls.call_kinds import answer_by_task
from weft.programs.run.calls.ordered_room import OrderedRoom
from weft.programs.run.calls.view import UNREADABLE, RunView, check_size
from weft.programs.run.messages import MessageQueue, check_json, one_line, reason
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
    """Calls of the trait Core for one run."""

    def __init__(self, view: RunView):
        self._view = view
        self._calls = view.calls
        self._inbox = MessageQueue(view.budget.limits.pending_messages, view.waiting)
        self._receivers: dict[_Receiver, None] = {}
        """Those that wait, the first one first."""
        self._web = OrderedRoom(MAX_REQUESTS, MAX_ANSWER_BYTES)
        self.num_requests = 0
        """HTTP requests begun."""

    def deliver(self, message: bytes) -> None:
        """A message from the run's launcher or a client. Raises `LimitExceeded` for one that is too long, `Overloaded`
        where too many wait."""
        self._view.check_message(message)
        while self._receivers:
            receiver = next(iter(self._receivers))
            del self._receivers[receiver]
            if receiver.receive(message):
                return
        if not self._inbox.put(message):
            raise Overloaded(f"{len(self._inbox)} messages wait unread by this program; try again later")

    def log(self, call: int, level: int, text: bytes) -> None:
        """Write a line to the run's log. Raises `LimitExceeded` for `log_bytes`."""
        self._view.budget.spend("log_bytes", len(text) + LINE_COST_BYTES)
        self._view.outlet.log(min(level, 3), text.decode(errors="replace"))

    def send(self, call: int, message: bytes) -> None:
        """A message to the run's launcher and to the clients attached to it."""
        self._view.check_message(message)
        check_json(message, "the message", "message")
        self._view.outlet.message(one_line(message))

    def receive(self, call: int) -> None:
        """Answer with the next message of the run's launcher or a client."""
        receiver = _Receiver(self._view, call, self._receivers)
        self._calls.begin(call, receiver)
        if len(self._inbox):
            receiver.receive(self._inbox.pop())
        else:
            self._receivers[receiver] = None
            self._calls.waits(WaitKind.MESSAGE)

    def sleep(self, call: int, seconds: float) -> None:
        """Answer after so many seconds. Raises `InvalidRequest` beyond `MAX_SLEEP_S`."""
        if not 0 <= seconds <= MAX_SLEEP_S or math.isnan(seconds):
            raise InvalidRequest(f"a program sleeps from 0 to {MAX_SLEEP_S:.0f} seconds, got {seconds}", "seconds")
        self._calls.check_free(call)
        self._calls.begin(call, _Sleep(self._view, call, seconds))
        self._calls.waits(WaitKind.SLEEP, seconds)

    def models(self, call: int) -> None:
        """What there is, the run's own first."""
        own = self._view.model
        others = [model for model in self._view.services.models() if model is not own]
        self._calls.check_free(call)
        self._calls.result(call, _encode([model.describe() for model in (own, *others)]))

    def cancel(self, call: int, other: int) -> None:
        """Give a call up: it ends with an ERROR of kind `cancelled`, unless it has ended before."""
        self._calls.cancel(other)

    def http(self, call: int, about: bytes, body: bytes) -> None:
        """A request to the web."""
        check_size(about, MAX_ABOUT_BYTES, "http")
        try:
            args = _http_args.decode(about)
        except UNREADABLE as error:
            raise InvalidRequest(f"the request cannot be used: {reason(error)}", "http") from error
        request = HttpRequest(body=body, **msgspec.structs.asdict(args))
        self.num_requests += 1
        answer_by_task(self._calls, call, self._fetch(request), held=len(body), wait=WaitKind.HTTP)

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

    def __init__(self, view: RunView, call: int, line: dict[_Receiver, None]):
        """`line`: those that wait; it leaves them when it gives up."""
        self._calls, self._call, self._line = view.calls, call, line
        self._since = view.calls.loop.time()

    def receive(self, message: bytes) -> bool:
        """Whether it still waited."""
        if not self._calls.is_pending(self._call, self):
            return False
        self._calls.waited_s += self._calls.loop.time() - self._since
        self._calls.result(self._call, message)
        return True

    def cancel(self) -> None:
        """The program gives up."""
        self._line.pop(self, None)
        self._calls.cancelled(self._call)

    def drop(self) -> None:
        """Nothing is held."""


class _Sleep:
    """A program sleeps."""

    def __init__(self, view: RunView, call: int, seconds: float):
        self._calls, self._call = view.calls, call
        self._since = view.calls.loop.time()
        self._timer: asyncio.TimerHandle = self._calls.loop.call_later(seconds, self._over)

    def _over(self) -> None:
        if self._calls.is_pending(self._call, self):
            self._calls.waited_s += self._calls.loop.time() - self._since
            self._calls.result(self._call)

    def cancel(self) -> None:
        """The program gives up."""
        self._timer.cancel()
        self._calls.cancelled(self._call)

    def drop(self) -> None:
        """The run is over."""
        self._timer.cancel()
