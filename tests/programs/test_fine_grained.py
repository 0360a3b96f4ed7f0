"""Programs that decide about every token themselves, on the embedded model in float64."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from weft.abi.errors import InvalidRequest
from weft.config import EngineConfig
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import MAX_DIST, Dists, PromptOutputs
from weft.engine.inline import InlineEngine
from weft.programs.runtime import Runtime
from weft.programs.sequence import SequenceHandle
from weft.programs.types import Caller
from weft.tokenizers.load import load_tokenizer

ASSET = "weft/assets/weft-tiny"
PROMPT = "<|im_start|>user\nWrite a story about Ada and a lamp.<|im_end|>\n<|im_start|>assistant\n"
Program = Callable[[Runtime], Awaitable[None]]
Run = Callable[[Program], None]


@pytest.fixture(scope="module", params=["roomy", "tight"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a program on an engine; afterwards no page is left."""
    tight = {"num_pages": 30, "max_running": 4, "max_step_tokens": 24}
    changes = tight if request.param == "tight" else {"num_pages": 500}
    config = EngineConfig(dtype="float64", device="cpu", threads=2, max_context=256, **changes)
    tokenizer = load_tokenizer("weft-tiny")

    def run(program: Program) -> None:
        async def main() -> None:
            engine = InlineEngine.from_config(config)
            await engine.wait_ready()
            rt = Runtime(engine, tokenizer)
            await program(rt)
            assert rt.num_sequences == 0
            await engine.drain()
            stats = await engine.stats()
            assert stats.num_sequences == 0
            assert stats.device_pages_free + stats.device_pages_cached == stats.device_pages_total
            await engine.close()

        asyncio.run(main())

    return run


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return list(memoryview(load_tokenizer("weft-tiny").encode(PROMPT)).cast("i"))


def test_a_loop_computes_each_token_once(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        async with rt.open(Caller(namespace="alone")) as seq:
            before = (await rt.engine.stats()).prefill_tokens
            dist = (await seq.append(pack_tokens(prompt), PromptOutputs(dist=1))).dists
            for _ in range(20):
                assert dist is not None
                dist = (await seq.append(pack_tokens(dist.ids), PromptOutputs(dist=1))).dists
            assert (await rt.engine.stats()).prefill_tokens - before == len(prompt) + 20

    run(program)


async def generated(seq: SequenceHandle, count: int) -> list[int]:
    generation = seq.generate(SamplingParams(temperature=0), StopParams(max_tokens=count, ignore_eos=True))
    return [token.token async for tokens in generation for token in tokens]


async def next_dist(seq: SequenceHandle, k: int = 256, tokens: tuple[int, ...] = ()) -> Dists:
    dist = (await seq.append(pack_tokens(tokens), PromptOutputs(dist=k))).dists
    assert dist is not None
    return dist


def test_the_distribution_is_the_models(run: Run, prompt: list[int]) -> None:
    model = LlamaForCausalLM.from_pretrained(ASSET, dtype=torch.float64)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1)

    async def program(rt: Runtime) -> None:
        for cut in (1, 5, 17, len(prompt)):  # the second and later ones find a cached beginning
            async with rt.open(Caller()) as seq:
                seq.append(pack_tokens(prompt[:cut]))
                dist = await next_dist(seq, 50)
                values, ids = expected[cut - 1].topk(50)
                assert dist.ids == ids.tolist()
                assert torch.allclose(torch.tensor(dist.logprobs, dtype=torch.float64), values, atol=1e-5)
                again = (await seq.append(b"", PromptOutputs(dist=3))).dists
                assert again is not None
                assert again.ids == dist.ids[:3]

    run(program)


def test_a_loop_over_distributions_gives_the_tokens_of_generate(run: Run, prompt: list[int]) -> None:
    async def loop(rt: Runtime, text: list[int]) -> None:
        async with rt.open(Caller()) as seq, rt.open(Caller()) as other:
            seq.append(pack_tokens(text))
            other.append(pack_tokens(text))
            expected = await generated(other, 24)
            found = [(await next_dist(seq, 1)).ids[0]]
            while len(found) < 24:
                found.append((await next_dist(seq, 1, (found[-1],))).ids[0])
            assert found == expected
            # What the loop has written is a sequence like any other: it can be generated on.
            seq.append(pack_tokens(found[-1:]))
            assert await generated(seq, 6) == await generated(other, 6)

    async def program(rt: Runtime) -> None:
        await asyncio.gather(*(loop(rt, prompt[: len(prompt) - cut]) for cut in range(6)))

    run(program)


