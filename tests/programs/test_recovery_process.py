"""Requests outlive an engine process that is killed in the middle of a forward pass."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.programs.dying_engine import DIES_AT, MARKER
from tests.programs.help import CALLER
from weft.config import EMBEDDED_MODEL, EngineConfig
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.supervisor import ProcessEngine
from weft.kernels.cpu import ops
from weft.programs.builtin import completion
from weft.programs.runtime import Runtime
from weft.programs.types import CompletionArgs
from weft.tokenizers.load import load_tokenizer

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
PATIENCE_S = 240


def is_packed(dtype: str) -> bool:
    """Whether this machine's kernels pack an embedding of this dtype, which is the head's weight too."""
    kernels, number = ops.best(), getattr(torch, dtype)
    return isinstance(kernels, ops.CpuKernels) and kernels.packs(number)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_streams_outlive_a_kill_in_a_forward(dtype: str, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    engine = ProcessEngine(EngineConfig(dtype=dtype, num_pages=64, max_running=4, threads=1))
    engine.child._settings = dataclasses.replace(
        engine.child._settings,
        module="tests.programs.dying_engine",
        environment=os.environ | {MARKER: str(marker), DIES_AT: str(NUM_TOKENS // 2)},
    )

    async def answers(rt: Runtime) -> list[list[int]]:
        """The tokens of three streams at once."""

        async def one(number: int) -> list[int]:
            args = CompletionArgs(
                prompt=rt.tokenizer.encode(f"This is the story of number {number}."),
                sampling=SamplingParams(seed=number),
                stop=StopParams(ignore_eos=True),
                max_tokens=NUM_TOKENS,
            )
            tokens: list[int] = []
            reasons: Counter[str | None] = Counter()
            async for chunk in completion.main(args, CALLER, rt):
                tokens += chunk.tokens
                reasons[chunk.finish_reason] += 1
                usage = chunk.usage
            assert reasons["length"] == 1
            assert usage is not None
            counts = usage.num_cached_tokens, usage.num_recomputed_tokens, usage.num_new_tokens
            assert min(counts) >= 0
            assert sum(counts) == usage.num_prompt_tokens == len(args.prompt) // 4, "what was generated does not count"
            return tokens

        return list(await asyncio.gather(*map(one, range(3))))

    async def test() -> None:
        rt = Runtime(engine, load_tokenizer(EMBEDDED_MODEL), engine_wait_s=PATIENCE_S)
        try:
            await engine.wait_ready()
            assert not marker.exists()
            told = await answers(rt)
            assert marker.read_text() == ("4" if is_packed(dtype) else "2")
            assert engine.num_restarts == 1
            assert [len(tokens) for tokens in told] == [NUM_TOKENS] * 3
            undisturbed = await answers(rt)
            assert engine.num_restarts == 1
            if dtype == "float64":  # in which nothing depends on what else is in a step
                assert told == undisturbed
            assert (rt.num_sequences, (await engine.stats()).num_sequences) == (0, 0)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
