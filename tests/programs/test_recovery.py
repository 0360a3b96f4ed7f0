"""Requests outlive their engine: what they tell is what they would have told without its deaths."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from tests.programs.help import CALLER, collect, settle
from tests.programs.virtual_time import run_virtually
from weft.abi.errors import EngineCrashed, EngineDead, InvalidRequest
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import Event, Generate
from weft.programs.builtin import beam, completion, embedding
from weft.programs.builtin.beam import BeamArgs
from weft.programs.recovery import MAX_CONTINUATIONS, TRIAL_ITEMS, TRIAL_PART
from weft.programs.runtime import Runtime
from weft.programs.types import Caller, Chunk, CompletionArgs, EmbeddingArgs
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.testing.fake_sequence import FakeSequence

PROMPT = pack_tokens(list(b"prompt"))
WAIT_S = 60.0
KILLER = b"kill the engine"


class MortalEngine(FakeEngine):
    """Dies in place of publishing the envelopes of these numbers, and is back in the next turn of the loop."""

    def __init__(self, *dies_at: int):
        super().__init__()
        self._dies_at = set(dies_at)
        self.num_envelopes = 0

    def _publish(self, events: list[Event], step_id: int) -> None:
        if self.ready and events:
            self.num_envelopes += 1
            if self.num_envelopes in self._dies_at:
                self.die()
                asyncio.get_running_loop().call_soon(self.restart)
                return
        super()._publish(events, step_id)


class KilledEngine(FakeEngine):
    """Dies whenever it is about to compute the third token behind `KILLER`."""

    num_deaths = 0

    def _generate(self, seq: FakeSequence, op: Generate, events: list[Event]) -> None:
        if bytes(seq.tokens[: len(KILLER)]) == KILLER and len(seq.tokens) >= len(KILLER) + 2 and self.ready:
            self.num_deaths += 1
            self.die()
            asyncio.get_running_loop().call_soon(self.restart)
        if self.ready:
            super()._generate(seq, op, events)

    def _publish(self, events: list[Event], step_id: int) -> None:
        # A step that was interrupted is not told.
        if self.ready or not step_id:
            super()._publish(events, step_id)


def run(engine: FakeEngine, test: Callable[[Runtime], Coroutine[Any, Any, Any]], wait_s: float = WAIT_S) -> Any:
    async def body() -> Any:
        rt = Runtime(engine, byte_tokenizer(), engine_wait_s=wait_s)
        result = await test(rt)
        await settle()
        assert (rt.num_sequences, rt.num_operations, engine.sequences) == (0, 0, {})
        return result

    return asyncio.run(body())


def told(chunks: list[Chunk]) -> list[tuple[object, ...]]:
    """Of each choice: everything but how it was cut into chunks, and times."""
    found = []
    for index in sorted({chunk.index for chunk in chunks}):
        mine = [chunk for chunk in chunks if chunk.index == index]
        ends = [
            (chunk.finish_reason, chunk.stop, chunk.usage.num_prompt_tokens, chunk.usage.num_output_tokens)
            for chunk in mine
            if chunk.finish_reason is not None and chunk.usage is not None
        ]
        tokens = [token for chunk in mine for token in chunk.tokens]
        logprobs = [logprobs for chunk in mine for logprobs in chunk.logprobs]
        reports = [chunk.prompt_logprobs for chunk in mine if chunk.prompt_logprobs is not None]
        found.append(("".join(chunk.text for chunk in mine), tokens, logprobs, reports, ends))
    return found


def until_e() -> Callable[[], Callable[[str], bool]]:
    """A reader that has enough with the third "e", "a" or "i"."""

    def make() -> Callable[[str], bool]:
        seen: list[str] = []

        def is_enough(text: str) -> bool:
            seen.append(text)
            return sum(letter in "aei" for letter in "".join(seen)) >= 3

        return is_enough

    return make


DRAWN = SamplingParams(temperature=1.0, seed=7)
COMPLETIONS: dict[str, CompletionArgs] = {
    "one": CompletionArgs(prompt=PROMPT, sampling=DRAWN, max_tokens=9),
    "choices": CompletionArgs(prompt=PROMPT, sampling=DRAWN, n=3, max_tokens=6),
    "log-probabilities": CompletionArgs(
        prompt=PROMPT, sampling=SamplingParams(seed=1, logprobs=2), prompt_logprobs=1, n=2, max_tokens=5
    ),
    "read as a whole": CompletionArgs(prompt=PROMPT, sampling=DRAWN, n=2, max_tokens=9, chunk_tokens=4),
    "enough": CompletionArgs(prompt=PROMPT, sampling=DRAWN, until=until_e(), n=2, max_tokens=60),
    "the prompt alone": CompletionArgs(prompt=PROMPT, prompt_logprobs=1, n=2, max_tokens=0),
}


def completed(args: CompletionArgs, engine: FakeEngine) -> list[Chunk]:
    return run(engine, lambda rt: collect(completion.main(args, CALLER, rt)))


def with_stop_string() -> CompletionArgs:
    """Stops at three letters that come in the middle of the text."""
    [(text, *_)] = told(completed(CompletionArgs(prompt=PROMPT, sampling=DRAWN, max_tokens=12), FakeEngine()))
    assert isinstance(text, str)
    assert text.find(text[6:9]) == 6
    stop = StopParams(stop=[text[6:9].encode()])
    return CompletionArgs(prompt=PROMPT, sampling=DRAWN, stop=stop, max_tokens=12, include_stop=True)


@pytest.mark.parametrize("kind", [*COMPLETIONS, "stop string"])
@pytest.mark.parametrize("num_deaths", [1, MAX_CONTINUATIONS])
def test_a_completion_is_continued_wherever_its_engine_dies(kind: str, num_deaths: int) -> None:
    args = COMPLETIONS[kind] if kind in COMPLETIONS else with_stop_string()
    whole = MortalEngine()
    expected = told(completed(args, whole))
    for deaths in itertools.combinations(range(1, whole.num_envelopes + 2), num_deaths):
        engine = MortalEngine(*deaths)
        assert told(completed(args, engine)) == expected, deaths


def test_tokens_that_were_told_are_not_computed_again() -> None:
    engine = MortalEngine(5, 8)
    completed(COMPLETIONS["one"], engine)
    generated = [command.num_generated for command in engine.sent if isinstance(command, Generate)]
    assert generated == [0, 4, 6]


def test_a_seed_that_the_front_draws_is_the_same_in_every_attempt() -> None:
    engine = MortalEngine(3, 6)
    completed(CompletionArgs(prompt=PROMPT, n=2, max_tokens=6), engine)
    generates = [command for command in engine.sent if isinstance(command, Generate)]
    seeds = [command.sampling.seed for command in generates]
    assert len(generates) == 6
    assert seeds[:2] == seeds[2:4] == seeds[4:]
    assert seeds[0] != seeds[1]


def test_beams_and_embeddings_start_again() -> None:
    async def test(rt: Runtime) -> tuple[object, object]:
        found = await collect(beam.chunks(BeamArgs(prompt=PROMPT, width=3, max_tokens=4), CALLER, rt))
        vector = await embedding.main(EmbeddingArgs(prompt=PROMPT), CALLER, rt)
        return told(found), vector.embedding

    whole = MortalEngine()
    expected = run(whole, test)
    for death in range(1, whole.num_envelopes + 1):
        assert run(MortalEngine(death), test) == expected


def test_a_mistake_is_not_tried_again() -> None:
    async def test(rt: Runtime) -> None:
        engine.fail_next("invalid_request", "no", "prompt")
        with pytest.raises(InvalidRequest):
            await collect(completion.main(COMPLETIONS["one"], CALLER, rt))
        assert sum(isinstance(command, Generate) for command in engine.sent) == 1

    engine = FakeEngine()
    run(engine, test)


def request(name: str, prompt: bytes, rt: Runtime) -> AsyncGenerator[Chunk, None]:
    args = CompletionArgs(prompt=pack_tokens(list(prompt)), sampling=DRAWN, max_tokens=40)
    return completion.main(args, Caller(request_id=name), rt)


def test_a_request_that_ends_every_engine_fails_alone_and_by_name() -> None:
    prompts = {f"r{index}": b"prompt %d" % index for index in range(12)}

    async def undisturbed(rt: Runtime) -> list[object]:
        return [told(await collect(request(name, prompt, rt))) for name, prompt in prompts.items()]

    async def test(rt: Runtime) -> tuple[list[object], BaseException, list[object]]:
        async with asyncio.TaskGroup() as tasks:
            good = [tasks.create_task(collect(request(name, prompt, rt))) for name, prompt in prompts.items()]
            [bad] = await asyncio.gather(collect(request("the killer", KILLER, rt)), return_exceptions=True)
        assert isinstance(bad, BaseException)
        later = await collect(request("later", b"prompt 0", rt))
        return [told(task.result()) for task in good], bad, told(later)

    expected = run(FakeEngine(), undisturbed)
    engine = KilledEngine()
    answers, failure, later = run(engine, test)
    assert answers == expected
    assert later == expected[0]
    assert isinstance(failure, EngineCrashed)
    assert "the killer" in str(failure)
    assert engine.num_deaths == MAX_CONTINUATIONS + 1


def test_several_that_end_engines_are_found_one_after_another() -> None:
    async def test(rt: Runtime) -> list[object]:
        prompts = [KILLER, b"b", KILLER, b"d", KILLER]
        return await asyncio.gather(*[collect(request("r", prompt, rt)) for prompt in prompts], return_exceptions=True)

    answers = run(KilledEngine(), test)
    assert [isinstance(answer, EngineCrashed) for answer in answers] == [True, False, True, False, True]
    assert [isinstance(answer, list) for answer in answers] == [False, True, False, True, False]


def test_who_is_on_board_at_a_third_death_fails() -> None:
    async def test(rt: Runtime) -> None:
        with pytest.raises(EngineDead) as caught:
            await collect(completion.main(CompletionArgs(prompt=PROMPT, max_tokens=99), CALLER, rt))
        assert not isinstance(caught.value, EngineCrashed)
        assert len(await collect(completion.main(COMPLETIONS["one"], CALLER, rt))) > 0

    # The third death comes after the trial.
    run(MortalEngine(2, 4, 4 + TRIAL_ITEMS + 5), test)


def test_a_client_that_does_not_read_holds_up_nobody_in_its_trial() -> None:
    async def test(rt: Runtime) -> None:
        slow = completion.main(CompletionArgs(prompt=PROMPT, max_tokens=99), CALLER, rt)
        await anext(slow)
        for _ in range(MAX_CONTINUATIONS):
            engine.die()
            engine.restart()
            await anext(slow)
        # It is suspended in its trial's first item; a newcomer is served all the same.
        assert len(await collect(completion.main(COMPLETIONS["one"], CALLER, rt))) > 0
        await slow.aclose()

    engine = FakeEngine()
    run(engine, test)


def test_a_client_that_vanishes_in_its_trial_ends_the_trial() -> None:
    async def test(rt: Runtime) -> None:
        args = CompletionArgs(prompt=PROMPT, max_tokens=99)
        leaving = asyncio.create_task(collect(completion.main(args, CALLER, rt)))
        other = asyncio.create_task(collect(request("other", b"other", rt)))
        for _ in range(MAX_CONTINUATIONS):
            await settle()
            engine.step(2)
            await settle()
            engine.die()
            engine.restart()
        await settle()
        # One of the two is on trial; it leaves before the trial's last item.
        [on_trial] = engine.sequences.values()
        assert on_trial.request_id == CALLER.request_id
        engine.step(TRIAL_ITEMS // 2)
        await settle()
        assert not leaving.done()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled()
        await settle()
        [on_trial] = engine.sequences.values()
        assert on_trial.request_id == "other"
        while not other.done():
            engine.step()
            await settle()
        assert told(other.result()) == expected

    expected = run(FakeEngine(), lambda rt: _told(request("other", b"other", rt)))
    engine = FakeEngine(auto=False)
    run(engine, test)


async def _told(chunks: AsyncGenerator[Chunk, None]) -> list[tuple[object, ...]]:
    return told(await collect(chunks))


LONG_SEARCH = BeamArgs(prompt=PROMPT, width=2, max_tokens=99, ignore_eos=True)


async def on_trial(engine: FakeEngine, num_steps: int) -> None:
    """Have the engine die as often as it takes for its requests to be suspects, each time after so many steps."""
    for _ in range(MAX_CONTINUATIONS):
        await settle()
        for _ in range(num_steps):
            engine.step()
            await settle()
        engine.die()
        engine.restart()
    await settle()


def test_a_long_beam_search_does_not_hold_up_others_to_its_end() -> None:
    async def test(rt: Runtime) -> None:
        search = asyncio.create_task(collect(beam.chunks(LONG_SEARCH, CALLER, rt)))
        await on_trial(engine, 3)
        newcomer = asyncio.create_task(collect(request("newcomer", b"newcomer", rt)))
        while not newcomer.done():
            await settle()
            engine.step()
        assert not search.done()
        search.cancel()
        await asyncio.gather(search, return_exceptions=True)

    engine = FakeEngine(auto=False)
    run(engine, test)


@pytest.mark.parametrize("death", [5, TRIAL_ITEMS + 9])
def test_a_beam_search_that_ends_every_engine_at_the_same_step_fails_alone(death: int) -> None:
    async def test(rt: Runtime) -> None:
        with pytest.raises(EngineCrashed):
            await collect(beam.chunks(LONG_SEARCH, CALLER, rt))

    run(MortalEngine(death, 2 * death, 3 * death), test)


def test_a_trial_without_progress_leaves_others_a_part_of_their_time() -> None:
    async def test() -> None:
        def on_board() -> set[str]:
            return {sequence.request_id for sequence in engine.sequences.values()}

        engine = FakeEngine(auto=False)
        rt = Runtime(engine, byte_tokenizer(), engine_wait_s=10.0)
        suspect = asyncio.create_task(collect(request("suspect", b"suspect", rt)))
        await on_trial(engine, 1)
        newcomer = asyncio.create_task(collect(request("newcomer", b"newcomer", rt)))
        await asyncio.sleep(10.0 * TRIAL_PART - 0.1)
        assert on_board() == {"suspect"}
        await asyncio.sleep(0.2)
        assert on_board() == {"suspect", "newcomer"}
        while not (suspect.done() and newcomer.done()):
            engine.step()
            await settle()
        assert [told(task.result()) for task in (suspect, newcomer)] == expected

    expected = [
        run(FakeEngine(), lambda rt: _told(request("suspect", b"suspect", rt))),
        run(FakeEngine(), lambda rt: _told(request("newcomer", b"newcomer", rt))),
    ]
    run_virtually(test())


def test_a_request_that_waited_too_long_for_trials_hears_that_the_engine_is_back() -> None:
    async def test() -> None:
        engine = FakeEngine(auto=False)
        rt = Runtime(engine, byte_tokenizer(), engine_wait_s=10.0)
        suspects = [asyncio.create_task(collect(request(f"s{index}", b"p", rt))) for index in range(4)]
        await on_trial(engine, 1)
        with pytest.raises(EngineDead, match="the engine is back, but requests"):
            await collect(request("newcomer", b"newcomer", rt))
        for task in suspects:
            task.cancel()
        await asyncio.gather(*suspects, return_exceptions=True)

    run_virtually(test())


def test_two_engines_that_die_at_once_are_recovered_apart() -> None:
    async def test() -> None:
        engines = [KilledEngine(), MortalEngine(3, 9)]
        runtimes = [Runtime(engine, byte_tokenizer(), engine_wait_s=WAIT_S) for engine in engines]
        bad = collect(request("the killer", KILLER, runtimes[0]))
        beside = collect(request("beside", b"beside", runtimes[0]))
        elsewhere = collect(request("elsewhere", b"elsewhere", runtimes[1]))
        failure, *rest = await asyncio.gather(bad, beside, elsewhere, return_exceptions=True)
        assert isinstance(failure, EngineCrashed)
        assert [told(chunks) for chunks in rest if isinstance(chunks, list)] == expected
        await settle()
        assert all(not engine.sequences for engine in engines)

    expected = [
        run(FakeEngine(), lambda rt: _told(request("beside", b"beside", rt))),
        run(FakeEngine(), lambda rt: _told(request("elsewhere", b"elsewhere", rt))),
    ]
    asyncio.run(test())


def test_a_trial_on_one_engine_holds_up_no_other() -> None:
    args = CompletionArgs(prompt=PROMPT, sampling=DRAWN, max_tokens=99)
    expected = told(completed(args, FakeEngine()))

    async def test() -> None:
        engines = [FakeEngine(auto=False), FakeEngine(auto=False)]
        runtimes = [Runtime(engine, byte_tokenizer(), engine_wait_s=WAIT_S) for engine in engines]
        tasks = [asyncio.create_task(collect(completion.main(args, CALLER, rt))) for rt in runtimes]
        for _ in range(MAX_CONTINUATIONS):
            await settle()
            for engine in engines:
                engine.step(2)
            await settle()
            for engine in engines:
                engine.die()
                engine.restart()
        await settle()
        # Each is on trial on its engine, and only the second engine computes.
        assert [len(engine.sequences) for engine in engines] == [1, 1]
        for turn, (engine, rt) in enumerate(zip(reversed(engines), reversed(runtimes), strict=True)):
            newcomer = asyncio.create_task(collect(completion.main(args, CALLER, rt)))
            while not newcomer.done():
                engine.step()
                await settle()
            assert [task.done() for task in reversed(tasks)] == [True, turn == 1]
            assert told(newcomer.result()) == expected
        assert [told(task.result()) for task in tasks] == [expected, expected]

    asyncio.run(test())


def test_an_engine_that_dies_again_while_it_restarts_costs_one_continuation() -> None:
    async def test(rt: Runtime) -> None:
        waiting = asyncio.create_task(collect(completion.main(COMPLETIONS["one"], CALLER, rt)))
        await settle()
        engine.step(2)
        # Two deaths in one turn of the loop, then one more before the restart: the request was on board at one.
        engine.die()
        engine.restart()
        engine.die()
        await settle()
        engine.die()
        engine.restart()
        await settle()
        assert len(engine.sequences) == 1
        while not waiting.done():
            engine.step()
            await settle()
        assert told(waiting.result())[0][4] != []

    engine = FakeEngine(auto=False)
    run(engine, test)
    generates = [command for command in engine.sent if isinstance(command, Generate)]
    assert [command.num_generated for command in generates] == [0, 2]


def test_requests_wait_for_a_restart_as_long_as_they_may() -> None:
    async def test() -> None:
        engine = FakeEngine()
        rt = Runtime(engine, byte_tokenizer(), engine_wait_s=10.0)
        engine.die()
        waiting = asyncio.create_task(collect(completion.main(COMPLETIONS["one"], CALLER, rt)))
        asyncio.get_running_loop().call_later(9.0, engine.restart)
        assert told(await waiting)[0][1]
        engine.die()
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineDead, match="not back within 10 s"):
            await collect(completion.main(COMPLETIONS["one"], CALLER, rt))
        assert asyncio.get_running_loop().time() - began == pytest.approx(10.0)

    run_virtually(test())


def test_without_patience_requests_fail_with_their_engine() -> None:
    async def test(rt: Runtime) -> None:
        with pytest.raises(EngineDead):
            await collect(completion.main(COMPLETIONS["one"], CALLER, rt))

    run(MortalEngine(3), test, wait_s=0.0)


@pytest.mark.parametrize("num_deaths", [1, MAX_CONTINUATIONS])
def test_a_client_that_leaves_while_it_waits_leaves_nothing(num_deaths: int) -> None:
    async def test(rt: Runtime) -> None:
        task = asyncio.create_task(collect(completion.main(CompletionArgs(prompt=PROMPT), CALLER, rt)))
        for number in range(1, num_deaths + 1):
            await settle(30)
            engine.die()
            await settle()
            if number < num_deaths:
                engine.restart()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        engine.restart()
        # No suspect is left for whom others would wait.
        assert len(await collect(completion.main(COMPLETIONS["one"], CALLER, rt))) > 0

    engine = FakeEngine()
    run(engine, test)
