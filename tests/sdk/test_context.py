from __future__ import annotations

import asyncio
import json

import pytest

from tests.sdk import fake_model as model
from tests.sdk.contexts import held, read_on, turns
from tests.sdk.fake_host import FakeHost
from weft.abi.operations import Op
from weft.sdk import (
    Context,
    InvalidRequest,
    Sampler,
    Stop,
    UnknownHandle,
    greedy,
    json_object,
)

CHANGES = (Op.SEQ_APPEND, Op.SEQ_TRUNCATE)


def test_text_goes_on_where_it_ends() -> None:
    host = FakeHost("one two", "!")

    async def main() -> None:
        ctx = Context()
        ctx.fill("Count: ")
        reply = await ctx.generate(max_tokens=4)
        assert (reply.text, reply.reason, reply.stop) == ("one ", "length", None)
        assert reply.usage.num_output_tokens == 4
        ctx.fill(b"two, ").fill("three")
        assert await ctx.generate_until(max_tokens=9) == "!"
        assert held(host, ctx) == "<|bos|>Count: one two, three!"
        assert ctx.usage.num_output_tokens == 4 + 2

    host.run(main)
    assert host.ops(Op.RENDER) == []


def test_a_stop_string_is_part_of_neither_text_nor_context() -> None:
    host = FakeHost("Thought. Observation: rain", "x")

    async def main() -> None:
        ctx = Context().fill("Q")
        reply = await ctx.generate(stop="Observation:")
        assert (reply.text, reply.stop) == ("Thought. ", "Observation:")
        await ctx.flush()
        assert held(host, ctx) == "<|bos|>QThought. "

    host.run(main)


def test_a_chat_appends_only_what_is_new_and_keeps_what_the_model_wrote() -> None:
    host = FakeHost("Lima.", "Four.")

    async def main() -> None:
        async with Context(system="Brief.") as ctx:
            ctx.user("Peru?")
            pieces = [piece async for piece in ctx.generate()]
            assert "".join(pieces) == "Lima." == ctx.last_text
            assert len(pieces) > 1
            ctx.user("2+2?")
            await ctx.generate()
            await ctx.flush()
            expected = "<|im_start|>system\nBrief.<|im_end|>\n" + turns("Peru?", "Lima.", "2+2?", "Four.")
            assert held(host, ctx) == expected.removesuffix("\n")
            assert ctx.chat.messages[-1] == {"role": "assistant", "content": "Four."}

    host.run(main)
    assert host.ops(*CHANGES) == [Op.SEQ_APPEND, Op.SEQ_APPEND]
    assert host.sequences == {}


def test_where_the_template_changes_what_was_said_only_the_difference_is_replaced() -> None:
    host = FakeHost("<think>\nhm\n</think>\n\nLima.", "ok")
    host.info["reasoning"] = True

    async def main() -> None:
        ctx = Context()
        ctx.user("Peru?")
        reply = await ctx.generate()
        assert (reply.reasoning, reply.answer, ctx.last_text) == ("hm", "Lima.", "Lima.")
        assert ctx.chat.messages[-1] == {"role": "assistant", "content": "Lima.", "reasoning_content": "hm"}
        del ctx.chat.raw[1]  # as if the template refused the model's own text
        ctx.user("Sure?")
        await ctx.flush()
        assert held(host, ctx) == turns("Peru?", "Lima.", "Sure?")

    host.run(main)
    truncated = [command.numbers[1] for command in host.log if command.op is Op.SEQ_TRUNCATE]
    assert truncated == [len(model.encode(turns("Peru?") + "<|im_start|>assistant\n"))]


def test_the_answers_beginning_can_be_given() -> None:
    host = FakeHost(" Lima", ", Peru.")

    async def main() -> None:
        ctx = Context()
        ctx.user("Capital?").fill("It is")
        await ctx.generate(max_tokens=5)
        await ctx.generate()
        ctx.user("Thanks")
        await ctx.flush()
        assert held(host, ctx) == turns("Capital?", "It is Lima, Peru.", "Thanks")
        assert ctx.chat.messages[1] == {"role": "assistant", "content": "It is Lima, Peru."}

    host.run(main)


