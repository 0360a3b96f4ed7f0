"""`WaitKind`: what a sequence can wait for while it has nothing to do.

The engine learns how long the waits of each kind take, so kinds tell apart what takes times of its own. It accepts
other names too: simulated workloads have kinds that are not served.
"""

from __future__ import annotations

import math
from enum import StrEnum

from weft.abi.errors import InvalidRequest

MAX_KIND_CHARS = 64


class WaitKind(StrEnum):
    """The kinds of wait that Weft itself announces."""

    PROGRAM = "program"
    """Its program has not said what it waits for."""
    HTTP = "http"
    """Its program waits for a response of the network."""
    SLEEP = "sleep"
    """Its program sleeps; the end is known."""
    MESSAGE = "message"
    """Its program waits for a message of a client or a person, or for another run."""
    TOOL = "tool"
    """Its program runs a tool that its model has called."""
    CHAT = "chat"
    """A finished turn of a chat without tools: a person may answer."""
    TOOLS = "tools"
    """A finished turn of a chat with tools: the client may bring results."""
    COMPLETION = "completion"
    """A finished completion, which may be extended."""
    HOLD = "hold"
    """Its program gave it up, to be found again."""
    QUEUE = "queue"
    """It has work, and waits for the device alone."""
    PREFIX = "prefix"
    """Nothing is known to wait: a cached prefix that has been of use."""
    UNUSED = "unused"
    """Nothing is known to wait: KV that a closed sequence has left, and no other has found yet."""


OTHER = "other"
LABELS: dict[str, str] = {kind: kind.value for kind in WaitKind}
"""By kind, the name under which it is counted; all kinds that are not here are counted as `OTHER`."""


PROGRAM_WAITS = frozenset({WaitKind.HTTP, WaitKind.SLEEP, WaitKind.MESSAGE, WaitKind.TOOL})
"""The kinds that a program may announce."""


def check_wait(kind: str, expected_in_s: float | None) -> None:
    """Raise `InvalidRequest`, naming the field, unless `kind` is a name and `expected_in_s` a time from now or None."""
    if not 0 < len(kind) <= MAX_KIND_CHARS:
        raise InvalidRequest(f"a kind of wait has 1 to {MAX_KIND_CHARS} characters, got {len(kind)}", "kind")
    if kind in (WaitKind.PREFIX, WaitKind.QUEUE):
        raise InvalidRequest(f"a client cannot announce a wait of kind {kind}, which is the engine's own", "kind")
    if expected_in_s is not None and not 0 <= expected_in_s < math.inf:
        raise InvalidRequest(f"expected_in_s must be finite and not negative, got {expected_in_s}", "expected_in_s")
