from __future__ import annotations

import asyncio

import pytest

from tests.sdk import fake_model as model
from tests.sdk.fake_host import FakeHost
from weft.abi.operations import Op
from weft.sdk import Beam, Context, Generation, InvalidRequest, Sampler, beam_search, best_of, gather, map_forks


async def gathering(limit: int | None) -> int:
    """The most that ran at once."""
    running = most = 0

    async def one(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return number

    assert await gather((one(number) for number in range(6)), limit) == list(range(6))
    return most


@pytest.mark.parametrize(("limit", "most"), [(None, 6), (2, 2), (1, 1)])
def test_a_limit_holds(limit: int | None, most: int) -> None:
    assert asyncio.run(gathering(limit)) == most


def test_one_failure_ends_the_others() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    async def main() -> None:
        with pytest.raises(KeyError):
            await gather([waits(), fails(), waits()], 2)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert "waits" in ended


def test_work_on_forks_shares_the_prompt_and_gives_the_forks_back() -> None:
    host = FakeHost("r", "g", "b")

    async def ask(fork: Context, colour: str) -> tuple[str, str]:
        fork.user(colour)
        return colour, (await fork.generate()).text

    async def main() -> None:
        ctx = Context(system="Colours.")
        assert await map_forks(ctx, ask, ["red", "green"], limit=1) == [("red", "r"), ("green", "g")]
        host.sync()
        assert list(host.sequences) == [ctx.sequence.number]

    host.run(main)
    tokenized = [command.blobs[0] for command in host.log if command.op is Op.TOKENIZE]
    assert sum(b"Colours." in text for text in tokenized) == 1


def test_the_best_of_several_is_where_the_context_goes_on() -> None:
    host = FakeHost("aa", "aaaa", "a")

    async def length(generation: Generation) -> float:
        return len(generation.text)

    async def main() -> None:
        ctx = Context()
        ctx.user("how?")
        best = await best_of(ctx, 3, length, limit=1, sampler=Sampler(seed=5), max_tokens=9)
        assert best.text == "aaaa"
        host.sync()
        assert list(host.sequences) == [ctx.sequence.number]
        assert model.decode(host.sequences[ctx.sequence.number]).endswith("assistant\naaaa")
        assert ctx.chat.messages[-1]["content"] == "aaaa"

    host.run(main)
    about = [command.blobs[0] for command in host.log if command.op is Op.SEQ_GENERATE]
    assert [text[text.index(b'"seed":') + 7 :][:1] for text in about] == [b"5", b"6", b"7"]


def brute_force(prompt: list[int], width: int, length: int) -> list[tuple[tuple[int, ...], float]]:
    """Beams of a search without ends: the `width` best after each step."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(length):
        grown = [
            ((*tokens, token), total + logprob)
            for tokens, total in beams
            for token, logprob in enumerate(model.distribution([*prompt, *tokens]))
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    return beams


@pytest.mark.parametrize(("width", "length"), [(1, 4), (3, 4), (5, 2)])
def test_beams_are_those_of_the_definition(width: int, length: int) -> None:
    host = FakeHost()

    async def main() -> list[Beam]:
        ctx = Context().fill("Once")
        beams = await beam_search(ctx, width, length, ignore_eos=True)
        host.sync()
        assert list(host.sequences) == [ctx.sequence.number]
        assert host.sequences[ctx.sequence.number] == ctx.tokens
        return beams

    beams = host.run(main)
    expected = brute_force(model.encode("Once", special=True), width, length)
    assert [beam.tokens for beam in beams] == [tokens for tokens, _ in expected]
    for beam, (_, total) in zip(beams, expected, strict=True):
        assert beam.logprob == pytest.approx(total, abs=1e-4)
        assert beam.score == pytest.approx(total / length, abs=1e-4)
        assert beam.reason == "length"


def test_beams_that_end() -> None:
    """The end of sequence is likely after some token: a beam that takes it is complete, and its text lacks it."""
    host = FakeHost()
    prompt = model.encode("Once", special=True)
    # The model's own most probable tokens are declared its ends, so that beams end soon.
    ends = [token for token, _ in model.top(prompt, 2)]
    host.info["eos_token_ids"] = ends

    async def main() -> list[Beam]:
        return await beam_search(Context().fill("Once"), 2, 3, length_penalty=0.0)

    beams = host.run(main)
    complete = [beam for beam in beams if beam.reason == "stop"]
    assert {beam.tokens for beam in complete} >= {(ends[0],), (ends[1],)}
    assert all(beam.text == "" for beam in complete if len(beam.tokens) == 1)
    assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)


@pytest.mark.parametrize(("width", "length"), [(0, 1), (65, 1), (200, 1), (2, 0)])
def test_searches_that_cannot_be(width: int, length: int) -> None:
    async def main() -> None:
        with pytest.raises(InvalidRequest):
            await beam_search(Context().fill("x"), width, length)
        with pytest.raises(InvalidRequest):
            await beam_search(Context(), 1, 1)
        with pytest.raises(InvalidRequest):
            await best_of(Context().fill("x"), 0, lambda _: 0.0)

    FakeHost().run(main)
