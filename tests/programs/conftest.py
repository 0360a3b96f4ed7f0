"""Fixtures of tests of programs."""

from __future__ import annotations

import asyncio

import pytest

from tests.programs.spaces import PROMPT, Program, Run
from weft.config import EngineConfig
from weft.engine.inline import InlineEngine
from weft.programs.runtime import Runtime
from weft.tokenizers.load import load_tokenizer


@pytest.fixture(scope="module", params=["roomy", "tight"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a program on an engine; afterwards no page is left."""
    tight = {"num_pages": 60, "max_running": 4, "max_step_tokens": 24}
    changes = tight if request.param == "tight" else {"num_pages": 500}
    config = EngineConfig(dtype="float64", device="cpu", threads=2, max_context=256, **changes)
    tokenizer = load_tokenizer("weft-tiny")

    def run(program: Program) -> None:
        async def main() -> None:
            engine = InlineEngine.from_config(config)
            await engine.wait_ready()
            rt = Runtime(engine, tokenizer)
            await program(rt)
            await engine.drain()
            stats = await engine.stats()
            assert stats.num_sequences == stats.num_spaces == 0
            assert rt.num_operations == 0
            assert stats.device_pages_free + stats.device_pages_cached + stats.space_pages == stats.device_pages_total
            await engine.close()

        asyncio.run(main())

    return run


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return list(memoryview(load_tokenizer("weft-tiny").encode(PROMPT)).cast("i"))
