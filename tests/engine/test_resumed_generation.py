"""A generation that goes on behind tokens sampled elsewhere is the one that was never interrupted, in float64."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from weft import Grammar
from weft.abi.errors import InvalidRequest
from weft.config import EngineConfig
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import Finished, ResetPrefixCache, Token
from weft.engine.inline import InlineEngine
from weft.models.random_checkpoints import write_tiny
from weft.programs.runtime import Runtime
from weft.programs.types import Caller
from weft.tokenizers.load import load_tokenizer

PROMPT = [5, 6, 7, 8, 6]
DRAWN = SamplingParams(temperature=1.3, seed=11)
KINDS: dict[str, tuple[SamplingParams, StopParams, Grammar | None]] = {
    "greedy": (SamplingParams(temperature=0.0), StopParams(max_tokens=24, ignore_eos=True), None),
    "drawn": (DRAWN, StopParams(max_tokens=24), None),
    "penalties": (
        SamplingParams(
            temperature=0.8, seed=3, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.4, logprobs=2
        ),
        StopParams(max_tokens=24, ignore_eos=True),
        None,
    ),
    "bad words": (
        SamplingParams(temperature=0.0, bad_words=[[index, other] for index in range(60) for other in range(3)]),
        StopParams(max_tokens=24, ignore_eos=True),
        None,
    ),
    "min_tokens": (DRAWN, StopParams(max_tokens=40, min_tokens=20, stop_token_ids=list(range(0, 200, 3))), None),
    "grammar": (DRAWN, StopParams(max_tokens=60), Grammar.regex(r"(ab|c){4}-[0-9]{3,9}(x|yz)!")),
    "the whole context": (DRAWN, StopParams(ignore_eos=True), None),
}


def on_engine(folder: Path, test: Callable[[Runtime], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        model = str(write_tiny(folder / "model", tokenizer=True))
        config = EngineConfig(model=model, dtype="float64", device="cpu", num_pages=256, threads=1, max_context=64)
        engine = InlineEngine.from_config(config)
        await engine.wait_ready()
        try:
            await test(Runtime(engine, load_tokenizer(model)))
        finally:
            await engine.close()

    asyncio.run(body())


async def generated(
    rt: Runtime, told: list[int], sampling: SamplingParams, stop: StopParams, grammar: Grammar | None
) -> tuple[list[Token], Finished]:
    async with rt.open(Caller()) as seq:
        seq.append(pack_tokens(PROMPT + told))
        generation = seq.generate(sampling, stop, grammar, num_generated=len(told))
        tokens = [token async for part in generation for token in part]
    assert generation.finished is not None
    return tokens, generation.finished


def without_number(tokens: list[Token]) -> list[tuple[object, ...]]:
    return [
        (token.token, token.hold_bytes, token.logprobs and (token.logprobs.rank, token.logprobs.top_ids))
        for token in tokens
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_every_token(tmp_path: Path, kind: str) -> None:
    sampling, stop, grammar = KINDS[kind]

    async def test(rt: Runtime) -> None:
        whole, ending = await generated(rt, [], sampling, stop, grammar)
        ids = [token.token for token in whole]
        assert len(ids) > 5
        for cut in range(1, len(ids)):
            rest, resumed = await generated(rt, ids[:cut], sampling, stop, grammar)
            assert without_number(rest) == without_number(whole[cut:]), cut
            assert (resumed.reason, resumed.stop) == (ending.reason, ending.stop)
            assert resumed.usage.num_prompt_tokens == len(PROMPT)
            assert resumed.usage.num_output_tokens == len(ids)

    on_engine(tmp_path, test)


def test_a_stop_string_may_begin_before_and_end_after_the_interruption(tmp_path: Path) -> None:
    async def test(rt: Runtime) -> None:
        plain, _ = await generated(rt, [], DRAWN, StopParams(max_tokens=12, ignore_eos=True), None)
        ids = [token.token for token in plain]
        parts = [rt.tokenizer.bytes_of(token) for token in ids]
        text = b"".join(parts[5:8])
        assert b"".join(parts).find(text) == len(b"".join(parts[:5]))
        stop = StopParams(max_tokens=12, ignore_eos=True, stop=[text])
        whole, ending = await generated(rt, [], DRAWN, stop, None)
        assert (len(whole), ending.reason, ending.cut_bytes) == (8, "stop", len(text))
        assert whole[5].hold_bytes
        for cut in range(1, 8):
            rest, resumed = await generated(rt, ids[:cut], DRAWN, stop, None)
            assert without_number(rest) == without_number(whole[cut:])
            assert (resumed.stop, resumed.cut_bytes) == (ending.stop, ending.cut_bytes)

    on_engine(tmp_path, test)


@pytest.mark.parametrize("count", [-1, len(PROMPT), 99])
def test_a_number_that_cannot_be_is_refused(tmp_path: Path, count: int) -> None:
    async def test(rt: Runtime) -> None:
        async with rt.open(Caller()) as seq:
            seq.append(pack_tokens(PROMPT))
            with pytest.raises(InvalidRequest, match=f"num_generated is {count} in a sequence of 5 tokens"):
                await anext(aiter(seq.generate(num_generated=count)))

    on_engine(tmp_path, test)


def test_forks_go_on_from_different_tokens(tmp_path: Path) -> None:
    """As the choices of a request do, each behind what it has told."""
    count = 30
    stop = StopParams(max_tokens=count, ignore_eos=True)
    prompt = [7 + index % 5 for index in range(21)]

    async def drawn(rt: Runtime, told: list[list[int]]) -> list[list[int]]:
        async with rt.open(Caller()) as first:
            first.append(pack_tokens(prompt))
            async with first.fork() as second, first.fork() as third:
                generations = []
                for index, (seq, tokens) in enumerate(zip((first, second, third), told, strict=True)):
                    if tokens:
                        seq.append(pack_tokens(tokens))
                    sampling = SamplingParams(temperature=1.2, seed=index)
                    generations.append(seq.generate(sampling, stop, num_generated=len(tokens)))
                return [
                    tokens + [token.token async for part in generation for token in part]
                    for tokens, generation in zip(told, generations, strict=True)
                ]

    async def test(rt: Runtime) -> None:
        whole = await drawn(rt, [[], [], []])
        random = Random(1)
        for _ in range(40):
            cuts = [random.randrange(count) for _ in whole]
            assert await drawn(rt, [tokens[:cut] for tokens, cut in zip(whole, cuts, strict=True)]) == whole, cuts
            rt.post(ResetPrefixCache())

    on_engine(tmp_path, test)
