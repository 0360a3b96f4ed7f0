"""`Connection`: one client's zmq socket to an engine process, on the client's event loop.

Owns the socket and nothing else: bytes out, envelopes in. A message is a list of commands or an envelope, msgpack by
`weft.core.wire`; there is no other format.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from weft.core.wire import Command, Envelope, decode_envelope, encode_commands

_MESSAGES_A_TURN = 64
"""Messages handled before the event loop gets its turn again."""

_log = logging.getLogger("weft.engine")


class Connection:
    """Open it inside a running event loop; close it there too."""

    def __init__(self, address: str, on_envelope: Callable[[Envelope], None]):
        self._on_envelope = on_envelope
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._fd = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._readable)
        self.last_heard = self._loop.time()
        """When the engine last said something, on the event loop's clock."""

    def send(self, commands: list[Command]) -> None:
        """Send one message. Never blocks: zmq queues it until the engine listens."""
        if self._socket.closed:
            return
        self._socket.send(encode_commands(commands), zmq.NOBLOCK)
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
            self.last_heard = self._loop.time()
            try:
                envelope = decode_envelope(data)
            except msgspec.MsgspecError as error:
                _log.error("an engine sent a message that cannot be read: %s", error)
                continue
            self._on_envelope(envelope)
        self._loop.call_soon(self._readable)
