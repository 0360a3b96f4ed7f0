"""Explicit pages and embeddings, on the embedded model in float64: the results are those of sequences."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.programs.spaces import (
    GREEDY,
    Run,
    dist_of,
    embed,
    generated,
    i32,
    ids,
    likely,
    numbers,
    opened,
    pages_for,
    u32,
)
from weft.core.sampling import SamplingParams
from weft.core.wire import (
    CopyTokens,
    Forward,
    ForwardSample,
    FreePages,
    MaskPage,
    NextDist,
    Sync,
)
from weft.programs.runtime import Runtime
from weft.programs.space import SpaceHandle


def test_the_paper_s_loop_gives_what_generate_gives(run: Run, prompt: list[int]) -> None:
    """Section 4.2: embed, forward, look at the distribution, again."""

    async def program(rt: Runtime) -> None:
        expected = await generated(rt, prompt, 24)
        count = pages_for(rt, len(prompt) + 24)
        space = await opened(rt, count, len(prompt))
        pages = numbers(count)
        space.post(Forward, 1, pages, embed(space, prompt, list(range(len(prompt)))), pages, u32(1))
        found: list[int] = []
        for position in range(len(prompt), len(prompt) + 24):
            found.append((await dist_of(space, u32(1), 1))[0][0])
            space.post(Forward, 1, pages, embed(space, found[-1:], [position]), pages, u32(1))
        assert found == expected
        await space.ask(Sync, 1)
        space.release()

    run(program)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.9, top_p=0.9, seed=11)])
def test_forward_and_sample_gives_what_generate_gives(run: Run, prompt: list[int], sampling: SamplingParams) -> None:
    async def program(rt: Runtime) -> None:
        expected = await generated(rt, prompt, 16, sampling)
        count = pages_for(rt, len(prompt) + 16)
        space = await opened(rt, count, 1)
        pages = numbers(count)
        fed, position, found = prompt, 0, []
        for index in range(16):
            positions = list(range(position, position + len(fed)))
            report = space.ask(ForwardSample, 1, pages, i32(fed), i32(positions), pages, b"", sampling, index)
            found += ids((await report).tokens)
            position += len(fed)
            fed = found[-1:]
        assert found == expected
        space.release()

    run(program)


def test_a_prefill_in_two_forwards_without_waiting(run: Run, prompt: list[int]) -> None:
    """The paper's first example: all but the last token fill pages, the last one reads them."""

    async def program(rt: Runtime) -> None:
        expected = await likely(rt, prompt)
        count = pages_for(rt, len(prompt))
        space = await opened(rt, count, len(prompt) + 1)
        pages, last = numbers(count), len(prompt)
        embeds = embed(space, prompt, list(range(len(prompt))))
        space.post(Forward, 1, b"", embeds[:-4], pages)
        space.post(Forward, 1, pages, embeds[-4:], b"", u32(last + 1))
        found, logprobs = await dist_of(space, u32(last + 1))
        assert found == expected.ids
        assert np.allclose(logprobs, expected.logprobs, atol=1e-6)
        space.release()

    run(program)


def test_without_pages_nothing_is_kept_and_all_is_seen(run: Run, prompt: list[int]) -> None:
    short = prompt[:12]

    async def program(rt: Runtime) -> None:
        expected = await likely(rt, short)
        space = await opened(rt, 0, len(short))
        space.post(Forward, 1, b"", embed(space, short, list(range(len(short)))), b"", u32(1))
        assert (await dist_of(space, u32(1)))[0] == expected.ids
        assert (await rt.engine.stats()).space_pages == 0
        space.release()

    run(program)


def test_leaving_out_a_page_hides_its_tokens(run: Run, prompt: list[int]) -> None:
    """A page that is not read, tokens that are masked, and a mask that says so all mean the same."""

    async def program(rt: Runtime) -> None:
        size = rt.engine.info.page_size
        text = (prompt * 4)[: 3 * size]
        outputs = []
        for how in ("not read", "masked", "mask"):
            space = await opened(rt, 4, len(text) + 2)
            embeds = embed(space, text, list(range(len(text))))
            space.post(Forward, 1, numbers(3), embeds, numbers(3))
            question = embed(space, text[:1], [len(text)], len(text) + 1)
            target = u32(len(text) + 2)
            if how == "not read":
                space.post(Forward, 1, u32(1, 3), question, u32(4), target)
            elif how == "masked":
                space.post(MaskPage, 1, 2, (1 << size) - 1)
                space.post(Forward, 1, numbers(3), question, u32(4), target)
            else:
                seen = [True] * size + [False] * size + [True] * (size + 1)
                space.post(
                    Forward, 1, numbers(3), question, u32(4), target, np.packbits(seen, bitorder="little").tobytes()
                )
            outputs.append(await dist_of(space, target, 16))
            space.release()
        full = await likely(rt, [*text, text[0]], 16)
        for found, logprobs in outputs[1:]:
            assert found == outputs[0][0]
            assert np.allclose(logprobs, outputs[0][1], atol=1e-6)
        assert not np.allclose(outputs[0][1], full.logprobs, atol=1e-3)

    run(program)


