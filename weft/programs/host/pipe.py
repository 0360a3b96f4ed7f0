"""`Pipe`: one end of the connection between a front and its program host. Its messages: `weft.programs.host.wire`."""

from __future__ import annotations

from collections.abc import Callable

from weft.engine.dealer import Dealer


class Pipe(Dealer):
    """One of two ends. The host's end binds the address; messages of the front wait until it does.

    Open and close it inside a running event loop.
    """

    def __init__(self, address: str, on_data: Callable[[bytes], None], *, bind: bool):
        # A host sends its last messages while it ends; a front connects to its host while that starts.
        super().__init__(address, on_data, bind=bind, linger_ms=200, reconnect_ms=10)
