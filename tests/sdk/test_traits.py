"""Every trait of the low level against a host that answers packed commands."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.sdk import fake_model as model
from tests.sdk.fake_host import FakeHost, Fault
from weft.abi.operations import Op
from weft.sdk import (
    InvalidRequest,
    Matcher,
    Sampler,
    Sequence,
    Stop,
    UnknownHandle,
    Unsupported,
    api,
    errors,
    http,
    messaging,
    models,
    own_model,
    regex,
    run,
    store,
    vocabulary,
)
from weft.sdk.model import SUPERTRAITS

Main = Callable[[], Awaitable[Any]]


def test_models_and_traits() -> None:
    host = FakeHost()

    async def main() -> None:
        own = await own_model()
        assert (own.name, own.page_size, own.eos_token_ids) == ("fake", model.PAGE, (model.IM_END,))
        assert [known.name for known in await models()] == ["fake", "other"]
        assert set(api.available_traits(own)) <= set(SUPERTRAITS)
        assert own.has("Sequence")
        with pytest.raises(Unsupported, match="InputImage"):
            own.require("InputImage")
        with pytest.raises(Unsupported, match="runs beside fake"):
            await api.create_queue((await models())[1])

    host.run(main)
    assert host.ops() == [Op.MODELS]


def test_messages_arguments_and_log() -> None:
    host = FakeHost()

    async def main() -> None:
        run.set_args({"x": 1})
        assert api.get_arg() == {"x": 1}
        run.send({"hello": "there"})
        run.log("line")
        host.say("first")
        assert await run.receive() == "first"
        # A message that comes while nobody waits any more is the next one's.
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(run.receive(), 0.001)
        host.say("late")
        assert await run.receive() == "late"
        await run.sleep(0.01)
        assert run.now() > 0
        with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
            run.send(object())

    host.run(main)
    assert host.sent == [{"hello": "there"}]
    assert host.ops(Op.RECEIVE, Op.CANCEL) == [Op.RECEIVE, Op.RECEIVE]


def test_a_message_that_breaks_a_limit_is_raised_by_the_next_call() -> None:
    host = FakeHost()
    host.fail(Op.SEND, "limit_exceeded", "too many messages", "pending_messages")

    async def main() -> None:
        run.send(1)
        with pytest.raises(errors.LimitExceeded) as raised:
            await run.sleep(0)
        assert raised.value.param == "pending_messages"
        await run.sleep(0)

    host.run(main)


def test_http() -> None:
    host = FakeHost()
    host.web["http://a/"] = (200, {"Content-Type": "text/plain; charset=latin-1"}, "é".encode("latin-1"))
    host.web["http://echo/"] = (404, {"content-type": "application/json"}, b"")

    async def main() -> None:
        page = await http.get("http://a/")
        assert (page.text, page.ok, page.check()) == ("é", True, page)
        with pytest.raises(InvalidRequest, match="not JSON"):
            page.json()
        missing = await api.http_post("http://echo/", {"a": 1})
        assert (missing.status, missing.json()) == (404, {"a": 1})
        with pytest.raises(errors.NetworkFailed, match="404"):
            missing.check()
        with pytest.raises(errors.NetworkDenied):
            await http.get("http://other/")

    host.run(main)
    about = host.log[1].blobs[0]
    assert b'"method":"POST"' in about
    assert b'"content-type":"application/json"' in about


def test_topics() -> None:
    host = FakeHost()

    async def main() -> None:
        async with messaging.subscribe("news") as inbox:
            messaging.broadcast("news", {"n": 1})
            messaging.broadcast("other", {"n": 2})
            messaging.broadcast("news", {"n": 3})
            assert await inbox.get() == ("news", {"n": 1})
            assert (await inbox.get()).value == {"n": 3}
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(inbox.get(), 0.001)
            messaging.broadcast("news", {"n": 4})
            assert (await anext(inbox)).value == {"n": 4}
        with pytest.raises(errors.Cancelled):
            await inbox.get()
        with pytest.raises(InvalidRequest):
            messaging.broadcast("", 1)

    host.run(main)


def test_children() -> None:
    host = FakeHost()
    host.programs |= {"good": [1, 2], "bad": Fault("program_failed", "it broke")}

    async def main() -> None:
        good, bad = messaging.launch("good"), messaging.launch("bad", args=1)
        assert await good.started() == f"run-{good.number}"
        assert await api.join(good) == [1, 2]
        with pytest.raises(errors.ProgramFailed, match="it broke"):
            await bad.join()
        inline = messaging.launch(source="def main(a): return a", args="x", limits={"cpu_s": 1})
        assert await inline.join() == "x"
        inline.cancel()
        with pytest.raises(errors.Cancelled):
            await inline.join()
        missing = messaging.launch("nothing")
        with pytest.raises(UnknownHandle, match="no program nothing"):
            await missing.started()
        with pytest.raises(InvalidRequest, match="one of the two"):
            messaging.launch()

    host.run(main)


def test_tokens_and_vocabulary() -> None:
    async def main() -> None:
        tokens = await api.tokenize("hé<|im_end|>", special=True)
        assert tokens == [model.BOS, 104, 195, 169, model.IM_END]
        assert await api.detokenize(tokens) == "hé"
        assert await api.detokenize(tokens, skip_special=False) == "<|bos|>hé<|im_end|>"
        known = await vocabulary()
        assert (len(known), known[65], known[model.IM_END]) == (model.VOCAB, b"A", b"<|im_end|>")

    FakeHost().run(main)


def test_sequences() -> None:
    host = FakeHost("one two", "three")

    async def main() -> None:
        async with Sequence(priority=2) as seq:
            seq.append([1, 2, 3])
            twin = seq.fork()
            twin.truncate(1)
            scores = await twin.score([5, 6], 3)
            assert [score.logprob for score in scores] == [
                pytest.approx(model.distribution([1])[5], abs=1e-5),
                pytest.approx(model.distribution([1, 5])[6], abs=1e-5),
            ]
            assert scores[0].top.ids == tuple(token for token, _ in model.top([1], 3))
            generating = seq.generate(Sampler(logprobs=2), Stop(strings=[" two"]))
            parts = [part async for part in generating]
            assert "".join(part.text for part in parts) == "one"
            assert generating.ending[:2] == ("stop", " two")
            assert generating.ending.usage.num_prompt_tokens == 3
            assert [len(part.logprobs) for part in parts] == [len(part.tokens) for part in parts]
            seq.set_priority(1)
            seq.hold(5)
            with pytest.raises(UnknownHandle):
                seq.append([1])
            twin.release()

    host.run(main)
    assert host.sequences == {}


def test_the_first_token_of_a_sequence_has_no_score() -> None:
    async def main() -> None:
        scores = await Sequence().score([5, 6])
        assert math.isnan(scores[0].logprob)
        assert scores[0].rank == scores[1].rank == 0

    FakeHost().run(main)


def test_a_lost_sequence_is_known_at_its_next_use() -> None:
    host = FakeHost("a long reply")

    async def main() -> None:
        seq = Sequence()
        seq.append([1])
        generating = seq.generate()
        await anext(generating)
        host.die()
        with pytest.raises(errors.EngineDead):
            async for _ in generating:
                pass
        seq.append([2])
        await run.sleep(0)
        with pytest.raises(errors.EngineDead):
            seq.append([3])

    host.run(main)


def test_store() -> None:
    host = FakeHost()

    async def main() -> None:
        assert await store.get("a") is None
        await store.put("a", b"")
        await store.put_json("b/1", {"x": [1]})
        assert await store.get("a") == b""
        assert await store.get_json("b/1") == {"x": [1]}
        assert await store.get_json("c", "else") == "else"
        assert await store.names("b/") == ["b/1"]
        await store.delete("b/1")
        assert await store.names() == ["a"]
        with pytest.raises(InvalidRequest, match="not JSON"):
            await store.get_json("a")
        with pytest.raises(InvalidRequest):
            store.put("", b"")

    host.run(main)


def test_a_grammar_followed_by_the_program() -> None:
    async def main() -> None:
        async with Matcher(regex("yes")) as matcher:
            allowed = await matcher.push()
            assert (list(allowed), len(allowed), ord("y") in allowed, -1 in allowed) == ([ord("y")], 1, True, False)
            allowed = await matcher.push(b"yes")
            assert (allowed.done, list(allowed)) == (True, [model.IM_END])
            with pytest.raises(InvalidRequest, match="not allowed"):
                await matcher.push([0])
        with pytest.raises(UnknownHandle):
            matcher.push()
        with pytest.raises(InvalidRequest, match="cannot be compiled"):
            await Matcher(regex("x").__class__("lark", "x")).push()

    FakeHost().run(main)