def test_a_turn_that_a_stop_string_ended_is_still_open() -> None:
    host = FakeHost("Act: look END", "done")

    async def main() -> None:
        ctx = Context()
        ctx.user("Go")
        await ctx.generate(stop=Stop(strings=["END"]))
        ctx.fill("Saw: a tree. ")
        await ctx.generate()
        ctx.user("ok")
        await ctx.flush()
        assert held(host, ctx) == turns("Go", "Act: look Saw: a tree. done", "ok")

    host.run(main)
    assert host.ops(Op.RENDER) == [Op.RENDER, Op.RENDER]


def test_samplers_stops_and_grammars_reach_the_host_without_defaults() -> None:
    host = FakeHost()

    async def main() -> None:
        ctx = Context(sampler=greedy()).fill("x")
        await ctx.generate(stop=["a", "b"], max_tokens=3, grammar=json_object())
        await ctx.generate(Sampler(top_p=0.5, logit_bias={3: 1.0}, bad_words=[(1, 2)], seed=7))

    host.run(main)
    first, second = (json.loads(command.blobs[0]) for command in host.log if command.op is Op.SEQ_GENERATE)
    assert first == {
        "sampling": {"temperature": 0.0},
        "stop": {"max_tokens": 3, "stop": ["a", "b"]},
        "grammar": {"kind": "json_schema", "text": '{"type":"object"}'},
    }
    assert second == {
        "sampling": {"top_p": 0.5, "seed": 7, "logit_bias": {"3": 1.0}, "bad_words": [[1, 2]]},
        "stop": {},
    }


def test_leaving_a_stream_keeps_what_was_read_and_forgets_the_rest() -> None:
    host = FakeHost("abcdefghijklmnopqrstuvwxyz", "ok")

    async def main() -> None:
        ctx = Context().fill("x")
        async for token in ctx.generate().each_token():
            if token == ord("e"):
                break
        assert ctx.last is not None
        assert not ctx.last.ended
        ctx.fill("-")
        await ctx.generate()
        assert ctx.last.reason == "stop"
        await ctx.flush()
        assert held(host, ctx) == "<|bos|>xabcdef-ok"

    host.run(main)
    assert host.ops(Op.CANCEL) == [Op.CANCEL]


def test_a_cancelled_task_leaves_a_context_that_can_go_on() -> None:
    host = FakeHost("abcdefghijklmnopqrstuvwxyz" * 20, "ok")

    async def main() -> None:
        ctx = Context()
        ctx.user("go")
        generation = ctx.generate()
        task, started = read_on(generation)
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        read = generation.text
        ctx.user("again")
        await ctx.generate()
        await ctx.flush()
        assert held(host, ctx) == turns("go", read, "again", "ok").removesuffix("\n")

    host.run(main)


def test_two_tasks_need_two_contexts() -> None:
    host = FakeHost("abcdef" * 10)

    async def main() -> None:
        ctx = Context().fill("x")
        first, started = read_on(ctx.generate())
        await started.wait()
        with pytest.raises(InvalidRequest, match="fork the context"):
            await ctx.generate()
        await first

    host.run(main)


def test_what_cannot_be() -> None:
    host = FakeHost("x")

    async def main() -> None:
        with pytest.raises(InvalidRequest, match="the context is empty"):
            await Context().generate()
        refused = Context()
        refused.message("refused", "x")
        with pytest.raises(InvalidRequest, match="template refused"):
            await refused.generate()
        ctx = Context().fill("x")
        ctx.drop()
        ctx.drop()
        with pytest.raises(UnknownHandle):
            ctx.generate()

    host.run(main)
