"""Programs that say anything at all: only what ends a run is raised, every call ends once, and nothing is left."""

import contextlib
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs.help import settle
from tests.programs.run.test_session_pages import with_spaces
from tests.programs.sessions import Host, obj, run
from weft.abi.errors import LimitExceeded
from weft.abi.frames import EventKind, WireError, events, pack
from weft.abi.operations import Op
from weft.core.ids import pack_tokens
from weft.programs.quota.limits import Limits

NUMBERS = {
    "I": st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1)),
    "i": st.integers(-(2**31), 2**31 - 1),
    "B": st.integers(0, 255),
    "d": st.one_of(st.sampled_from([0.0, -1.0, 1e300, float("nan"), float("inf")]), st.floats()),
}
TEXTS = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"topic",
    b"\xff\xfe",
    pack_tokens([1, 2, 3]),
    pack_tokens([-5]),
    struct.pack("<2I", 0, 1),
    bytes(9000),
    obj({"kind": "regex", "text": "a+"}),
    obj({"program": "p"}),
    obj({"program": "missing", "limits": {"children": 1}}),
    obj({"url": "http://127.0.0.1:1/"}),
    obj({"stop": {"max_tokens": 3}}),
    obj({"sampling": {"seed": 1, "logprobs": 1}, "stop": {"max_tokens": 2, "stop": ["a"]}}),
    obj([{"role": "user", "content": "hi"}]),
    b"[" * 3000,
]
BLOBS = st.one_of(st.sampled_from(TEXTS), st.binary(max_size=40))
SILENT = {
    Op.SEQ_MASK,
    Op.LOG,
    Op.SEND,
    Op.CANCEL,
    Op.BROADCAST,
    Op.KILL,
    *(op for op in Op if 30 <= op <= 40 and op not in (Op.SEQ_GENERATE, Op.SEQ_DIST, Op.SEQ_SCORE)),
    Op.QUEUE_OPEN,
    Op.QUEUE_CLOSE,
    Op.QUEUE_PRIORITY,
    Op.PAGES_FREE,
    Op.EMBEDS_FREE,
    Op.TOKENS_COPY,
    Op.PAGE_MASK,
    Op.EMBED_TEXT,
    Op.FORWARD,
    Op.MATCHER_CLOSE,
}


@st.composite
def commands(draw: st.DrawFn) -> tuple[Op, tuple[float | bytes, ...], int]:
    op = draw(st.sampled_from(list(Op)))
    numbers = [draw(NUMBERS[kind]) for kind in op.numbers]
    return op, (*numbers, *(draw(BLOBS) for _ in range(op.num_blobs))), draw(st.integers(0, 4))


SCRIPTS = st.lists(commands(), max_size=40)


async def play(host: Host, script: list[tuple[Op, tuple[float | bytes, ...], int]]) -> None:
    program = host.program(Limits(pages=40, tokens=5000, log_bytes=20_000, message_bytes=5000))
    program.say(Op.SEQ_OPEN, 1, 0)
    asked: list[int] = []
    for number, (op, values, turns) in enumerate(script, start=100):
        call = number if op not in SILENT else 0
        try:
            program.session.commands(pack(op, call, *values))
        except LimitExceeded:
            break
        if op not in SILENT:
            asked.append(call)
        await settle(turns)
    else:
        try:
            for call in asked:
                program.say(Op.CANCEL, call)
            for call in asked:
                await program.end_of(call)
        except LimitExceeded as error:
            # The answers to random log-probabilities can be larger than what a program may leave unread.
            if error.param != "events":
                raise
            return
        await settle()
        for call in asked:
            assert sum(kind != EventKind.PART for kind in program.kinds(call)) == 1
        internal = [event for event in program.seen if event.kind == EventKind.ERROR and event.blobs[0] == b"internal"]
        # The fake engine knows no distributions.
        assert all(b"distribution" in event.blobs[1] for event in internal), internal
    program.close()


@settings(max_examples=80, deadline=None)
@given(SCRIPTS)
def test_anything_is_survived(script: list[tuple[Op, tuple[float | bytes, ...], int]]) -> None:
    run(lambda host: play(host, script))


@settings(max_examples=80, deadline=None)
@given(SCRIPTS)
def test_anything_is_survived_with_pages(script: list[tuple[Op, tuple[float | bytes, ...], int]]) -> None:
    async def test(host: Host) -> None:
        await play(host, script)

    with_spaces(test)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=30), commands().map(lambda c: pack(c[0], 7, *c[1]))), max_size=6))
def test_bytes_are_commands_or_the_end(pieces: list[bytes]) -> None:
    async def test(host: Host) -> None:
        program = host.program()
        with contextlib.suppress(WireError, LimitExceeded):
            program.session.commands(b"".join(pieces))
        await settle()
        assert all(event.kind in EventKind for event in events(program.session.take_events()))

    run(test)
