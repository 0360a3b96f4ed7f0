"""Calls of a program on the wire: core, messaging, children, tokenizer, values and grammars."""

import asyncio
import functools
import json
import struct
import weakref

import pytest

from tests.programs.help import settle
from tests.programs.sessions import CALLER, Host, obj, run
from weft.abi.errors import LimitExceeded, Overloaded, ProgramFailed
from weft.abi.frames import EventKind, events
from weft.abi.operations import Op
from weft.core.ids import pack_tokens, unpack_tokens
from weft.programs.quota.limits import Limits
from weft.programs.run import messages as module
from weft.programs.run.calls import messaging
from weft.programs.run.calls.core import CoreCalls
from weft.programs.run.calls.grammar import GrammarCalls
from weft.programs.run.calls.messaging import MessagingCalls
from weft.programs.run.calls.pages import PageCalls
from weft.programs.run.calls.pending_calls import MAX_TAKEN_MESSAGES
from weft.programs.run.calls.sequence import SequenceCalls
from weft.programs.run.calls.store import StoreCalls
from weft.programs.run.calls.tokenize import TokenizeCalls
from weft.programs.run.context import DISPATCH
from weft.programs.types import Caller

TRAITS = (CoreCalls, MessagingCalls, TokenizeCalls, SequenceCalls, StoreCalls, PageCalls, GrammarCalls)


def test_every_operation_is_carried_out_by_its_trait() -> None:
    for place, carry_out in DISPATCH.values():
        method = carry_out.func if isinstance(carry_out, functools.partial) else carry_out
        assert method.__qualname__.split(".")[0] == TRAITS[place].__name__


def test_words_reach_the_outlet() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        program.say(Op.LOG, 2, b"careful")
        program.say(Op.SEND, b'{"a":1}')
        assert program.outlet.logs == [(2, "careful")]
        assert program.outlet.messages == [b'{"a":1}']
        program.say(Op.SEND, b"{", call=5)
        assert program.errors(5) == ["invalid_request"]

    run(test)


def test_messages_wait_for_receive_and_receive_waits_for_messages() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(pending_messages=2, message_bytes=10))
        program.session.deliver(b"1")
        program.session.deliver(b"2")
        with pytest.raises(Overloaded):
            program.session.deliver(b"3")
        with pytest.raises(LimitExceeded, match="10"):
            program.session.deliver(b'"' + b"x" * 10 + b'"')
        assert await program.result(Op.RECEIVE) == [b"1"]
        assert await program.result(Op.RECEIVE) == [b"2"]
        first, second = program.ask(Op.RECEIVE), program.ask(Op.RECEIVE)
        program.say(Op.CANCEL, first)
        program.session.deliver(b"4")
        assert program.error_in(await program.end_of(first))[0] == "cancelled"
        assert (await program.end_of(second)).blobs == [b"4"]

    run(test)


def test_receivers_that_were_given_up_leave_the_line() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        for _ in range(100):
            call = program.ask(Op.RECEIVE)
            program.say(Op.CANCEL, call)
            await program.end_of(call)
        assert not program.session._core._receivers
        waiting = program.ask(Op.RECEIVE)
        program.session.deliver(b"1")
        assert (await program.end_of(waiting)).blobs == [b"1"]

    run(test)


def test_sleep_ends_and_can_be_given_up() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        assert await program.result(Op.SLEEP, 0.0) == []
        long = program.ask(Op.SLEEP, 1e5)
        program.say(Op.CANCEL, long)
        assert program.error_in(await program.end_of(long))[0] == "cancelled"
        for seconds in (-1.0, float("nan"), float("inf")):
            assert await program.error(Op.SLEEP, seconds) == ("invalid_request", "seconds")
        program.ask(Op.SLEEP, 1e5)  # closed with the session

    run(test)


def test_models_say_what_they_can() -> None:
    async def test(host: Host) -> None:
        [models] = await host.program().result(Op.MODELS)
        [model] = json.loads(models)
        assert model["name"] == "fake"
        assert model["page_size"] == 16
        assert model["tool_call_parser"] == "hermes"
        assert not model["reasoning"]
        assert {"Core", "Sequence", "Tokenize"} <= set(model["traits"])
        # This engine has no spaces, so the model does not claim them.
        assert not {"Allocate", "Forward", "InputImage", "Adapter"} & set(model["traits"])

    run(test)


def test_events_of_one_turn_are_one_wake_up() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        calls = [program.ask(Op.TOKENIZE, 0, b"ab") for _ in range(10)]
        assert program.wakes == 0
        await settle()
        assert program.wakes == 1
        program.ask(Op.TOKENIZE, 0, b"ab")
        await settle()
        assert program.wakes == 1, "there were events already"
        program.look()
        assert [event.call for event in program.seen][:10] == calls
        program.ask(Op.TOKENIZE, 0, b"ab")
        await settle()
        assert program.wakes == 2

    run(test)


