"""`Pipe`: one end of the socket between a front and its program host, on the event loop of either.

Owns the socket and nothing else: bytes out, bytes in. What they mean is `weft.programs.host_wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq

_MESSAGES_A_TURN = 64
"""Messages handled before the event loop gets its turn again."""


class Pipe:
    """Two ends, one of which binds: the host's, which answers. What the other end sends before that waits for it.

    Open it inside a running event loop; close it there too.
    """

    def __init__(self, address: str, on_data: Callable[[bytes], None], *, bind: bool):
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)
        self._fd = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._readable)  # the edge of what came before is never seen
        self.last_heard_s = self._loop.time()
        """When the other end last said something, on the event loop's clock."""

    def send(self, data: bytes) -> None:
        """Never blocks: zmq queues it until the other end listens. Does nothing once closed."""
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):  # the other end is gone, and nobody is left to hear it
            self._socket.send(data, zmq.NOBLOCK)
        # zmq's file descriptor is edge-triggered: sending may have swallowed the edge of an arrival.
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._readable)

    def close(self) -> None:
        """Idempotent."""
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
            self.last_heard_s = self._loop.time()
            self._on_data(data)
        self._loop.call_soon(self._readable)
