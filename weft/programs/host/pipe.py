"""`Pipe`: one end of the connection between a front and its program host. What travels is `weft.programs.host.wire`."""

from __future__ import annotations

from collections.abc import Callable

from weft.engine.dealer import Dealer


class Pipe(Dealer):
    """Two ends, one of which binds: the host's, which answers. What the other end sends before that waits for it.

    Open it inside a running event loop; close it there too.
    """

    def __init__(self, address: str, on_data: Callable[[bytes], None], *, bind: bool):
        # What a host says last is sent as it ends; a front looks for its host while that starts.
        super().__init__(address, on_data, bind=bind, linger_ms=200, reconnect_ms=10)
