"""Contexts across branches, ways back, runs and failures."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from tests.sdk.contexts import held, turns
from tests.sdk.fake_host import FakeHost
from weft.abi.operations import Op
from weft.sdk import (
    Context,
    EngineDead,
    InvalidRequest,
    LimitExceeded,
    Snapshot,
    UnknownHandle,
    context_store,
)
from weft.sdk.answers import unpack_ints
from weft.sdk.context_store import delete, names
from weft.sdk.tokens import detokenize, render, tokenize


def test_forks_share_the_past_and_joining_takes_one_over() -> None:
    host = FakeHost("left", "right", "more")

    async def main() -> None:
        ctx = Context()
        ctx.user("Which?")
        left, right = ctx.fork(), ctx.fork()
        await left.generate()
        await right.generate()
        left.drop()
        await ctx.join(right)
        with pytest.raises(UnknownHandle):
            right.fill("x")
        ctx.user("Why?")
        await ctx.generate()
        await ctx.flush()
        assert held(host, ctx) == turns("Which?", "right", "Why?", "more").removesuffix("\n")

    host.run(main)
    # Tokenized once for all, and once for each cue and question.
    assert len(host.sequences) == 1


def test_a_fork_is_of_the_moment_it_was_made() -> None:
    host = FakeHost("one", "two")

    async def main() -> None:
        ctx = Context().fill("a")
        early = ctx.fork()
        grandchild = early.fill("g").fork()
        never = early.fork()
        never.drop()
        ctx.fill("b")
        await ctx.generate()
        early.fill("c")
        await early.flush()
        assert (held(host, ctx), held(host, early)) == ("<|bos|>abone", "<|bos|>agc")
        grandchild.fill("!")
        await asyncio.gather(grandchild.flush(), grandchild.flush())
        assert held(host, grandchild) == "<|bos|>ag!"
        late = ctx.fork()
        assert held(host, late) == held(host, ctx)
        assert set(host.sequences) == {each.sequence.number for each in (ctx, early, grandchild, late)}
        with pytest.raises(UnknownHandle):
            never.fill("x")

    host.run(main)
    assert [command.op for command in host.log].count(Op.SEQ_RELEASE) == 0


def test_a_fork_of_a_context_that_was_rewound_is_still_of_its_moment() -> None:
    host = FakeHost()

    async def main() -> None:
        ctx = Context().fill("a")
        start = await ctx.snapshot()
        twin = ctx.fill("b").fork()
        await ctx.rewind(start)
        assert (held(host, ctx), held(host, twin)) == ("<|bos|>a", "<|bos|>ab")

    host.run(main)


async def nothing(ctx: Context) -> None:
    pass


async def a_rewind(ctx: Context) -> None:
    ctx.user("b")
    await ctx.rewind_turns()


async def a_generation(ctx: Context) -> None:
    async for _ in ctx.generate():
        break


async def a_parent(ctx: Context) -> None:
    async with ctx:
        pass


GIVEN_UP = [Context.drop, lambda ctx: ctx.hold(5), a_parent]


@pytest.mark.parametrize("give_up", GIVEN_UP)
@pytest.mark.parametrize("before", [nothing, a_rewind, a_generation])
def test_a_fork_outlives_its_parent(before, give_up) -> None:  # type: ignore[no-untyped-def]
    host = FakeHost("abcdefghi" if before is a_generation else "ok")

    async def main() -> None:
        ctx = Context(system="s")
        ctx.user("a")
        await before(ctx)
        forks = [ctx.fork(), ctx.fork()]
        ctx.user("never told")
        if (given_up := give_up(ctx)) is not None:
            await given_up
        for use in (lambda: ctx.fill("x"), ctx.fork, ctx.generate, lambda: ctx.expect("tool")):
            with pytest.raises(UnknownHandle):
                use()
        ctx.drop()
        await asyncio.gather(*[fork.flush() for fork in forks])
        assert held(host, forks[0]) == held(host, forks[1])
        assert "a<" in held(host, forks[0])
        assert "abc" in held(host, forks[0]) or before is not a_generation
        await forks[0].generate()
        assert set(host.sequences) == {fork.sequence.number for fork in forks}
        with pytest.raises(UnknownHandle):
            await ctx.truncate(0)

    host.run(main)
    ends = [command.op for command in host.log if command.op in (Op.SEQ_HOLD, Op.SEQ_RELEASE)]
    assert ends == [Op.SEQ_RELEASE if give_up is not GIVEN_UP[1] else Op.SEQ_HOLD]


@pytest.mark.parametrize("give_up", GIVEN_UP)
def test_a_fork_of_a_fork_outlives_both(give_up) -> None:  # type: ignore[no-untyped-def]
    host = FakeHost()

    async def main() -> None:
        ctx = Context().fill("a")
        middle = ctx.fork().fill("b")
        last = middle.fork().fill("c")
        for each in (middle, ctx):
            if (given_up := give_up(each)) is not None:
                await given_up
        await last.flush()
        assert held(host, last) == "<|bos|>abc"
        assert set(host.sequences) == {last.sequence.number}

    host.run(main)


def test_a_context_ends_with_the_last_fork_that_needs_it() -> None:
    host = FakeHost()

    async def main() -> None:
        ctx = Context().fill("a")
        unused, middle = ctx.fork(), ctx.fork()
        last = middle.fork()
        for each in (ctx, unused, middle):
            each.drop()
            host.sync()
            assert len(host.sequences) == 1
        last.drop()
        host.sync()
        assert host.sequences == {}

    host.run(main)
    assert Op.SEQ_FORK not in host.ops()


def test_back_to_a_snapshot_and_forward_again() -> None:
    host = FakeHost("one", "two", "three")

    async def main() -> None:
        ctx = Context()
        ctx.user("a")
        early = await ctx.snapshot()
        await ctx.generate()
        late = await ctx.snapshot()
        await ctx.rewind(early)
        await ctx.generate()
        await ctx.flush()
        assert held(host, ctx) == turns("a", "two").removesuffix("\n")
        await ctx.rewind(late)
        assert held(host, ctx) == turns("a", "one").removesuffix("\n")
        assert ctx.chat.messages == late.chat.messages

    host.run(main)


def test_forgetting_turns() -> None:
    host = FakeHost("one", "two", "three")

    async def main() -> None:
        ctx = Context()
        for question in "ab":
            ctx.user(question)
            await ctx.generate()
        await ctx.rewind_turns()
        ctx.user("c")
        await ctx.generate()
        await ctx.flush()
        assert held(host, ctx) == turns("a", "one", "c", "three").removesuffix("\n")
        with pytest.raises(InvalidRequest):
            await ctx.rewind_turns(3)
        await ctx.rewind_turns(2)
        assert held(host, ctx) == ""

    host.run(main)


def test_truncating() -> None:
    host = FakeHost()

    async def main() -> None:
        ctx = Context().fill("abcdef")
        await ctx.truncate(4)
        ctx.fill("!")
        await ctx.flush()
        assert held(host, ctx) == "<|bos|>abc!"
        ctx.user("now a chat")
        await ctx.flush()
        assert held(host, ctx) == "<|bos|>abc!" + turns("now a chat")
        with pytest.raises(InvalidRequest):
            await ctx.truncate(1000)
        with pytest.raises(InvalidRequest, match="not among the"):
            await ctx.mask((0, 1000))

    host.run(main)


def test_saved_contexts_are_bound_to_their_model() -> None:
    host = FakeHost("one", "two")

    async def save() -> None:
        async with Context(system="s", tools=[{"name": "f", "parameters": {}}]) as ctx:
            ctx.user("a")
            await ctx.generate()
            await ctx.save("mine")

    async def reopen() -> None:
        assert await names() == ["broken", "mine"]
        async with await Context.open("mine", priority=1) as ctx:
            ctx.user("b")
            await ctx.generate()
            await ctx.flush()
            assert held(host, ctx).endswith(turns("a", "one", "b", "two").removesuffix("\n"))
            assert "tools" in held(host, ctx)
        with pytest.raises(UnknownHandle, match="no context was saved as other"):
            await Context.open("other")
        await delete("mine")
        assert await names() == ["broken"]

    host.run(save)
    other = FakeHost()
    other.info["name"] = "bigger"
    other.store = host.store

    async def wrong() -> None:
        with pytest.raises(InvalidRequest, match="belongs to the model fake; this program runs beside bigger"):
            await Context.open("mine")
        other.store["context:broken"] = b"{}"
        with pytest.raises(InvalidRequest, match="not a snapshot"):
            await Context.open("broken")

    other.run(wrong)
    host.channel.values.clear()
    host.run(reopen)


def test_a_snapshot_is_json() -> None:
    async def main() -> None:
        ctx = Context(system="s")
        await ctx.generate()
        snapshot = await ctx.snapshot()
        assert Snapshot.from_json(json.loads(json.dumps(snapshot.to_json()))) == snapshot

    FakeHost().run(main)


def test_an_engines_death_can_be_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_store, "RETRY_S", 0)
    host = FakeHost("abcdefghi" * 5, "and on")

    async def main() -> None:
        ctx = Context()
        ctx.user("go")
        generation = ctx.generate()

        async def read_until_it_dies() -> None:
            async for _ in generation:
                if len(generation.text) == 6:
                    host.die()

        with pytest.raises(EngineDead):
            await read_until_it_dies()
        assert generation.reason == "engine_dead"
        with pytest.raises(EngineDead):
            await ctx.restore(timeout_s=0)
        host.fail(Op.SEQ_DIST, "engine_dead")
        host.is_dead = False
        await ctx.restore()
        await ctx.generate()
        await ctx.flush()
        assert held(host, ctx) == turns("go", generation.text + "and on").removesuffix("\n")

    host.run(main)


def test_a_stream_that_was_left_before_the_engine_died() -> None:
    host = FakeHost("abcdefghi" * 5, "!")

    async def main() -> None:
        ctx = Context().fill("x")
        async for _ in ctx.generate():
            break
        host.die()
        host.is_dead = False
        await ctx.restore()
        await ctx.generate()
        assert held(host, ctx) == "<|bos|>xabc!"

    host.run(main)


def masks(host: FakeHost) -> list[list[int]]:
    """What was hidden, in the order of the commands: numbers of tokens before, and ranges."""
    return [unpack_ints(command.blobs[0]) for command in host.log if command.op is Op.SEQ_MASK]


def test_masks_go_where_the_context_goes() -> None:
    host = FakeHost()

    async def main() -> None:
        ctx = Context().fill("abcdef")
        await ctx.mask((1, 3))
        ctx.fill("gh")
        await ctx.flush()
        assert ctx.masks == [(7, ((1, 3),))]
        point = await ctx.snapshot()
        assert Snapshot.from_json(json.loads(json.dumps(point.to_json()))) == point
        await ctx.mask()
        assert ctx.masks == [(7, ((1, 3),)), (9, ())]
        twin = ctx.fork()
        await twin.flush()
        assert twin.masks == ctx.masks
        await twin.truncate(8)
        assert twin.masks == [(7, ((1, 3),))]
        await twin.truncate(5)
        assert twin.masks == []
        await detokenize([])  # until the host has heard all
        del host.log[:]
        await twin.rewind(point)
        assert (twin.tokens, twin.masks) == (list(point.tokens), list(point.masks))
        await detokenize([])
        assert masks(host) == [[1, 3]]
        del host.log[:]
        await twin.rewind(point)
        await detokenize([])
        assert masks(host) == []  # it is there already
        other = await Context.restored(point)
        assert (other.tokens, other.masks) == (list(point.tokens), list(point.masks))
        await ctx.rewind(point)
        await detokenize([])
        assert masks(host)[-1] == [1, 3]  # what was shown again is hidden again
        await ctx.join(twin)
        assert ctx.masks == twin.masks

    host.run(main)


@pytest.mark.parametrize("stop", [(), ("r",)])
def test_a_task_cancelled_at_any_point_leaves_tokens_and_messages_in_agreement(stop: tuple[str, ...]) -> None:
    """At each turn of the event loop, from before the first command to after the generation's end."""

    async def main(step: int) -> bool:
        ctx = Context()
        ctx.user("go")
        ctx.fill(await tokenize("I "))
        task = asyncio.ensure_future(ctx.generate(stop=stop)._read())
        for _ in range(step):
            await asyncio.sleep(0)
        is_over = task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        ctx.user("Why?")
        await ctx.generate()
        await ctx.flush()
        wanted = await render(ctx.chat.messages, add_generation_prompt=False)
        assert held(host, ctx) == wanted.removesuffix("\n"), step
        assert wanted.count("I ") == 1
        return is_over

    step, is_over = 0, False
    while not is_over:
        host = FakeHost("first reply", "second")
        is_over = host.run(lambda: main(step))  # noqa: B023 (called at once)
        step += 1
    assert step > 10


def test_tokens_that_were_refused_are_put_on_the_sequence_before_the_next_operation() -> None:
    host = FakeHost("one", "two", "three")

    async def main() -> None:
        ctx = Context().fill("a")
        assert (await ctx.generate()).text == "one"
        await ctx.mask((0, 1))
        ctx.fill("long")
        host.fail(Op.SEQ_APPEND, "limit_exceeded", param="pages")
        pieces = aiter(ctx.generate())
        with pytest.raises(LimitExceeded):  # no piece: it would follow a prompt that is not there
            await anext(pieces)
        fork = ctx.fork()
        await fork.flush()
        assert held(host, fork) == held(host, ctx) == "<|bos|>aonelong"
        assert (await ctx.generate()).text == "three"
        assert held(host, ctx) == "<|bos|>aonelongthree"

    host.run(main)


def test_generated_text_stays_where_a_context_becomes_a_chat() -> None:
    host = FakeHost("one", "two")

    async def main() -> None:
        ctx = Context().fill("a")
        await ctx.generate()
        ctx.user("b")
        await ctx.generate()
        await ctx.rewind_turns()
        assert held(host, ctx) == "<|bos|>aone"

    host.run(main)
