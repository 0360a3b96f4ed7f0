"""Explicit pages on the embedded model in float64: what tests of spaces share."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import (
    AllocEmbeds,
    AllocPages,
    Dists,
    EmbedText,
    NextDist,
    OpenQueue,
    PromptOutputs,
)
from weft.programs.runtime import Runtime
from weft.programs.space import SpaceHandle
from weft.programs.types import Caller

PROMPT = "<|im_start|>user\nWrite a story about Ada and a lamp.<|im_end|>\n<|im_start|>assistant\n"


Program = Callable[[Runtime], Awaitable[None]]
Run = Callable[[Program], None]
GREEDY = SamplingParams(temperature=0)


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def i32(numbers: list[int]) -> bytes:
    return array("i", numbers).tobytes()


def ids(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


async def generated(rt: Runtime, prompt: list[int], count: int, sampling: SamplingParams = GREEDY) -> list[int]:
    async with rt.open(Caller()) as seq:
        seq.append(pack_tokens(prompt))
        tokens = []
        async for part in seq.generate(sampling, StopParams(max_tokens=count, ignore_eos=True)):
            tokens += [token.token for token in part]
        return tokens


async def likely(rt: Runtime, tokens: list[int], k: int = 8) -> Dists:
    async with rt.open(Caller()) as seq:
        dist = (await seq.append(pack_tokens(tokens), PromptOutputs(dist=k))).dists
        assert dist is not None
        return dist


def pages_for(rt: Runtime, tokens: int) -> int:
    return -(-tokens // rt.engine.info.page_size)


async def opened(rt: Runtime, pages: int, embeds: int) -> SpaceHandle:
    """A space with queue 1, pages from 1 on, embeddings from 1 on."""
    space = rt.open_space(Caller())
    space.on_failure = lambda call, error: pytest.fail(f"command {call} failed: {error}")
    space.post(OpenQueue, 1)
    if pages:
        await space.ask(AllocPages, 1, 1, pages)
    await space.ask(AllocEmbeds, 1, 1, embeds)
    return space


def numbers(count: int, first: int = 1) -> bytes:
    return u32(*range(first, first + count))


def embed(space: SpaceHandle, tokens: list[int], positions: list[int], first: int = 1) -> bytes:
    embeds = numbers(len(tokens), first)
    space.post(EmbedText, 1, i32(tokens), i32(positions), embeds)
    return embeds


async def dist_of(space: SpaceHandle, embeds: bytes, k: int = 8) -> tuple[list[int], np.ndarray]:
    dists = (await space.ask(NextDist, 1, k, embeds)).dists
    assert dists is not None
    return dists.ids, np.array(dists.logprobs)