def test_waiting_for_events_ends_in_time_and_at_the_end() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        assert await program.session.wait_events(0.0) == b""
        waiting = asyncio.create_task(program.session.wait_events(None))
        await settle()
        program.session.close()
        assert await waiting == b""
        assert await program.session.wait_events(None) == b""

    run(test)


def test_text_becomes_tokens_and_back_short_and_long() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        for text in ("hello", "long " * 5000):
            [tokens] = await program.result(Op.TOKENIZE, 0, text.encode())
            assert bytes(unpack_tokens(tokens).tolist()) == text.encode()
            assert await program.result(Op.DETOKENIZE, 1, tokens) == [text.encode()]
        special = pack_tokens([104, 257])
        assert await program.result(Op.DETOKENIZE, 1, special) == [b"h"]
        assert await program.result(Op.DETOKENIZE, 0, special) == [b"h<|im_start|>"]
        assert await program.error(Op.TOKENIZE, 0, b"\xff") == ("invalid_request", "text")
        assert await program.error(Op.DETOKENIZE, 0, b"abc") == ("invalid_request", "tokens")

    run(test)


def test_the_vocabulary_has_a_row_for_every_logit() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        first, second = program.ask(Op.VOCABULARY), program.ask(Op.VOCABULARY)
        program.say(Op.CANCEL, first)
        packed, text = (await program.end_of(second)).blobs
        lengths = struct.unpack(f"<{len(packed) // 4}I", packed)
        assert len(lengths) == 264
        assert lengths[:256] == (1,) * 256
        assert lengths[259:] == (0,) * 5
        assert text[:256] == bytes(range(256))

    run(test)


def test_messages_are_rendered() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        chat = obj([{"role": "user", "content": "hi"}])
        [text] = await program.result(Op.RENDER, 1, chat, b"{}")
        assert text == b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        [text] = await program.result(Op.RENDER, 0, chat, b"")
        assert text == b"<|im_start|>user\nhi<|im_end|>\n"
        long = obj([{"role": "user", "content": "x" * 20000}])
        [text] = await program.result(Op.RENDER, 0, long, b'{"chat_template":"{{messages[0].content}}"}')
        assert text == b"x" * 20000
        for messages, options in ((b"[", b""), (b"[]", b""), (chat, b'{"toolz": []}'), (b'[{"role":"x"}]', b"")):
            assert (await program.error(Op.RENDER, 0, messages, options))[0] == "invalid_request"

    run(test)


def test_values_are_kept_for_the_tenant_alone() -> None:
    async def test(host: Host) -> None:
        program, same = host.program(), host.program()
        other = host.program(caller=Caller(tenant="other"))
        assert await program.result(Op.STORE_PUT, b"a/1", b"\x00value") == []
        assert await same.result(Op.STORE_GET, b"a/1") == [b"\1", b"\x00value"]
        assert await other.result(Op.STORE_GET, b"a/1") == [b"\0", b""]
        assert json.loads((await same.result(Op.STORE_LIST, b"a/"))[0]) == ["a/1"]
        assert json.loads((await other.result(Op.STORE_LIST, b""))[0]) == []
        await same.result(Op.STORE_DELETE, b"a/1")
        assert await program.result(Op.STORE_GET, b"a/1") == [b"\0", b""]
        assert await program.error(Op.STORE_PUT, b"", b"x") == ("invalid_request", "name")
        assert (await program.error(Op.STORE_PUT, b"big", bytes(2 << 20)))[0] == "quota_exceeded"

    run(test)


def test_broadcasts_reach_subscribers_of_the_tenant() -> None:
    async def test(host: Host) -> None:
        sender, listener, stranger = host.program(), host.program(), host.program(caller=Caller(tenant="x"))
        heard = listener.ask(Op.SUBSCRIBE, b"news")
        unheard = stranger.ask(Op.SUBSCRIBE, b"news")
        sender.say(Op.BROADCAST, b"news", b"1")
        sender.say(Op.BROADCAST, b"other", b"2")
        assert await listener.part(heard) == [b"news", b"1"]
        listener.say(Op.CANCEL, heard)
        assert listener.error_in(await listener.end_of(heard))[0] == "cancelled"
        sender.say(Op.BROADCAST, b"news", b"3")
        assert listener.parts(heard) == []
        assert stranger.parts(unheard) == []
        assert sum(map(len, host.hub._topics.values())) == 1

    run(test)


