"""Concurrent work on forks of a context, in the same batches of the engine.

answers = await map_forks(ctx, ask, ["red", "green", "blue"])
best = await best_of(ctx, 4, score=lambda generation: len(generation.text), max_tokens=50)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from inspect import isawaitable
from typing import Any, TypeVar

from weft.abi.errors import InvalidRequest
from weft.sdk.context import Context
from weft.sdk.generation import Generation

T = TypeVar("T")
V = TypeVar("V")


async def gather(awaitables: Iterable[Awaitable[T]], limit: int | None = None) -> list[T]:
    """Await all awaitables, at most `limit` at once, and return their results in order.

    If one fails, the others are cancelled, and the first error is raised after they have ended.
    """
    if limit is not None and limit < 1:
        raise InvalidRequest(f"limit must be at least 1, got {limit}", "limit")
    gate = asyncio.Semaphore(limit) if limit is not None else None

    async def one(awaitable: Awaitable[T]) -> T:
        if gate is None:
            return await awaitable
        async with gate:
            return await awaitable

    waiting = list(awaitables)
    tasks = [asyncio.ensure_future(one(awaitable)) for awaitable in waiting]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Close coroutines that were never started; Python would warn about them.
        for awaitable in waiting:
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
        raise


async def map_forks(
    ctx: Context, work: Callable[[Context, V], Awaitable[T]], items: Iterable[V], *, limit: int | None = None
) -> list[T]:
    """Return the result of `work(fork, item)` for each item, in order. Each fork is released afterwards."""
    await ctx.flush()

    async def one(item: V) -> T:
        async with ctx.fork() as fork:
            return await work(fork, item)

    return await gather([one(item) for item in items], limit)


async def best_of(
    ctx: Context,
    n: int,
    score: Callable[[Generation], float | Awaitable[float]],
    *,
    limit: int | None = None,
    **options: Any,
) -> Generation:
    """Generate `n` times on forks, and continue from the one with the highest score; ties go to the earlier one.

    `options` as for `Context.generate`. With a seed, fork `i` samples with the seed + `i`.
    """
    if n < 1:
        raise InvalidRequest(f"n must be at least 1, got {n}", "n")
    # Begin the turn before forking, so that all forks share one prompt, which is computed once.
    await ctx.flush(add_generation_prompt=True)
    sampler = options.pop("sampler", None) or ctx.sampler
    forks = [ctx.fork() for _ in range(n)]

    async def one(at: int) -> tuple[float, Generation]:
        drawn = sampler if sampler.seed is None else sampler.replace(seed=sampler.seed + at)
        generation = await forks[at].generate(drawn, **options)
        value = score(generation)
        return (await value if isawaitable(value) else value), generation

    try:
        scored = await gather([one(at) for at in range(n)], limit)
        best = max(range(n), key=lambda at: scored[at][0])
        await ctx.join(forks[best])
        return scored[best][1]
    finally:
        for fork in forks:
            fork.drop()
