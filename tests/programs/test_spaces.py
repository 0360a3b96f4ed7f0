"""Explicit pages and embeddings, on the embedded model in float64: what sequences do, by hand, and what they cannot."""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from weft.abi.errors import InvalidRequest, OutOfPages, Overloaded, UnknownHandle, Unsupported, WeftError
from weft.config import EngineConfig
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import (
    AllocEmbeds,
    AllocPages,
    CopyTokens,
    Dists,
    EmbedText,
    ExportPages,
    Forward,
    ForwardSample,
    FreePages,
    ImportPages,
    MaskPage,
    NextDist,
    OpenQueue,
    PromptOutputs,
    ReleaseExport,
    Sync,
)
from weft.engine.inline import InlineEngine
from weft.programs.runtime import Runtime
from weft.programs.space import SpaceHandle
from weft.programs.types import Caller
from weft.tokenizers.load import load_tokenizer

PROMPT = "<|im_start|>user\nWrite a story about Ada and a lamp.<|im_end|>\n<|im_start|>assistant\n"
Program = Callable[[Runtime], Awaitable[None]]
Run = Callable[[Program], None]
GREEDY = SamplingParams(temperature=0)


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


def test_exported_pages_outlive_their_space_and_are_copied_before_they_are_written(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        expected = await likely(rt, [*prompt, 9])
        count = pages_for(rt, len(prompt))
        space = await opened(rt, count, len(prompt))
        pages = numbers(count)
        space.post(Forward, 1, pages, embed(space, prompt, list(range(len(prompt)))), pages)
        await space.ask(ExportPages, 1, pages, "preamble")
        space.release()
        for _ in range(2):
            other = await opened(rt, 1, 1)
            report = await other.ask(ImportPages, 1, 10, "preamble")
            assert report.count == count
            read = numbers(count, 10)
            # The last page is partly filled and shared: writing to it must not be seen by the next importer.
            other.post(Forward, 1, read, embed(other, [9], [len(prompt)]), u32(10 + count - 1, 1), u32(1))
            assert (await dist_of(other, u32(1)))[0] == expected.ids
            other.release()
        last = await opened(rt, 0, 1)
        await last.ask(ReleaseExport, 1, "preamble")
        with pytest.raises(UnknownHandle, match="nothing is exported under 'preamble'"):
            await last.ask(ImportPages, 1, 10, "preamble")
        last.release()

    run(program)


def test_exports_are_found_within_their_namespace_alone(run: Run) -> None:
    async def program(rt: Runtime) -> None:
        mine = rt.open_space(Caller(namespace="mine"))
        mine.post(OpenQueue, 1)
        await mine.ask(AllocPages, 1, 1, 1)
        await mine.ask(ExportPages, 1, u32(1), "secret")
        other = rt.open_space(Caller(namespace="other"))
        other.post(OpenQueue, 1)
        with pytest.raises(UnknownHandle):
            await other.ask(ImportPages, 1, 1, "secret")
        await mine.ask(ReleaseExport, 1, "secret")
        mine.release()
        other.release()

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


def test_what_is_wrong_fails_alone(run: Run, prompt: list[int]) -> None:
    """Every bad command is an error of its own; the queue goes on."""

    async def program(rt: Runtime) -> None:
        size = rt.engine.info.page_size
        space = rt.open_space(Caller())
        failures: dict[int, WeftError] = {}
        space.on_failure = failures.__setitem__
        space.post(OpenQueue, 1)
        await space.ask(AllocPages, 1, 1, 2)
        await space.ask(AllocEmbeds, 1, 1, 4)
        space.post(EmbedText, 1, i32(prompt[:2]), i32([0, 1]), u32(1, 2))
        bad: list[tuple[type[WeftError], str, Callable[[int], None]]] = [
            (UnknownHandle, "no page 77", lambda c: space.post(Forward, 1, u32(77), u32(1), u32(1), call=c)),
            (UnknownHandle, "no embedding 99", lambda c: space.post(Forward, 1, b"", u32(99), u32(1), call=c)),
            (UnknownHandle, "no queue 5", lambda c: space.post(FreePages, 5, u32(1), call=c)),
            (UnknownHandle, "no page 3", lambda c: space.post(FreePages, 1, u32(3), call=c)),
            (InvalidRequest, "listed twice", lambda c: space.post(FreePages, 1, u32(1, 1), call=c)),
            (
                InvalidRequest,
                "before anything was written",
                lambda c: space.post(Forward, 1, b"", u32(3), u32(1), call=c),
            ),
            (InvalidRequest, "has no effect", lambda c: space.post(Forward, 1, u32(1), u32(1), call=c)),
            (InvalidRequest, "at least one input", lambda c: space.post(Forward, 1, u32(1), b"", u32(1), call=c)),
            (InvalidRequest, "whole number", lambda c: space.post(Forward, 1, b"xyz", u32(1), u32(1), call=c)),
            (InvalidRequest, "token ids", lambda c: space.post(EmbedText, 1, i32([-1]), i32([0]), u32(4), call=c)),
            (InvalidRequest, "positions", lambda c: space.post(EmbedText, 1, i32([1]), i32([10**6]), u32(4), call=c)),
            (InvalidRequest, "go together", lambda c: space.post(EmbedText, 1, i32([1]), i32([0, 1]), u32(4), call=c)),
            (
                InvalidRequest,
                "mask has 3 bytes",
                lambda c: space.post(Forward, 1, b"", u32(1), u32(1), b"", b"abc", call=c),
            ),
            (
                InvalidRequest,
                "sees no token",
                lambda c: space.post(Forward, 1, b"", u32(1), u32(1), b"", b"\0", call=c),
            ),
            (InvalidRequest, "without a token", lambda c: space.post(CopyTokens, 1, 1, 0, 2, 0, 1, call=c)),
            (InvalidRequest, "not within a page", lambda c: space.post(CopyTokens, 1, 1, 0, 2, size, 1, call=c)),
            (InvalidRequest, "no 2 outputs", lambda c: space.post(Forward, 1, b"", u32(1), u32(1), u32(3, 4), call=c)),
        ]
        for number, (_, _, act) in enumerate(bad):
            act(number)
        space.post(Forward, 1, b"", u32(1, 2), u32(1), u32(1))
        await dist_of(space, u32(1))
        for number, (kind, text, _) in enumerate(bad):
            assert isinstance(failures[number], kind), (number, failures.get(number))
            assert text in str(failures[number])
        for report, text in [
            (space.ask(AllocPages, 1, 2, 1), "page 2 is in use"),
            (space.ask(AllocPages, 1, 9, 0), "cannot be allocated"),
            (space.ask(NextDist, 1, 10**6, u32(1)), "between 1 and"),
            (
                space.ask(ForwardSample, 1, b"", i32([1]), i32([0]), u32(2), b"", SamplingParams(temperature=99)),
                "temperature",
            ),
        ]:
            with pytest.raises(InvalidRequest, match=text):
                await report
        with pytest.raises(Unsupported, match="penalties"):
            await space.ask(ForwardSample, 1, b"", i32([1]), i32([0]), u32(2), b"", SamplingParams(presence_penalty=1))
        space.release()
        with pytest.raises(UnknownHandle):
            space.ask(Sync, 1)

    run(program)


def test_who_reads_what_a_failed_forward_was_to_write_hears_of_it(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        space = await opened(rt, 1, 4)
        space.on_failure = lambda call, error: None
        space.post(Forward, 1, b"", embed(space, prompt[:2], [0, 1]), u32(1), u32(3))
        space.post(Forward, 1, u32(77), u32(1), u32(1), u32(3))
        with pytest.raises(UnknownHandle, match="no page 77"):
            await space.ask(NextDist, 1, 1, u32(3))
        space.post(Forward, 1, b"", u32(1), u32(1), u32(3))
        await space.ask(NextDist, 1, 1, u32(3))
        space.release()

    run(program)


def test_a_full_page_takes_no_more_tokens(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        size = rt.engine.info.page_size
        space = await opened(rt, 1, size + 1)
        failures: dict[int, WeftError] = {}
        space.on_failure = failures.__setitem__
        embeds = embed(space, (prompt * 2)[: size + 1], list(range(size + 1)))
        space.post(Forward, 1, b"", embeds, u32(1), call=3)
        space.post(Forward, 1, b"", embeds[:-4], u32(1), call=4)
        await space.ask(Sync, 1)
        assert list(failures) == [3]
        assert f"room for {size} tokens, {size + 1} are given" in str(failures[3])
        space.release()

    run(program)


def test_a_space_of_another_client_cannot_be_reached(run: Run) -> None:
    """Numbers mean something in their own space alone."""

    async def program(rt: Runtime) -> None:
        first, second = await opened(rt, 1, 1), await opened(rt, 1, 1)
        second.on_failure = lambda call, error: failures.append(error)
        failures: list[WeftError] = []
        first.post(FreePages, 1, u32(1))
        await first.ask(Sync, 1)
        second.post(FreePages, 1, u32(1))
        await second.ask(Sync, 1)
        second.post(FreePages, 1, u32(1))
        await second.ask(Sync, 1)
        assert [type(error) for error in failures] == [UnknownHandle]
        first.release()
        second.release()

    run(program)


def test_no_more_pages_than_spaces_may_hold(run: Run) -> None:
    async def program(rt: Runtime) -> None:
        most = rt.engine.info.max_space_pages
        space = await opened(rt, most, 1)
        with pytest.raises(OutOfPages, match="more than programs may hold"):
            await space.ask(AllocPages, 1, 10_000, most + 1)
        other = rt.open_space(Caller(), reserve_pages=1)
        other.post(OpenQueue, 1)
        with pytest.raises(OutOfPages, match="cannot be reserved"):
            await other.ask(Sync, 1)
        other.release()
        waiting = rt.open_space(Caller())
        waiting.post(OpenQueue, 1)
        report = waiting.ask(AllocPages, 1, 1, 1)
        await space.ask(Sync, 1)
        assert not report.ended  # it waits
        space.post(FreePages, 1, u32(1))
        await report
        waiting.release()
        space.release()

    run(program)


def test_a_reservation_is_there_whatever_others_take(run: Run) -> None:
    async def program(rt: Runtime) -> None:
        most = rt.engine.info.max_space_pages
        mine = rt.open_space(Caller(), reserve_pages=4)
        mine.post(OpenQueue, 1)
        await mine.ask(Sync, 1)
        greedy = await opened(rt, most - 4, 1)
        await mine.ask(AllocPages, 1, 1, 4)
        mine.post(FreePages, 1, u32(1, 2, 3, 4))
        blocked = greedy.ask(AllocPages, 1, 50_000, 1)
        await mine.ask(AllocPages, 1, 10, 4)
        assert not blocked.ended
        mine.release()
        await blocked
        greedy.release()

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


def test_exports_count_and_give_way(run: Run) -> None:
    """No name is a way around the bound: the oldest exports of the same namespace go, before those of others."""

    async def program(rt: Runtime) -> None:
        most = rt.engine.info.max_space_pages
        other = rt.open_space(Caller(namespace="other"))
        other.post(OpenQueue, 1)
        await other.ask(AllocPages, 1, 1, 1)
        await other.ask(ExportPages, 1, u32(1), "theirs")
        space = rt.open_space(Caller(namespace="mine"))
        space.post(OpenQueue, 1)
        await space.ask(AllocPages, 1, 1, 1)
        for number in range(most + 5):
            await space.ask(ExportPages, 1, u32(1), f"copy {number}")
        assert (await rt.engine.stats()).space_pages <= most
        with pytest.raises(UnknownHandle):
            await space.ask(ImportPages, 1, 10, "copy 0")
        await space.ask(ImportPages, 1, 10, f"copy {most + 4}")
        await other.ask(ImportPages, 1, 10, "theirs")
        for bad in ("", "x" * 257):
            with pytest.raises(InvalidRequest, match="a name of 1 to 256"):
                await space.ask(ExportPages, 1, u32(1), bad)
        # All that is left is taken by imports of one export: then there is no more, and nobody else's is touched.
        reports = [space.ask(ImportPages, 1, 1000 + number, f"copy {most + 4}") for number in range(most + 1)]
        await reports[0]
        space.release()
        other.release()

    run(program)


def test_a_space_takes_only_so_many_queues(run: Run) -> None:
    async def program(rt: Runtime) -> None:
        space = rt.open_space(Caller())
        failures: dict[int, WeftError] = {}
        space.on_failure = failures.__setitem__
        for queue in range(1100):
            space.post(OpenQueue, queue, call=queue)
        await space.ask(Sync, 0)
        assert set(failures) == set(range(1024, 1100))
        assert isinstance(failures[1024], Overloaded)
        space.release()

    run(program)
