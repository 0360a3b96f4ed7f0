"""However its calls and their failures are ordered, the end of a run leaves nothing behind, on a whole engine."""

import asyncio
import random
import struct
from collections.abc import Callable, Coroutine

import pytest

from tests.programs.sessions import Host, Program, obj
from tests.programs.stepped_engine import SteppedEngine
from weft.abi.errors import LimitExceeded
from weft.abi.frames import EventKind, pack
from weft.abi.operations import Op
from weft.core.ids import pack_tokens
from weft.programs.quota.limits import Limits

BAD = pack_tokens([99999])


def on_engine(test: Callable[[Host], Coroutine[None, None, None]], **spec: object) -> None:
    """Run a test; afterwards, host and engine must hold nothing."""

    async def body() -> None:
        engine = SteppedEngine(**spec)
        host = Host(engine)  # type: ignore[arg-type]
        try:
            await test(host)
            for program in host.programs:
                program.close()
            await asyncio.sleep(0)
            await engine.drained()
            engine.check_empty()
            assert host.rt.num_sequences == host.rt.num_operations == 0
            assert not host.hub._topics
            assert host.accounts.num_programs == host.accounts.num_pages == 0
        finally:
            await host.close()
            await engine.close()

    asyncio.run(body())


@pytest.mark.parametrize("release", [True, False], ids=["the parent is released first", "the run ends"])
@pytest.mark.parametrize("turns", range(8))
def test_a_fork_that_waits_for_a_parent_which_is_refused_tokens(turns: int, release: bool) -> None:
    async def test(host: Host) -> None:
        program = host.program()
        program.say(Op.SEQ_OPEN, 1, 0)
        program.say(Op.SEQ_APPEND, 1, pack_tokens(list(range(20))))
        program.say(Op.SEQ_GENERATE, 1, 0, obj({"stop": {"max_tokens": 5}}), call=1)
        program.say(Op.SEQ_FORK, 1, 2)
        call = program.ask(Op.SEQ_GENERATE, 2, 0, obj({"stop": {"max_tokens": 3}}))
        program.say(Op.SEQ_APPEND, 1, BAD)
        for _ in range(turns):
            await asyncio.sleep(0)
        if release:
            program.say(Op.SEQ_RELEASE, 1)
            for _ in range(10):
                await asyncio.sleep(0)
            # The engine was there all the time: what failed was the fork.
            assert "engine_dead" not in program.errors(call)

    on_engine(test)


@pytest.mark.parametrize("held", [True, False])
def test_a_sequence_that_was_refused_tokens_is_given_back(held: bool) -> None:
    async def test(host: Host) -> None:
        program = host.program()
        program.say(Op.SEQ_OPEN, 1, 0)
        program.say(Op.SEQ_APPEND, 1, pack_tokens([1, 2, 3]))
        program.say(Op.SEQ_APPEND, 1, BAD)
        await program.end_of(program.ask(Op.SEQ_GENERATE, 1, 0, obj({"stop": {"max_tokens": 1}})))
        if held:
            program.say(Op.SEQ_HOLD, 1, 5.0)
        else:
            program.say(Op.SEQ_RELEASE, 1)

    on_engine(test)


