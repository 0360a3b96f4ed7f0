"""Sequences that hide tokens from those that follow: the same as a mask over all of them at once, however computed."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from weft.abi.errors import InvalidRequest
from weft.config import EngineConfig
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import PromptOutputs
from weft.engine.inline import InlineEngine
from weft.programs.runtime import Runtime
from weft.programs.sequence import SequenceHandle
from weft.programs.types import Caller
from weft.tokenizers.load import load_tokenizer

ASSET = "weft/assets/weft-tiny"
TEXT = (
    "<|im_start|>user\nWrite a story about Ada and a lamp. Ada lives in a small house.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
GREEDY = SamplingParams(temperature=0)
Program = Callable[[Runtime], Awaitable[None]]
Mask = tuple[int, tuple[tuple[int, int], ...]]


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return list(memoryview(load_tokenizer("weft-tiny").encode(TEXT)).cast("i"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(ASSET, dtype=torch.float64).eval()


def run(program: Program, **changes: int) -> None:
    config = EngineConfig(dtype="float64", device="cpu", threads=2, max_context=256, **({"num_pages": 400} | changes))

    async def main() -> None:
        engine = InlineEngine.from_config(config)
        await engine.wait_ready()
        rt = Runtime(engine, load_tokenizer("weft-tiny"))
        await program(rt)
        await engine.drain()
        stats = await engine.stats()
        assert stats.num_held or stats.device_pages_free + stats.device_pages_cached == stats.device_pages_total
        await engine.close()

    asyncio.run(main())


def expected(model: LlamaForCausalLM, tokens: list[int], masks: list[Mask], count: int) -> list[int]:
    """Greedy tokens of transformers, with the whole mask given."""
    tokens = list(tokens)
    for _ in range(count):
        length = len(tokens)
        seen = torch.tril(torch.ones(length, length, dtype=torch.bool))
        for number, (start, ranges) in enumerate(masks):
            end = masks[number + 1][0] if number + 1 < len(masks) else length
            for first, last in ranges:
                seen[start:end, first:last] = False
        bias = torch.zeros(1, 1, length, length, dtype=torch.float64).masked_fill(~seen, -1e30)
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), attention_mask=bias).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[-count:]


def pack(*ranges: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<2i", *pair) for pair in ranges)


async def generated(seq: SequenceHandle, count: int) -> list[int]:
    generation = seq.generate(GREEDY, StopParams(max_tokens=count, ignore_eos=True))
    return [token.token async for part in generation for token in part]


SMALL = {"max_step_tokens": 8, "num_pages": 40, "max_running": 4}


@pytest.mark.parametrize("changes", [{}, SMALL], ids=["roomy", "small"])
def test_hidden_tokens_are_not_seen(tokens: list[int], model: LlamaForCausalLM, changes: dict[str, int]) -> None:
    """Two masks, one after the other, and a tail that is appended under each; then generated under the second."""
    first, second = tokens[:20], tokens[20:]
    masks: list[Mask] = [(20, ((3, 9),)), (20 + len(second), ((5, 18), (22, 24)))]
    wanted = expected(model, tokens, masks, 12)
    plain = expected(model, tokens, [], 12)
    assert wanted != plain

    async def program(rt: Runtime) -> None:
        async def masked() -> list[int]:
            async with rt.open(Caller()) as seq:
                seq.append(pack_tokens(first))
                seq.mask(pack(*masks[0][1]))
                seq.append(pack_tokens(second))
                seq.mask(pack(*masks[1][1]))
                return await generated(seq, 12)

        async def unmasked() -> list[int]:
            async with rt.open(Caller()) as seq:
                seq.append(pack_tokens(tokens))
                return await generated(seq, 12)

        # Beside each other, and more than fit at once where it is tight: preempted and computed again.
        found = await asyncio.gather(*(masked() if index % 2 else unmasked() for index in range(8)))
        assert found == [wanted if index % 2 else plain for index in range(8)]
        # What was computed under a mask is not found by others, nor the other way round.
        assert await unmasked() == plain
        assert await masked() == wanted

    run(program, **changes)


def test_everything_is_seen_again(tokens: list[int], model: LlamaForCausalLM) -> None:
    masks: list[Mask] = [(20, ((3, 9),)), (24, ())]
    wanted = expected(model, tokens, masks, 6)

    async def program(rt: Runtime) -> None:
        async with rt.open(Caller()) as seq:
            seq.append(pack_tokens(tokens[:20]))
            seq.mask(pack((3, 9)))
            seq.append(pack_tokens(tokens[20:24]))
            seq.mask(b"")
            seq.append(pack_tokens(tokens[24:]))
            assert await generated(seq, 6) == wanted

    run(program)


def test_forks_and_truncations_keep_masks(tokens: list[int], model: LlamaForCausalLM) -> None:
    masks: list[Mask] = [(20, ((3, 9),))]
    wanted, plain = expected(model, tokens, masks, 6), expected(model, tokens, [], 6)

    async def program(rt: Runtime) -> None:
        async with rt.open(Caller()) as seq:
            seq.append(pack_tokens(tokens[:20]))
            before = seq.fork()
            seq.mask(pack((3, 9)))
            seq.append(pack_tokens(tokens[20:]))
            after = seq.fork()
            assert await generated(seq, 6) == wanted
            seq.truncate(len(tokens))
            assert await generated(seq, 6) == wanted
            seq.truncate(20)  # the mask was set here, and still holds
            seq.append(pack_tokens(tokens[20:]))
            assert await generated(seq, 6) == wanted
            seq.truncate(19)  # before it was set
            seq.append(pack_tokens(tokens[19:]))
            assert await generated(seq, 6) == plain
            assert await generated(after, 6) == wanted
            before.append(pack_tokens(tokens[20:]))
            assert await generated(before, 6) == plain
            after.release()
            before.release()

    run(program)


def test_a_held_sequence_gives_only_what_saw_everything(tokens: list[int], model: LlamaForCausalLM) -> None:
    async def program(rt: Runtime) -> None:
        seq = rt.open(Caller(namespace="held"))
        seq.append(pack_tokens(tokens[:20]))
        seq.mask(pack((3, 9)))
        await seq.append(pack_tokens(tokens[20:]), PromptOutputs(dist=1))
        seq.hold(60)
        async with rt.open(Caller(namespace="held")) as again:
            again.append(pack_tokens(tokens))
            generation = again.generate(GREEDY, StopParams(max_tokens=6, ignore_eos=True))
            found = [token.token async for part in generation for token in part]
            assert found == expected(model, tokens, [], 6)
            assert 0 < generation.usage.num_cached_tokens <= 20

    run(program)


def test_ranges_that_are_not_there(tokens: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        for bad in (pack((0, len(tokens) + 1)), pack((-1, 2)), pack((5, 4)), b"abc"):
            async with rt.open(Caller()) as seq:
                seq.append(pack_tokens(tokens))
                seq.mask(bad)
                with pytest.raises(InvalidRequest):
                    await generated(seq, 1)

    run(program)
