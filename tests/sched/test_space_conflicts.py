"""Which commands on pages and embeddings may share a step."""

from __future__ import annotations

import pytest

from weft.sched.spaces.conflicts import Conflicts, Stage

COPY, EMBED, FORWARD, HEAD = Stage.COPY, Stage.EMBED, Stage.FORWARD, Stage.HEAD
KEY, OTHER = 7, -3
Touch = tuple[Stage, str]
"""A command of a stage that `reads` or `writes` KEY, or whose KV is in the page KEY."""


def fits(conflicts: Conflicts, touch: Touch, key: int = KEY) -> bool:
    stage, how = touch
    keys = {"reads": (), "writes": (), "kv": (), how: (key,)}
    return conflicts.fits(stage, keys["reads"], keys["writes"], keys["kv"])


def add(conflicts: Conflicts, touch: Touch) -> None:
    stage, how = touch
    conflicts.add(stage, (KEY,) if how in ("reads", "kv") else (), (KEY,) if how in ("writes", "kv") else ())


@pytest.mark.parametrize(
    ("first", "then", "may"),
    [
        # What an earlier stage has written is there.
        ((COPY, "writes"), (FORWARD, "kv"), True),
        ((EMBED, "writes"), (FORWARD, "reads"), True),
        ((FORWARD, "writes"), (HEAD, "reads"), True),
        # Within a stage, nothing that was written is there yet, but for the KV of a forward.
        ((COPY, "writes"), (COPY, "reads"), False),
        ((EMBED, "writes"), (EMBED, "writes"), False),
        ((FORWARD, "writes"), (FORWARD, "reads"), False),
        ((FORWARD, "writes"), (FORWARD, "writes"), False),
        ((FORWARD, "kv"), (FORWARD, "kv"), True),
        # Inputs are read at the beginning of a forward, outputs written at its end.
        ((FORWARD, "reads"), (FORWARD, "writes"), True),
        # An earlier stage would find, or take away, what is not there yet.
        ((FORWARD, "kv"), (COPY, "reads"), False),
        ((FORWARD, "kv"), (COPY, "writes"), False),
        ((FORWARD, "reads"), (EMBED, "writes"), False),
        ((HEAD, "reads"), (FORWARD, "writes"), False),
        ((HEAD, "reads"), (EMBED, "writes"), False),
        ((HEAD, "reads"), (HEAD, "reads"), True),
        ((COPY, "reads"), (COPY, "writes"), True),
        ((COPY, "reads"), (FORWARD, "kv"), True),
    ],
)
def test_the_order_of_a_queue_is_that_of_the_stages(first: Touch, then: Touch, may: bool) -> None:
    conflicts = Conflicts()
    add(conflicts, first)
    assert fits(conflicts, then) is may
    assert fits(conflicts, then, OTHER), "what touches something else is nobody's matter"


def test_the_last_stage_that_touched_something_counts() -> None:
    for stages in ((EMBED, HEAD), (HEAD, EMBED)):
        conflicts = Conflicts()
        for stage in stages:
            add(conflicts, (stage, "reads"))
        assert not fits(conflicts, (FORWARD, "writes"))