class Chatter:
    """Says random commands: most of them mean something, some do not."""

    def __init__(self, program: Program, seed: int):
        self.program, self.random = program, random.Random(seed)
        self.calls: list[int] = []

    def number(self) -> int:
        return self.random.choice([1, 1, 1, 2, 2, 3, 4, 4000000000])

    def tokens(self) -> bytes:
        count = self.random.choice([0, 1, 3, 17, 40, 90])
        return self.random.choice([BAD, b"abc"]) if self.random.random() < 0.08 else pack_tokens(range(count))

    def numbers(self, most: int = 6) -> bytes:
        return struct.pack(f"<{(count := self.random.randrange(most))}I", *(self.number() for _ in range(count)))

    def generation(self) -> bytes:
        return self.random.choice(
            [
                obj({"stop": {"max_tokens": 5}}),
                obj({"stop": {"max_tokens": 60, "stop": ["ab"]}, "sampling": {"seed": 1, "logprobs": 2}}),
                obj({"stop": {"max_tokens": 8}, "grammar": {"kind": "regex", "text": "[a-f]+"}}),
                obj({"grammar": {"kind": "regex", "text": "("}}),
                obj({"sampling": {"temperature": -1}}),
                b"{",
            ]
        )

    def command(self) -> tuple[Op, tuple[float | bytes, ...]]:
        r, n = self.random, self.number
        positions = struct.pack("<4i", 0, 1, 2, 3)
        four = struct.pack("<4I", 1, 2, 3, 4)
        return r.choice(
            [
                (Op.SEQ_OPEN, (n(), r.randrange(-1, 3))),
                (Op.SEQ_OPEN, (n(), 0)),
                (Op.SEQ_APPEND, (n(), self.tokens())),
                (Op.SEQ_APPEND, (n(), self.tokens())),
                (Op.SEQ_GENERATE, (n(), r.randrange(8), self.generation())),
                (Op.SEQ_GENERATE, (n(), r.randrange(8), self.generation())),
                (Op.SEQ_DIST, (n(), 3, self.tokens())),
                (Op.SEQ_SCORE, (n(), 2, self.tokens())),
                (Op.SEQ_FORK, (n(), n())),
                (Op.SEQ_FORK, (n(), n())),
                (Op.SEQ_TRUNCATE, (n(), r.randrange(50))),
                (Op.SEQ_HOLD, (n(), r.choice([0.0, 5.0, -1.0]))),
                (Op.SEQ_RELEASE, (n(),)),
                (Op.SEQ_CANCEL, (n(),)),
                (Op.SEQ_PRIORITY, (n(), r.randrange(-1, 3))),
                (Op.SEQ_MASK, (n(), struct.pack("<2i", *sorted((r.randrange(40), r.randrange(40)))))),
                (Op.CANCEL, (r.choice(self.calls) if self.calls else 0,)),
                (Op.RECEIVE, ()),
                (Op.SUBSCRIBE, (b"topic",)),
                (Op.BROADCAST, (b"topic", b"1")),
                (Op.TOKENIZE, (1, b"some text")),
                (Op.RENDER, (1, obj([{"role": "user", "content": "hi"}]), b"")),
                (Op.SLEEP, (r.choice([0.0, 100.0]),)),
                (Op.LAUNCH, (n(), obj({"program": r.choice(["p", "missing"])}))),
                (Op.JOIN, (n(),)),
                (Op.KILL, (n(),)),
                (Op.STORE_PUT, (b"name", b"value")),
                (Op.MATCHER_OPEN, (n(), obj({"kind": "regex", "text": "a+"}))),
                (Op.MATCHER_CLOSE, (n(),)),
                (Op.QUEUE_OPEN, (n(), 0)),
                (Op.QUEUE_OPEN, (n(), 0)),
                (Op.QUEUE_CLOSE, (n(),)),
                (Op.QUEUE_SYNC, (n(),)),
                (Op.PAGES_ALLOC, (n(), r.choice([1, 1, 5, 9]), r.choice([1, 3, 4, 30, 99]))),
                (Op.PAGES_ALLOC, (n(), 1, 4)),
                (Op.PAGES_FREE, (n(), self.numbers())),
                (Op.EMBEDS_ALLOC, (n(), r.choice([1, 1, 5]), r.choice([4, 9, 50, 99]))),
                (Op.EMBEDS_ALLOC, (n(), 1, 4)),
                (Op.EMBEDS_FREE, (n(), self.numbers())),
                (Op.TOKENS_COPY, (n(), n(), r.randrange(17), n(), r.randrange(17), r.randrange(5))),
                (Op.PAGES_EXPORT, (n(), self.numbers(), b"name")),
                (Op.PAGES_IMPORT, (n(), r.choice([20, 30]), b"name")),
                (Op.PAGES_RELEASE, (n(), b"name")),
                (Op.PAGE_MASK, (n(), n(), r.randrange(1 << 16))),
                (Op.EMBED_TEXT, (n(), pack_tokens(range(4)), positions, r.choice([four, self.numbers()]))),
                (Op.FORWARD, (n(), self.numbers(3), four, self.numbers(3), struct.pack("<I", n()), b"")),
                (Op.FORWARD_SAMPLE, (n(), b"", pack_tokens(range(4)), positions, self.numbers(3), b"", b"{}")),
                (Op.NEXT_DIST, (n(), 3, self.numbers(3), b"")),
            ]
        )

    async def chat(self, count: int) -> None:
        """Until it has said so much, or its host ends it."""
        for call in range(100, 100 + count):
            op, values = self.command()
            try:
                self.program.session.commands(pack(op, call, *values))
            except LimitExceeded:
                return
            self.calls.append(call)
            for _ in range(self.random.choice([0, 0, 0, 1, 5])):
                await asyncio.sleep(0)
            if self.random.random() < 0.1:
                self.program.look()


async def chatters(host: Host, seed: int, count: int) -> None:
    random_ = random.Random(seed)
    limits = [Limits(pages=random_.choice([6, 40, None]), tokens=random_.choice([500, None])) for _ in range(3)]
    programs = [Chatter(host.program(limit), seed * 3 + at) for at, limit in enumerate(limits)]
    for chatter in programs:
        chatter.program.say(Op.SEQ_OPEN, 1, 0)
        chatter.program.say(Op.QUEUE_OPEN, 1, 0)
    await asyncio.gather(*(chatter.chat(count) for chatter in programs))
    for chatter in programs:
        chatter.program.look()
        failures = [event.blobs for event in chatter.program.seen if event.kind == EventKind.ERROR]
        assert not [blobs for blobs in failures if blobs[0] == b"internal" and blobs[1] != b"killed"]
        # The engine was there all the time.
        assert not [blobs for blobs in failures if blobs[0] == b"engine_dead"]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_leave_nothing(seed: int) -> None:
    on_engine(lambda host: chatters(host, seed, 80))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(100, 900, 40))
def test_many_random_programs_leave_nothing(first: int) -> None:
    for seed in range(first, first + 40):
        on_engine(lambda host, seed=seed: chatters(host, seed, 300))
