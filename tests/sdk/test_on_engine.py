"""The library on the real way down: session, runtime, engine and the embedded model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from tests.programs.sessions import Host, obj
from weft.config import EngineConfig
from weft.engine.inline import InlineEngine
from weft.programs.builtin import beam
from weft.programs.host.trusted import TrustedGuest
from weft.programs.run.model import ProgramModel
from weft.programs.runtime import Runtime
from weft.programs.types import Caller
from weft.testing.fake_engine import FakeEngine
from weft.tokenizers.load import load_tokenizer

BEAMS = """
from weft.sdk import Context, beam_search

async def main(args):
    async with Context().fill(args["tokens"]) as ctx:
        return await beam_search(ctx, **args["options"])
"""
LOOPS = """
from weft.sdk import Context, Queue, Sequence, greedy, own_model, tokenize

async def main(args):
    tokens = await tokenize(args["text"], special=True)
    count, found = args["count"], {}
    async with Context().fill(tokens) as ctx:
        found["generate"] = (await ctx.generate(greedy(), max_tokens=count)).tokens
    async with Sequence() as seq:
        seq.append(tokens)
        chosen = []
        for _ in range(count):
            chosen.append((await seq.next_dist(1, append=chosen[-1:])).max_index())
        found["distributions"] = chosen
    async with Queue() as q:
        page_size = (await own_model()).page_size
        pages = q.alloc_pages((len(tokens) + count) // page_size + 1)
        sampled = [await q.forward_sample(tokens, list(range(len(tokens))), write=pages, sampler=greedy())]
        while len(sampled) < count:
            place = len(tokens) + len(sampled) - 1
            sampled.append(await q.forward_sample(sampled[-1:], [place], read=pages, write=pages, sampler=greedy()))
        found["pages"] = sampled
        q.free_pages(pages)
    return found
"""


async def on_engine(source: str, args: dict[str, Any], options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """What a program returns, and what the built-in beam search finds with the same options."""
    engine = InlineEngine.from_config(EngineConfig(device="cpu", threads=1, num_pages=200, max_context=256))
    await engine.wait_ready()
    runtime = Runtime(engine, load_tokenizer("weft-tiny"))
    host = Host(FakeEngine())
    host.model = ProgramModel("weft-tiny", runtime)
    host.services = dataclasses.replace(host.services, model=host.model, models=lambda: [host.model])
    program = host.program()
    try:
        expected = None
        if options is not None:
            prompt = runtime.tokenizer.encode("Once upon a time", add_special_tokens=True)
            args = {"tokens": memoryview(prompt).cast("i").tolist(), "options": options}
            expected = await beam.main(beam.BeamArgs(prompt=prompt, **options), Caller(), runtime)
        result = await TrustedGuest(program.session, source=source, args=obj(args)).run()
        return json.loads(result), expected
    finally:
        program.close()
        host.model.close()
        await engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"width": 3, "max_tokens": 6},
        {"width": 2, "max_tokens": 5, "length_penalty": 0.0, "early_stopping": True},
        {"width": 4, "max_tokens": 3, "ignore_eos": True},
    ],
)
def test_beams_are_those_of_the_built_in_search(options: dict[str, Any]) -> None:
    found, expected = asyncio.run(on_engine(BEAMS, {}, options))
    assert [tuple(each["tokens"]) for each in found] == [each.tokens for each in expected.beams]
    assert [each["score"] for each in found] == pytest.approx([each.score for each in expected.beams], abs=1e-4)
    assert [each["reason"] for each in found] == [each.reason for each in expected.beams]


def test_three_ways_to_the_same_greedy_tokens() -> None:
    found, _ = asyncio.run(on_engine(LOOPS, {"text": "Once upon a time", "count": 8}))
    assert found["generate"] == found["distributions"] == found["pages"]
    assert len(found["generate"]) == 8
