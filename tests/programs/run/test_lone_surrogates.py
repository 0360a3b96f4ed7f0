"""Lone surrogates in what a program hands over: refused by name or replaced, and the channel goes on."""

import msgspec
import pytest

from tests.programs.sessions import Host, run
from weft.abi.operations import Op
from weft.testing.fake_engine import DEFAULT_INFO, FakeEngine

INFO = msgspec.structs.replace(DEFAULT_INFO, explicit_pages=True, num_embeds=100, max_space_pages=50)

LONE = "\ud800".encode("utf-8", "surrogatepass")
"""As a program in Python encodes it; `ESCAPED` as its JSON may have it."""
ESCAPED = b"\\ud800"


@pytest.mark.parametrize("lone", [LONE, ESCAPED], ids=["bytes", "escaped"])
def test_lone_surrogates_in_json_are_refused_by_name(lone: bytes, caplog: pytest.LogCaptureFixture) -> None:
    value = b'"%b"' % lone

    async def test(host: Host) -> None:
        program = host.program()
        program.say(Op.SEQ_OPEN, 1, 0)
        calls = [
            program.ask(Op.HTTP, b'{"url":%b}' % value, b""),
            program.ask(Op.HTTP, b'{"url":"http://a.example/","headers":{"a":%b}}' % value, b""),
            program.ask(Op.LAUNCH, 1, b'{"source":%b}' % value),
            program.ask(Op.LAUNCH, 2, b'{"program":%b}' % value),
            program.ask(Op.LAUNCH, 3, b'{"program":"p","args":[%b]}' % value),
            program.ask(Op.LAUNCH, 4, b'{"program":"p","limits":{%b:1}}' % value),
            program.ask(Op.RENDER, 1, b'[{"role":"user","content":%b}]' % value, b"{}"),
            program.ask(Op.RENDER, 1, b'[{"role":"user","content":"a"}]', b'{"chat_template":%b}' % value),
            program.ask(Op.SEQ_GENERATE, 1, 0, b'{"stop":{"stop":[%b]}}' % value),
            program.ask(Op.SEQ_GENERATE, 1, 0, b'{"grammar":{"kind":"regex","text":%b}}' % value),
            program.ask(Op.FORWARD_SAMPLE, 1, b"", bytes(4), bytes(4), b"", b"", b'{"sampling":{%b:1}}' % value),
            program.ask(Op.MATCHER_OPEN, 1, b'{"kind":"regex","text":%b}' % value),
        ]
        for call, (op, values) in enumerate([(Op.SEND, [value]), (Op.BROADCAST, [b"a", value])], 1):
            program.say(op, *values, call=call)
            calls.append(call)
        for call in calls:
            event = await program.end_of(call)
            assert program.error_in(event)[0] == "invalid_request", event
            assert b"lone surrogates" in event.blobs[1], event
        assert program.outlet.messages == []
        assert host.launcher.children == []
        assert await program.result(Op.STORE_LIST, b"") == [b"[]"]

    run(test, engine=FakeEngine(INFO))
    assert not caplog.records


def test_lone_surrogates_in_texts_are_refused_by_name_or_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def test(host: Host) -> None:
        program = host.program()
        program.say(Op.QUEUE_OPEN, 2, 0)
        refused = {
            program.ask(Op.SUBSCRIBE, LONE): "topic",
            program.ask(Op.TOKENIZE, 0, LONE): "text",
            program.ask(Op.STORE_PUT, LONE, b"value"): "name",
            program.ask(Op.STORE_GET, LONE): "name",
            program.ask(Op.STORE_DELETE, LONE): "name",
            program.ask(Op.STORE_LIST, LONE): "prefix",
            program.ask(Op.PAGES_EXPORT, 2, b"", LONE): "name",
            program.ask(Op.PAGES_IMPORT, 2, 1, LONE): "name",
            program.ask(Op.PAGES_RELEASE, 2, LONE): "name",
        }
        program.say(Op.BROADCAST, LONE, b"1", call=1)
        program.say(Op.SEQ_OPEN, 3, 0)
        program.say(Op.SEQ_EXPECT, 3, 1.0, LONE, call=4)
        for call, name in {**refused, 1: "topic", 4: "kind"}.items():
            assert program.error_in(await program.end_of(call)) == ("invalid_request", name)
        program.say(Op.LOG, 1, b"a" + LONE + b"b")
        assert program.outlet.logs == [(1, "a\ufffd\ufffd\ufffdb")]
        # A value is bytes: it comes back as it was.
        assert await program.result(Op.STORE_PUT, b"name", LONE) == []
        assert await program.result(Op.STORE_GET, b"name") == [b"\1", LONE]

    run(test, engine=FakeEngine(INFO))
    assert not caplog.records
