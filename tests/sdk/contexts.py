"""What tests of contexts look at."""

from __future__ import annotations

import asyncio

from tests.sdk import fake_model as model
from tests.sdk.fake_host import FakeHost
from weft.sdk import (
    Context,
    Generation,
)


def held(host: FakeHost, ctx: Context) -> str:
    """The text on the context's sequence, which must be what the context says."""
    host.sync()
    tokens = host.sequences[ctx.sequence.number]
    assert tokens == ctx.tokens
    return model.decode(tokens, skip_special=False)


def read_on(generation: Generation) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A task that reads a generation, and what says that it has begun to come."""
    started = asyncio.Event()

    async def read() -> None:
        async for _ in generation:
            started.set()

    return asyncio.ensure_future(read()), started


def turns(*texts: str) -> str:
    """ChatML of turns that alternate, each whole."""
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[at % 2]}\n{text}<|im_end|>\n" for at, text in enumerate(texts))