def test_speculative_decoding_gives_the_greedy_tokens_in_fewer_passes(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        async with rt.open(Caller()) as seq, rt.open(Caller()) as other:
            other.append(pack_tokens(prompt))
            expected = await generated(other, 40)
            seq.append(pack_tokens(prompt))
            tokens, passes = [*prompt, (await next_dist(seq, 1)).ids[0]], 1
            while len(tokens) < len(prompt) + 40:
                draft = prompt_lookup(tokens) or expected[len(tokens) - len(prompt) :][:3]  # an oracle where it is mute
                outputs = PromptOutputs(logprobs=1, dist=1)
                checked = await seq.append(pack_tokens([tokens[-1], *draft]), outputs)
                passes += 1
                assert checked.prompt_logprobs is not None
                assert checked.dists is not None
                likeliest = [entry.top_ids[0] for entry in checked.prompt_logprobs[1:] if entry is not None]
                right = 0
                while right < len(draft) and draft[right] == likeliest[right]:
                    right += 1
                seq.truncate(len(tokens) + right)
                tokens += draft[:right]
                tokens.append(likeliest[right] if right < len(draft) else checked.dists.ids[0])
            assert tokens[len(prompt) :][:40] == expected
            assert passes <= 20

    run(program)


def prompt_lookup(tokens: list[int], match: int = 2, count: int = 3) -> list[int]:
    """What followed the last tokens when they came before."""
    end = tokens[-match:]
    for at in range(len(tokens) - match - 1, -1, -1):
        if tokens[at : at + match] == end:
            return tokens[at + match : at + match + count]
    return []


def test_beam_search_finds_the_beams_of_transformers(run: Run, prompt: list[int]) -> None:
    width, steps = 4, 12
    model = LlamaForCausalLM.from_pretrained(ASSET, dtype=torch.float64)
    expected = model.generate(
        torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=steps, min_new_tokens=steps,
        do_sample=False, length_penalty=0.0, pad_token_id=0,
    )[:, len(prompt) :].tolist()  # fmt: skip
    ends = {load_tokenizer("weft-tiny").eos_token_ids[0]}

    async def program(rt: Runtime) -> None:
        root = rt.open(Caller())
        root.append(pack_tokens(prompt))
        beams: list[tuple[float, list[int], SequenceHandle]] = [(0.0, [], root)]
        for _ in range(steps):
            dists = await asyncio.gather(
                *(next_dist(seq, 2 * width + 1, tuple(tokens[-1:])) for _, tokens, seq in beams)
            )
            grown = sorted(
                (
                    (score + logprob, [*tokens, token], seq)
                    for (score, tokens, seq), dist in zip(beams, dists, strict=True)
                    for token, logprob in zip(dist.ids, dist.logprobs, strict=True)
                    if token not in ends
                ),
                key=lambda beam: -beam[0],
            )[:width]
            forked = [(score, tokens, seq.fork()) for score, tokens, seq in grown]
            for _, _, seq in beams:
                seq.release()
            beams = forked
        assert [tokens for _, tokens, _ in beams] == expected
        for _, _, seq in beams:
            seq.release()

    run(program)


def test_what_cannot_be_reported_is_refused(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        for wrong in (0, -1, MAX_DIST + 1):
            async with rt.open(Caller()) as seq:
                with pytest.raises(InvalidRequest, match="distribution"):
                    await seq.append(pack_tokens(prompt), PromptOutputs(dist=wrong))
        async with rt.open(Caller()) as seq:
            with pytest.raises(InvalidRequest, match="without tokens"):
                await seq.append(b"", PromptOutputs(dist=256))
        async with rt.open(Caller()) as seq:
            with pytest.raises(InvalidRequest):
                await seq.append(b"", PromptOutputs(logprobs=1))

    run(program)
