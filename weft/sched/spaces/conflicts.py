"""Which commands may share a step: the order of effects inside a step against the order on a queue.

A step does everything of one stage before anything of the next: copies, embeddings, the forward, the head. So commands
of a queue ride together as long as each finds what those before it leave: it may read what an earlier stage has
written; within the forward, also the KV that the same forward writes, because every layer writes before it reads. What
is on a space's pages and embeddings is watched for the whole space, so that its queues do not depend on luck either.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Stage(IntEnum):
    """In the order of their effects."""

    COPY = 1
    EMBED = 2
    FORWARD = 3
    HEAD = 4


Key = int
"""A device page, or minus one minus an embedding slot."""


class Conflicts:
    """What the step being built reads and writes."""

    def __init__(self) -> None:
        self._read: dict[Key, Stage] = {}
        self._written: dict[Key, Stage] = {}

    def fits(self, stage: Stage, reads: Sequence[Key], writes: Sequence[Key], kv: Sequence[Key] = ()) -> bool:
        """Whether a command of `stage` may still join. `kv` are pages of a forward, read and written alike."""
        written, read = self._written, self._read
        # Inputs are read at the beginning of a forward and outputs written at its end.
        return not (
            (reads and _any_from(written, stage, reads))
            or (kv and _any_from(written, stage + 1, kv))
            or (writes and (_any_from(written, stage, writes) or _any_from(read, stage + 1, writes)))
        )

    def add(self, stage: Stage, reads: Sequence[Key], writes: Sequence[Key]) -> None:
        """The command joins the step: later ones are compared with it."""
        for keys, last in ((reads, self._read), (writes, self._written)):
            for key in keys:
                if last.get(key, 0) < stage:
                    last[key] = stage


def _any_from(last: dict[Key, Stage], stage: int, keys: Sequence[Key]) -> bool:
    """Whether some key was last touched in `stage` or later. Most commands share nothing: that is found out first."""
    return not last.keys().isdisjoint(keys) and any(last.get(key, 0) >= stage for key in keys)
