"""A program is ended at every one of its awaits, counted: its pages, sequences and subscriptions are gone with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.examples.help import WITHIN_S, Lab
from tests.examples.help import lab as opened
from tests.programs.help import settle

pytestmark = pytest.mark.slow

# Stops at its n-th await for good: the coroutine inside hears of its end there.
SOURCE = """
import asyncio
from weft.sdk import Context, Matcher, Queue, Stop, greedy, messaging, own_model, regex, run, store, tokenize


class StoppedAt:
    def __init__(self, coroutine, at):
        self.coroutine, self.at = coroutine, at

    def __await__(self):
        error, count = None, 0
        while True:
            try:
                waited = self.coroutine.send(None) if error is None else self.coroutine.throw(error)
            except StopIteration as end:
                return end.value
            error, count = None, count + 1
            try:
                if count == self.at:
                    run.send("stopped")
                    yield from asyncio.Event().wait().__await__()
                yield waited
            except BaseException as raised:
                error = raised
                if count == self.at:
                    waited.cancel()


async def texts():
    ctx = Context(sampler=greedy()).fill("Once upon a time there was a lamp.")
    await ctx.flush()
    twin = ctx.fork()
    async for piece in ctx.generate(stop=Stop(max_tokens=4, ignore_eos=True)):
        pass
    await twin.generate(stop=Stop(max_tokens=2, ignore_eos=True))
    await twin.mask((0, 3))
    await ctx.join(twin)
    await ctx.snapshot()
    ctx.drop()
    async with Matcher(regex("(yes|no)")) as matcher:
        await matcher.push()


async def pages():
    model = await own_model()
    async with Queue() as queue:
        own = queue.alloc_pages(2)
        inputs, output = queue.alloc_embeds(3), queue.alloc_embeds(1)
        queue.embed_text([5, 6, 7], range(3), inputs)
        queue.forward(inputs=inputs, write=own, outputs=output)
        await queue.next_dist(output[0])
        await queue.synchronize()


async def others():
    await store.put("name", b"value")
    async with messaging.subscribe("topic") as inbox:
        messaging.broadcast("topic", 1)
        await inbox.get()
    child = messaging.launch(source="def main(args):\\n    return args", args=1)
    return await child.join()


async def all_of_it():
    await texts()
    await pages()
    return await others()


async def main(at):
    return await StoppedAt(all_of_it(), at)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with opened() as made:
        yield made


async def cancelled_at(lab: Lab, at: int, *, trusted: bool) -> bool:
    """Whether there was an n-th await, at which it stopped and was cancelled; else it has come to its end."""
    run = lab.launch(SOURCE, "program", at, trusted=trusted)
    listener = run.messages()
    async for _ in listener:
        run.cancel()
    record = await asyncio.wait_for(run.wait(), WITHIN_S)
    for one in lab.host.history.runs("t"):
        await one.wait()
    # A child whose source was being checked counts until the process that checks it has been killed.
    async with asyncio.timeout(WITHIN_S):
        while lab.parts.accounts.num_programs:  # noqa: ASYNC110  the pool has no event for it
            await asyncio.sleep(0.001)
    await settle()
    await nothing_is_left(lab)
    if record.status == "cancelled":
        return True
    assert (record.error, run.result) == (None, b"1")
    return False


async def nothing_is_left(lab: Lab) -> None:
    assert not lab.host._active
    assert lab.parts.accounts.num_programs == lab.parts.accounts.num_pages == 0
    assert not lab.parts.hub._topics
    assert lab.runtime.num_operations == lab.runtime.num_sequences == 0
    stats = await lab.engine.stats()
    assert stats.num_sequences == stats.num_spaces == stats.space_pages == 0
    assert stats.device_pages_free + stats.device_pages_cached == stats.device_pages_total


@pytest.mark.parametrize("trusted", [True, False])
def test_wherever_it_is_cancelled_nothing_is_left(lab: Lab, trusted: bool) -> None:
    async def body() -> None:
        at = 1
        # How many there are is not the same each time: pieces of a text may come together.
        while await cancelled_at(lab, at, trusted=trusted):
            at += 1
        assert at > 10

    lab.runner.run(body())
