"""Whole programs, on the embedded model: through the library, and on pages of their own, and nothing left behind."""

import asyncio
import dataclasses
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.programs.sessions import Host, obj
from weft.abi.operations import Op
from weft.config import EngineConfig
from weft.core.ids import pack_tokens, unpack_tokens
from weft.engine.inline import InlineEngine
from weft.programs.host.trusted import TrustedGuest
from weft.programs.run.model import ProgramModel
from weft.programs.runtime import Runtime
from weft.testing.fake_engine import FakeEngine
from weft.tokenizers.load import load_tokenizer

pytestmark = pytest.mark.slow


def on_the_model(test: Callable[[Host], Awaitable[None]]) -> None:
    async def body() -> None:
        config = EngineConfig(device="cpu", threads=1, num_pages=400, max_context=512, dtype="float64")
        engine = InlineEngine.from_config(config)
        await engine.wait_ready()
        host = Host(FakeEngine())
        host.rt = Runtime(engine, load_tokenizer("weft-tiny"))
        host.model = ProgramModel("weft-tiny", host.rt)
        host.services = dataclasses.replace(host.services, model=host.model, models=lambda: [host.model])
        try:
            await test(host)
        finally:
            await host.close()
        await engine.drain()
        stats = await engine.stats()
        assert (stats.num_sequences, stats.num_spaces, stats.space_pages) == (0, 0, 0)
        assert stats.device_pages_free + stats.device_pages_cached == stats.device_pages_total
        assert host.rt.num_operations == 0
        assert host.accounts.num_pages == 0
        await engine.close()

    asyncio.run(body())


async def run_program(host: Host, source: str, args: Any = None) -> Any:
    program = host.program()
    result = json.loads(await TrustedGuest(program.session, source=source, args=obj(args)).run())
    usage = program.session.usage()
    program.close()
    assert usage.generated_tokens > 0
    return result


def test_a_conversation_that_forks() -> None:
    source = """
from weft.sdk import Context

async def main(args):
    context = Context()
    context.user(args)
    first = str(await context.generate(max_tokens=6))
    one, two = context.fork(), context.fork()
    return [first, *[str(await each.generate(max_tokens=4)) for each in (one, two)]]
"""

    async def test(host: Host) -> None:
        texts = await run_program(host, source, "Tell a story.")
        assert len(texts) == 3
        assert all(isinstance(text, str) for text in texts)

    on_the_model(test)


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def test_pages_of_its_own_give_what_a_sequence_does() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        [tokens] = await program.result(Op.TOKENIZE, 0, b"Once upon a time there was")
        count = len(tokens) // 4
        program.say(Op.SEQ_OPEN, 1, 0)
        likely, logprobs = await program.result(Op.SEQ_DIST, 1, 5, tokens)
        program.say(Op.SEQ_RELEASE, 1)
        # Nothing is waited for until the distribution is there.
        program.say(Op.QUEUE_OPEN, 1, 0)
        program.ask(Op.PAGES_ALLOC, 1, 0, 2)
        program.ask(Op.EMBEDS_ALLOC, 1, 0, count + 1)
        program.say(Op.EMBED_TEXT, 1, tokens, pack_tokens(range(count)), u32(*range(count)))
        program.say(Op.FORWARD, 1, b"", u32(*range(count)), u32(0, 1), u32(count), b"")
        ids, found, given = await program.result(Op.NEXT_DIST, 1, 5, u32(count), likely[4:8])
        assert ids == likely
        assert np.frombuffer(found, np.float32) == pytest.approx(np.frombuffer(logprobs, np.float32), abs=1e-5)
        assert np.frombuffer(given, np.float32)[0] == pytest.approx(np.frombuffer(found, np.float32)[1])
        sampled = await program.result(
            Op.FORWARD_SAMPLE,
            1,
            u32(0, 1),
            likely[:4],
            pack_tokens([count]),
            u32(1),
            b"",
            b'{"sampling":{"temperature":0}}',
        )
        assert len(unpack_tokens(sampled[0])) == 1
        usage = program.session.usage()
        assert (usage.prompt_tokens, usage.generated_tokens) == (2 * count + 1, 1)
        assert program.outlet.ended == []

    on_the_model(test)


def test_exports_are_the_tenant_s_and_handles_the_program_s() -> None:
    async def test(host: Host) -> None:
        one, two = host.program(), host.program()
        stranger = host.program(caller=dataclasses.replace(host.programs[0].session._core._view.caller, namespace="x"))
        for program in (one, two, stranger):
            program.say(Op.QUEUE_OPEN, 1, 0)
        await one.result(Op.PAGES_ALLOC, 1, 0, 2)
        assert await one.result(Op.PAGES_EXPORT, 1, u32(0, 1), b"doc") == []
        assert await two.result(Op.PAGES_IMPORT, 1, 7, b"doc") == [u32(2)]
        assert two.budget.used.pages == 2
        assert (await stranger.error(Op.PAGES_IMPORT, 1, 7, b"doc"))[0] == "unknown_handle"
        # Pages of one mean nothing to the other; the error is the forger's alone.
        stranger.say(Op.PAGE_MASK, 1, 0, 1, call=5)
        stranger.say(Op.FORWARD, 1, u32(0), u32(0), b"", b"", b"", call=5)
        await stranger.result(Op.QUEUE_SYNC, 1)
        assert set(stranger.errors(5)) == {"unknown_handle"}
        assert await one.result(Op.QUEUE_SYNC, 1) == []
        assert await one.result(Op.PAGES_RELEASE, 1, b"doc") == []

    on_the_model(test)
