"""What tests of programs share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tests.tokenizers.conftest import BOS, EOS, byte_level_backend
from weft.programs.runtime import Runtime
from weft.programs.types import Caller, Chunk
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.tokenizers.tokenizer import Tokenizer

CALLER = Caller(request_id="r1", tenant="t", namespace="n", priority=3)


def tokenizer_with(template: str) -> Tokenizer:
    """One that puts a beginning of sequence before a text."""
    return Tokenizer(
        byte_level_backend(template_bos=True),
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        chat_templates={"default": template},
    )


async def settle(turns: int = 20) -> None:
    """Let everything that can run do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


def run(test: Callable[[FakeEngine, Runtime], Coroutine[Any, Any, None]], **engine: Any) -> FakeEngine:
    """Run a test on a fresh engine; afterwards nothing may be left anywhere."""
    fake = FakeEngine(**engine)

    async def body() -> None:
        rt = Runtime(fake, byte_tokenizer())
        await test(fake, rt)
        await settle()
        assert rt.num_sequences == 0
        assert rt.num_operations == 0
        assert fake.sequences == {}

    asyncio.run(body())
    return fake


async def collect(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


def text_of(chunks: list[Chunk], index: int = 0) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.index == index)