def test_a_masked_page_can_be_shown_again(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        expected = await likely(rt, [*prompt, 5])
        count = pages_for(rt, len(prompt) + 1)
        space = await opened(rt, count, len(prompt) + 1)
        pages = numbers(count)
        space.post(Forward, 1, pages, embed(space, prompt, list(range(len(prompt)))), pages)
        space.post(MaskPage, 1, 1, 0b1010)
        space.post(MaskPage, 1, 1, 0)
        space.post(Forward, 1, pages, embed(space, [5], [len(prompt)]), pages, u32(1))
        assert (await dist_of(space, u32(1)))[0] == expected.ids
        space.release()

    run(program)


def test_tokens_copied_elsewhere_are_the_same_tokens(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        expected = await likely(rt, [*prompt[:10], 7])
        space = await opened(rt, 4, 11)
        space.post(Forward, 1, b"", embed(space, prompt[:10], list(range(10))), u32(1))
        space.post(CopyTokens, 1, 1, 0, 2, 3, 4)
        space.post(CopyTokens, 1, 1, 4, 3, 0, 6)
        space.post(FreePages, 1, u32(1))
        space.post(Forward, 1, u32(2, 3), embed(space, [7], [10]), u32(4), u32(1))
        found, logprobs = await dist_of(space, u32(1))
        assert found == expected.ids
        assert np.allclose(logprobs, expected.logprobs, atol=1e-6)
        space.release()

    run(program)


def test_given_tokens_are_scored(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        expected = await likely(rt, prompt[:8], 16)
        space = await opened(rt, 0, 8)
        space.post(Forward, 1, b"", embed(space, prompt[:8], list(range(8))), b"", u32(1))
        report = await space.ask(NextDist, 1, 0, u32(1), i32(expected.ids[3:6]))
        assert report.dists is not None
        assert np.allclose(report.dists.targets, expected.logprobs[3:6], atol=1e-6)
        space.release()

    run(program)


def test_many_queues_share_steps(run: Run, prompt: list[int]) -> None:
    """What eight programs ask at once is computed together, and each gets its own."""

    async def program(rt: Runtime) -> None:
        texts = [prompt[: 4 + index] for index in range(8)]
        expected = [(await likely(rt, text)).ids for text in texts]
        spaces = [await opened(rt, 1, 16) for _ in texts]
        before = (await rt.engine.stats()).steps

        async def one(space: SpaceHandle, text: list[int]) -> list[int]:
            space.post(Forward, 1, b"", embed(space, text, list(range(len(text)))), u32(1), u32(1))
            return (await dist_of(space, u32(1)))[0]

        found = await asyncio.gather(*(one(space, text) for space, text in zip(spaces, texts, strict=True)))
        assert found == expected
        assert (await rt.engine.stats()).steps - before <= 8
        for space in spaces:
            space.release()

    run(program)


def test_inputs_that_see_each_other(run: Run, prompt: list[int]) -> None:
    """A mask may let an input see a later one: then the forward is one piece, and order does not matter."""
    text = prompt[:6]

    async def program(rt: Runtime) -> None:
        found = []
        for order in ([0, 1, 2, 3, 4, 5], [3, 1, 5, 0, 2, 4]):
            space = await opened(rt, 1, 7)
            embeds = embed(space, [text[i] for i in order], order)
            last = order.index(5)
            inputs = u32(*(i + 1 for i in range(6) if i != last), last + 1)
            space.post(Forward, 1, b"", inputs, u32(1), u32(7), b"\x3f" * 6)
            found.append(await dist_of(space, u32(7)))
            assert len(embeds) == 24
            space.release()
        assert found[0][0] == found[1][0]
        assert np.allclose(found[0][1], found[1][1], atol=1e-6)
        causal = await likely(rt, text)
        assert not np.allclose(found[0][1], causal.logprobs, atol=1e-3)

    run(program)
