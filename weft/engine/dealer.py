"""`Dealer`: one end of a zmq connection between two processes, on the event loop of its owner.

Owns the socket and nothing else: bytes out, bytes in, in order. `weft.engine.connection` and
`weft.programs.host.pipe` say what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq

_MESSAGES_A_TURN = 64
"""Messages handled before other callbacks of the event loop run."""


class Dealer:
    """Open it inside a running event loop; close it there too."""

    def __init__(
        self,
        address: str,
        on_data: Callable[[bytes], None],
        *,
        bind: bool = False,
        linger_ms: int = 0,
        reconnect_ms: int = 100,
    ):
        """`linger_ms`: how long what was sent may still be on its way after `close`. `reconnect_ms`: how often to look
        for an end that binds."""
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, reconnect_ms)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)
        self._fd = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._readable)  # the edge of what came before is never seen

    def send(self, data: bytes) -> None:
        """Send one message. Never blocks: zmq queues it until the other end listens. Does nothing once closed."""
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):  # the other end has disconnected
            self._socket.send(data, zmq.NOBLOCK)
        # zmq's file descriptor is edge-triggered: sending may have swallowed the edge of an arrival.
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._readable)

    def close(self) -> None:
        """Close the socket and stop reading from it. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def _readable(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            if self._socket.closed:
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_data(data)
            except BaseException:
                self._loop.call_soon(self._readable)  # what has come besides makes no edge any more
                raise
        self._loop.call_soon(self._readable)
