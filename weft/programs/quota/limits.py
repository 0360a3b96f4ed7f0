"""What one run may use: `Limits` as a value, and the table that says of each limit what it counts and what breaking it
means.

A limit either ends its run when it is used up, or refuses the call that would exceed it: then nothing was taken, and
the program may give something back and try again. The limits of tenants and of the server are settings
(`weft.config.ProgramsConfig`), and errors name them as they are written there.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import msgspec

from weft.abi.errors import InvalidRequest, LimitExceeded
from weft.programs.network.allow_list import covered

MAX_COUNT = 1 << 63
"""Counts are below: larger ones cannot be sent to another process."""
MAX_NETWORK, MAX_NETWORK_CHARS = 64, 300
"""Entries of a run's list of hosts, and their length."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one run, its children included. Where None is allowed, only the server's own bounds hold."""

    cpu_s: float = 30.0
    """Processor time of its own code, and of its host on its behalf: rendering, tokenization, decoding of what it says
    (not of the model). Not enforced for trusted programs."""
    memory_bytes: int = 64 << 20
    """Of the sandbox; each child has one of its own, no larger. Not enforced for trusted programs."""
    host_calls: int = 1_000_000
    """Commands sent to the host."""
    exchange_commands: int = 65_536
    """Commands of one exchange with the host. The library sends what has come to 64 KiB, so that few programs send a
    tenth as many."""
    pages: int | None = None
    """KV pages held at once: those allocated, and those that the tokens of its sequences fill."""
    tokens: int | None = None
    """Tokens put on sequences and forwards, and generated."""
    wall_s: float = 3600.0
    children: int = 64
    """Programs launched by it, and by those, alive at once."""
    depth: int = 8
    """Generations of children below it."""
    message_bytes: int = 1 << 20
    """Of one message, sent, received or broadcast, and of the arguments of a child."""
    pending_messages: int = 1000
    """Messages that wait to be read, of each sender and subscription."""
    log_bytes: int = 1 << 20
    network: list[str] = []
    """Hosts that it may talk to, as in `weft.programs.network.allow_list`; the server's own list holds besides."""

    def __post_init__(self) -> None:
        for name in LIMITS:
            value = getattr(self, name)
            most = math.inf if isinstance(value, float) else MAX_COUNT
            # Written so that NaN is refused too.
            if value is not None and not 0 <= value < most:
                raise InvalidRequest(f"limits.{name} must be a number from 0, got {value}", f"limits.{name}")
        # They are kept in the record of the run.
        if len(self.network) > MAX_NETWORK or any(len(entry) > MAX_NETWORK_CHARS for entry in self.network):
            allowed = f"{MAX_NETWORK} hosts of at most {MAX_NETWORK_CHARS} characters"
            raise InvalidRequest(f"limits.network may have {allowed}", "limits.network")

    def within(self, remaining: Limits) -> Limits:
        """The smaller of both, limit by limit; of the network, what both allow."""
        smaller = {name: smallest(getattr(self, name), getattr(remaining, name)) for name in LIMITS}
        network = [entry for entry in self.network if any(covered(entry, by) for by in remaining.network)]
        return msgspec.structs.replace(self, **smaller, network=network)


class Limit(NamedTuple):
    """One limit of a run, by the name that its field and its error have."""

    ends_run: bool
    """It ends the run when it is used up; otherwise it refuses the call that would exceed it."""
    unit: str


LIMITS = {
    "cpu_s": Limit(True, "seconds of processor time"),
    "host_calls": Limit(True, "calls of its host"),
    "exchange_commands": Limit(True, "commands of an exchange"),
    "tokens": Limit(True, "tokens"),
    "log_bytes": Limit(True, "bytes of log"),
    "wall_s": Limit(True, "seconds"),
    "memory_bytes": Limit(True, "bytes of memory"),
    "pages": Limit(False, "KV pages"),
    "children": Limit(False, "children alive"),
    "depth": Limit(False, "generations of children"),
    "message_bytes": Limit(False, "bytes of a message"),
    "pending_messages": Limit(False, "unread messages"),
}
REFUSED = frozenset(name for name, limit in LIMITS.items() if not limit.ends_run)
"""Limits whose error refuses one call."""
Spent = Literal["cpu_s", "host_calls", "tokens", "log_bytes"]
"""Limits that are spent in amounts."""
SPENT: tuple[Spent, ...] = get_args(Spent)


def limits_from_json(data: bytes, remaining: Limits) -> Limits:
    """Limits of a child from the JSON object that its parent gave: those left out are what the parent has left.

    Raises `InvalidRequest` for unknown names and values that cannot be.
    """
    try:
        asked = msgspec.json.decode(data, type=dict[str, object])
        return msgspec.convert({**msgspec.structs.asdict(remaining), **asked}, Limits).within(remaining)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"the limits cannot be used: {error}", "limits") from error


def used_up(name: str, most: float) -> LimitExceeded:
    """The error of a limit that is spent."""
    unit = LIMITS[name].unit
    return LimitExceeded(f"the program used up its limit {name} of {most:g} {unit}, its children's included", name)


def smallest(*limits: float | None) -> float | None:
    """The smallest of some limits, of which None is none."""
    return min((limit for limit in limits if limit is not None), default=None)
