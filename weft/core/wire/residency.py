"""Commands on where KV is kept that nothing runs on: retained, moved to the host, brought back.

The target is an open sequence, or the cached prefix of some tokens. Each command ends in exactly one of `Finished`,
whose `count` says how many pages it was carried out for, and `Failed`, which says why it was not.
"""

from __future__ import annotations

from weft.core.wire.base import CommandBase


class ResidencyCommand(CommandBase, frozen=True, kw_only=True):
    """Base of these commands. `seq` names an open sequence; without it the target is the longest cached prefix of
    `tokens` in `namespace`, in whole pages."""

    op: int
    seq: int | None = None
    tokens: bytes = b""
    """Packed little-endian int32."""
    namespace: str = ""


class Retain(ResidencyCommand, frozen=True, kw_only=True):
    """Keep the KV of the target for `ttl_s` seconds. The larger the weight, the later the policy gives it up; with
    infinite weight it is *pinned*: its part on the device stays there, unless a sequence cannot go on otherwise. What a
    sequence retains outlives its release. A second retain of a sequence ends the first, also where it is refused: both
    are for all that the sequence has by then."""

    ttl_s: float
    weight: float = 1.0


class EndRetain(CommandBase, frozen=True, kw_only=True):
    """End the client's `Retain` with the operation number `retain`. The count is that of the pages that it still kept:
    0 where it had ended before."""

    op: int
    retain: int


class Demote(ResidencyCommand, frozen=True, kw_only=True):
    """Move the target's KV from the device to the host, from its end as far as nothing else needs it, within the
    budgets of as many steps as it takes."""


class Prefetch(ResidencyCommand, frozen=True, kw_only=True):
    """Bring the target's KV from the host to the device, from its beginning as far as there is room, within the budgets
    of as many steps as it takes."""