def test_a_subscriber_that_never_reads_loses_its_subscription_and_nobody_else_notices() -> None:
    async def test(host: Host) -> None:
        sender, reader = host.program(), host.program()
        sleeper = host.program(Limits(pending_messages=3))
        asleep, awake = sleeper.ask(Op.SUBSCRIBE, b"t"), reader.ask(Op.SUBSCRIBE, b"t")
        for number in range(100):
            sender.say(Op.BROADCAST, b"t", b"%d" % number)
        assert sum(map(len, host.hub._topics.values())) == 1
        assert len(reader.parts(awake)) == 100
        # What it had is not lost; then it hears why there is no more.
        assert [blobs[1] for blobs in sleeper.parts(asleep)] == [b"0", b"1", b"2"]
        assert sleeper.errors(asleep) == ["overloaded"]

    run(test)


def test_waiting_messages_are_bounded_in_bytes_over_all_subscriptions() -> None:
    async def test(host: Host) -> None:
        sender, sleeper = host.program(), host.program()
        for _ in range(40):
            sleeper.ask(Op.SUBSCRIBE, b"t")
        message = b'"' + b"x" * (1 << 19) + b'"'
        for _ in range(10):
            sender.say(Op.BROADCAST, b"t", message)
        assert sleeper.session._core._view.waiting.num_bytes <= 16 << 20
        assert not host.hub._topics

    run(test)


def test_children_are_launched_joined_and_killed() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(tokens=100))
        spec = {"program": "p", "args": {"x": 1}, "limits": {"tokens": 1000, "host_calls": 5}}
        [started] = await program.result(Op.LAUNCH, 1, obj(spec))
        assert json.loads(started) == {"run": "run-1"}
        [child] = host.launcher.children
        assert child.spec.program == "p"
        assert json.loads(child.spec.args) == {"x": 1}
        assert child.caller == CALLER
        assert child.budget.limits.tokens == 100
        assert child.budget.limits.host_calls == 5
        child.budget.spend("tokens", 40)
        assert program.budget.used.tokens == 40
        joined = program.ask(Op.JOIN, 1)
        await settle()
        child.finish(b"[1]")
        assert (await program.end_of(joined)).blobs == [b"[1]"]
        assert await program.result(Op.JOIN, 1) == [b"[1]"]
        await program.result(Op.LAUNCH, 2, obj({"source": "async def main(): ..."}))
        host.launcher.children[1].finish(ProgramFailed("ValueError: no"))
        assert await program.error(Op.JOIN, 2) == ("program_failed", "")
        await program.result(Op.LAUNCH, 3, obj({"program": "p"}))
        program.say(Op.KILL, 3)
        assert host.launcher.children[2].killed == 1
        assert await program.error(Op.JOIN, 9) == ("unknown_handle", "")
        assert await program.error(Op.LAUNCH, 4, obj({"program": "missing"})) == ("invalid_request", "program")
        assert await program.error(Op.JOIN, 4) == ("invalid_request", "program")
        assert program.budget.used.children == 0
        assert await program.error(Op.LAUNCH, 5, obj({"program": "a", "source": "b"})) == ("invalid_request", "program")
        assert await program.error(Op.LAUNCH, 3, obj({"program": "p"})) == ("invalid_request", "child")
        assert await program.error(Op.LAUNCH, 6, obj({"program": "p", "limits": {"x": 1}})) == (
            "invalid_request",
            "limits",
        )

    run(test)


def test_large_results_of_joined_children_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messaging, "MAX_KEPT_RESULT_BYTES", 8)

    async def test(host: Host) -> None:
        program = host.program()
        children = []
        for number in range(3):
            await program.result(Op.LAUNCH, number, obj({"program": "p"}))
            child = host.launcher.children.pop()
            child.finish(b"12345")
            children.append(weakref.ref(child))
            del child
            assert await program.result(Op.JOIN, number) == [b"12345"]
        assert [child() is not None for child in children] == [True, False, False]
        assert await program.result(Op.JOIN, 0) == [b"12345"]
        assert await program.error(Op.JOIN, 1) == ("unknown_handle", "")

    run(test)


def test_results_that_nobody_joins_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messaging, "MAX_KEPT_RESULT_BYTES", 8)

    async def test(host: Host) -> None:
        program = host.program()
        for number in range(3):
            await program.result(Op.LAUNCH, number, obj({"program": "p"}))
        children = [weakref.ref(child) for child in host.launcher.children]
        while host.launcher.children:
            host.launcher.children.pop(0).finish(b"12345")
            await settle()
        assert [child() is not None for child in children] == [True, False, False]
        assert await program.error(Op.JOIN, 1) == ("limit_exceeded", "result_bytes")
        assert await program.result(Op.JOIN, 0) == [b"12345"]
        await program.result(Op.LAUNCH, 3, obj({"program": "p"}))
        host.launcher.children[0].finish(b"12345")
        assert await program.result(Op.JOIN, 3) == [b"12345"]

    run(test)


