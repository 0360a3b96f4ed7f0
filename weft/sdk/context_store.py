"""Durable contexts: stored under a name for the tenant, and restored after an engine died."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from weft.abi.errors import EngineDead, UnknownHandle
from weft.sdk import store
from weft.sdk.sequence import Sequence
from weft.sdk.snapshot import Snapshot
from weft.sdk.token_buffer import TokenBuffer

PREFIX = "context:"
"""Prefix of the names under which contexts are saved in the store."""
RETRY_S = 0.25


async def save(name: str, snapshot: Snapshot) -> None:
    """Store the snapshot of a context under a name."""
    await store.put_json(PREFIX + name, snapshot.to_json())


async def load(name: str) -> Snapshot:
    """The snapshot stored under a name. Raises `UnknownHandle` for an unknown name."""
    value = await store.get_json(PREFIX + name)
    if value is None:
        raise UnknownHandle(f"no context was saved as {name}")
    return Snapshot.from_json(value)


async def delete(name: str) -> None:
    """Delete a saved context. An unknown name is not an error."""
    await store.delete(PREFIX + name)


async def names() -> list[str]:
    """The names of all saved contexts."""
    return [name.removeprefix(PREFIX) for name in await store.names(PREFIX)]


async def restore(ctx: TokenBuffer, timeout_s: float) -> None:
    """Compute the context's tokens on a new sequence. Retries for `timeout_s` seconds, then raises `EngineDead`."""
    await ctx.complete_fork()
    with suppress(EngineDead):
        await ctx.settle()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        sequence = Sequence(ctx.priority, channel=ctx.channel)
        try:
            put = 0
            for start, ranges in ctx.masks:
                sequence.append(ctx.tokens[put:start])
                sequence.mask(*ranges)
                put = start
            if ctx.tokens:
                # A request for the next distribution shows that the engine answers, and computes the KV needed anyway.
                await sequence.next_dist(1, append=ctx.tokens[put:])
            break
        except EngineDead:
            sequence.release()
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(RETRY_S)
    ctx.replace_sequence(sequence)
