"""Which commands may share a step: the order of effects inside a step against the order on a queue.

A step does everything of one stage before anything of the next: copies, embeddings, the forward, the head. So commands
of a queue ride together as long as each finds what those before it leave: it may read what an earlier stage has
written; within the forward, also the KV that the same forward writes, because every layer writes before it reads. What
is on a space's pages and embeddings is watched for the whole space, so that its queues do not depend on luck either.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import IntEnum


class Stage(IntEnum):
    """In the order of their effects."""

    COPY = 1
    EMBED = 2
    FORWARD = 3
    HEAD = 4


class Conflicts:
    """What the step being built reads and writes."""

    def __init__(self) -> None:
        self._read: dict[Hashable, Stage] = {}
        self._written: dict[Hashable, Stage] = {}

    def fits(
        self, stage: Stage, reads: Iterable[Hashable], writes: Iterable[Hashable], kv: Iterable[Hashable] = ()
    ) -> bool:
        """Whether a command of `stage` may still join. `kv` are pages of a forward, read and written alike."""
        if any(self._written.get(key, 0) >= stage for key in reads):
            return False
        if any(self._written.get(key, 0) > stage for key in kv):
            return False
        # Inputs are read at the beginning of a forward and outputs written at its end.
        return not any(self._written.get(key, 0) >= stage or self._read.get(key, 0) > stage for key in writes)

    def add(
        self, stage: Stage, reads: Iterable[Hashable], writes: Iterable[Hashable], kv: Iterable[Hashable] = ()
    ) -> None:
        """It has joined."""
        for key in (*reads, *kv):
            self._read[key] = max(self._read.get(key, stage), stage)
        for key in (*writes, *kv):
            self._written[key] = max(self._written.get(key, stage), stage)