def test_children_end_with_their_parent_also_while_they_start() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        await program.result(Op.LAUNCH, 1, obj({"program": "p"}))
        host.launcher.gate.clear()
        program.ask(Op.LAUNCH, 2, obj({"program": "p"}))
        program.ask(Op.JOIN, 2)
        await settle()
        program.session.close()
        assert host.launcher.children[0].killed == 1
        host.launcher.gate.set()
        await settle()
        assert host.launcher.children[1].killed == 1

    run(test)


def test_children_and_depth_are_limited_in_the_whole_tree() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(children=2, depth=1))
        await program.result(Op.LAUNCH, 1, obj({"program": "p"}))
        await program.result(Op.LAUNCH, 2, obj({"program": "p"}))
        assert await program.error(Op.LAUNCH, 3, obj({"program": "p"})) == ("limit_exceeded", "children")
        program.say(Op.KILL, 1)
        await program.result(Op.LAUNCH, 4, obj({"program": "p"}))
        with pytest.raises(LimitExceeded, match="depth"):
            host.launcher.children[1].budget.child(Limits())

    run(test)


def test_grammars_are_followed() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened = program.ask(Op.MATCHER_OPEN, 1, obj({"kind": "regex", "text": "ab|ac"}))
        # Nothing has to be waited for.
        pushed = program.ask(Op.MATCHER_PUSH, 1, b"")
        assert (await program.end_of(opened)).kind == EventKind.RESULT
        stopped, mask = (await program.end_of(pushed)).blobs
        assert stopped == b"\0"
        assert _bits(mask) == {97}
        stopped, mask = await program.result(Op.MATCHER_PUSH, 1, pack_tokens([97]))
        assert _bits(mask) == {98, 99}
        assert (await program.error(Op.MATCHER_PUSH, 1, pack_tokens([120])))[0] == "invalid_request"
        stopped, mask = await program.result(Op.MATCHER_PUSH, 1, pack_tokens([98]))
        assert 256 in _bits(mask), "the text may end"
        program.say(Op.MATCHER_CLOSE, 1)
        assert (await program.error(Op.MATCHER_PUSH, 1, b""))[0] == "unknown_handle"
        assert (await program.error(Op.MATCHER_OPEN, 2, obj({"kind": "regex", "text": "("})))[0] == "invalid_request"
        unlimited = obj({"kind": "json_schema", "text": '{"x-guidance": {"max_string_chars": null}}'})
        assert await program.error(Op.MATCHER_OPEN, 3, unlimited) == ("invalid_request", "grammar")
        assert (await program.error(Op.MATCHER_OPEN, 3, obj({"kind": "sql", "text": ""})))[0] == "invalid_request"

    run(test)


def _bits(mask: bytes) -> set[int]:
    return {byte * 8 + bit for byte, value in enumerate(mask) for bit in range(8) if value >> bit & 1}


def test_messages_that_one_exchange_takes_are_bounded() -> None:
    async def test(host: Host) -> None:
        count = MAX_TAKEN_MESSAGES + 10
        reader, talker = host.program(Limits(pending_messages=count)), host.program()
        calls = [reader.ask(Op.SUBSCRIBE, topic) for topic in (b"a", b"b")]
        for number in range(count):
            talker.say(Op.BROADCAST, b"a", b"%d" % number)
        talker.say(Op.BROADCAST, b"b", b"1")
        await settle()
        wakes = reader.wakes
        reader.look()
        assert len(reader.seen) == MAX_TAKEN_MESSAGES
        await settle()
        assert reader.wakes == wakes + 1, "there is more to take"
        reader.seen += events(await reader.session.wait_events(None))
        assert [event.blobs for event in reader.seen if event.call == calls[0]] == [
            [b"a", b"%d" % number] for number in range(count)
        ]
        assert [event.blobs for event in reader.seen if event.call == calls[1]] == [[b"b", b"1"]]
        assert reader.session.take_events() == b""

    run(test)


def test_subscriptions_of_a_topic_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTENERS", 2)

    async def test(host: Host) -> None:
        program, other = host.program(), host.program(caller=Caller(request_id="r", tenant="other", namespace="n"))
        calls = [program.ask(Op.SUBSCRIBE, b"a") for _ in range(2)]
        assert await program.error(Op.SUBSCRIBE, b"a") == ("overloaded", "")
        other.ask(Op.SUBSCRIBE, b"a")
        program.ask(Op.SUBSCRIBE, b"b")
        program.say(Op.CANCEL, calls[0])
        program.ask(Op.SUBSCRIBE, b"a")
        assert sum(map(len, host.hub._topics.values())) == 4

    run(test)
