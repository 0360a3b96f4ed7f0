"""Commands to an engine as a whole."""

from __future__ import annotations

from weft.core.wire.base import PROTOCOL_VERSION, CommandBase


class Hello(CommandBase, frozen=True, kw_only=True):
    """First message of a client over a socket; answered with `Welcome`."""

    version: int = PROTOCOL_VERSION


class Ping(CommandBase, frozen=True, kw_only=True):
    """Renews the client's lease; answered with `Stats`."""


class Drain(CommandBase, frozen=True, kw_only=True):
    """Take no new sequences; answered with `Drained` when the last one is gone."""


class ListSessions(CommandBase, frozen=True, kw_only=True):
    """Which sequences of a tenant wait, of all clients; answered with `Sessions`."""

    query: int
    """Repeated in the answer."""
    tenant: str
    limit: int
    """Sessions in the answer, at most."""


class ResetPrefixCache(CommandBase, frozen=True, kw_only=True):
    """Forget every cached page that no sequence uses."""
