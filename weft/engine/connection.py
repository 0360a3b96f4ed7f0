"""`Connection`: one client's end of the way to an engine process: commands out, envelopes in.

A message is a list of commands or an envelope, msgpack by `weft.core.wire`; there is no other format.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from weft.core.wire import Command, Envelope, decode_envelope, encode_commands
from weft.engine.dealer import Dealer

_log = logging.getLogger("weft.engine")


class Connection:
    """Open it inside a running event loop; close it there too."""

    def __init__(self, address: str, on_envelope: Callable[[Envelope], None]):
        self._on_envelope = on_envelope
        self._dealer = Dealer(address, self._read)

    def send(self, commands: list[Command]) -> None:
        """Send one message. Never blocks; does nothing once closed."""
        self._dealer.send(encode_commands(commands))

    def close(self) -> None:
        """Close the connection to the engine. Idempotent."""
        self._dealer.close()

    def _read(self, data: bytes) -> None:
        try:
            envelope = decode_envelope(data)
        except msgspec.MsgspecError as error:
            _log.error("an engine sent a message that cannot be read: %s", error)
            return
        self._on_envelope(envelope)
