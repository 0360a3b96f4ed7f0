"""Sequences and operations: order, endings, coalescing, and that nothing is left behind however a program ends."""

import asyncio

import pytest

from tests.programs.help import CALLER, run, settle
from weft.abi import errors
from weft.abi.errors import ContextTooLong, EngineDead, InvalidRequest, Overloaded, UnknownHandle, WeftError
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import (
    Append,
    Cancelled,
    Command,
    Envelope,
    Failed,
    Finished,
    Fork,
    Generate,
    Open,
    PromptOutputs,
    Release,
    SetPriority,
    Stats,
    Token,
    TraceSpan,
    encode_commands,
)
from weft.programs.operations import Generations
from weft.programs.runtime import Runtime
from weft.programs.sequence import MAX_SILENT
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine

PROMPT = pack_tokens(list(b"prompt"))


def stop(max_tokens: int) -> StopParams:
    return StopParams(max_tokens=max_tokens)


async def tokens_of(generation) -> list[int]:
    return [token.token async for tokens in generation for token in tokens]


def test_commands_of_one_turn_are_one_message() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            seq.append(PROMPT)
            child = seq.fork()
            generation = seq.generate(SamplingParams(seed=1), stop(2))
            child.set_priority(7)
            assert engine.messages == []
            assert len(await tokens_of(generation)) == 2
            [message] = engine.messages
            assert [type(command) for command in message] == [Open, Append, Fork, Generate, SetPriority]
            assert message[0] == Open(seq=seq.id, tenant="t", namespace="n", priority=3, request_id="r1")
            child.release()

    run(test)


def test_numbers_are_never_reused() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        seen: set[int] = set()
        for _ in range(5):
            async with rt.open(CALLER) as seq, seq.fork() as child:
                operation = seq.append(PROMPT, PromptOutputs())
                await operation
                new = {seq.id, child.id, operation.op}
                assert not new & seen
                seen |= new

    run(test)


def test_a_generation_gives_tokens_then_how_it_ended() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            seq.append(PROMPT)
            generation = seq.generate(stop=stop(3))
            assert generation.finished is None
            assert len(await tokens_of(generation)) == 3
            assert generation.finished.reason == "length"
            assert generation.usage.num_output_tokens == 3
            # The sequence goes on from there.
            assert len(await tokens_of(seq.generate(stop=stop(1)))) == 1
            assert engine.sequences[seq.id].num_prompt == len(b"prompt") + 3

    run(test)


def test_tokens_that_came_together_are_given_together() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            seq.append(PROMPT)
            generation = seq.generate(stop=stop(7))
            rt.flush()
            engine.step(3)
            assert len(await anext(generation)) == 3
            engine.step(4)
            assert len(await anext(generation)) == 4
            with pytest.raises(StopAsyncIteration):
                await anext(generation)

    run(test, auto=False)


def test_one_wakeup_per_envelope() -> None:
    """However many tokens an envelope brings to however many generations, its reader is resumed once."""

    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq, seq.fork() as other:
            generations = [seq.generate(), other.generate()]
            resumed = []

            async def read() -> None:
                reading = Generations(generations)
                while reading.live:
                    await reading.arrival()
                    resumed.append([(news.choice, len(news.tokens)) for news in reading.take()])

            task = asyncio.create_task(read())
            await settle()
            rt._on_envelope(Envelope(1, [Token(g.op, 1) for _ in range(3) for g in generations]))
            await settle()
            assert resumed == [[(0, 3), (1, 3)]]
            task.cancel()
            await settle()

    run(test, auto=False)


def test_a_failure_comes_after_what_arrived_before_it() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq, seq.fork() as other:
            first, second = seq.generate(), other.generate()
            reading = Generations([first, second])

            def arrived() -> list[tuple[int, int, bool]]:
                return [(news.choice, len(news.tokens), news.ended) for news in reading.take()]

            failed = Failed.of(first.op, Overloaded("full"))
            rt._on_envelope(Envelope(1, [Token(first.op, 1), failed, Token(second.op, 1)]))
            assert arrived() == [(0, 1, False), (1, 1, False)]
            rt._on_envelope(Envelope(2, [Token(second.op, 1)]))
            for _ in range(2):
                with pytest.raises(Overloaded, match="full"):
                    reading.take()
            second_alone = Generations([second])
            rt._on_envelope(Envelope(3, [Finished(op=second.op)]))
            assert [(news.choice, len(news.tokens), news.ended) for news in second_alone.take()] == [(0, 1, True)]
            assert not second_alone.live

    run(test, auto=False)


def test_a_failure_does_not_hide_what_others_brought() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq, seq.fork() as other:
            first, second = seq.generate(), other.generate()
            reading = Generations([first, second])
            rt._on_envelope(Envelope(1, [Token(first.op, 1), Failed.of(second.op, Overloaded("full"))]))
            assert [news.choice for news in reading.take()] == [0]
            rt._on_envelope(Envelope(2, [Token(first.op, 1)]))
            with pytest.raises(Overloaded, match="full"):
                reading.take()

    run(test, auto=False)


def test_a_report_is_awaited() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            finished = await seq.append(PROMPT, PromptOutputs(logprobs=1, hidden="mean"))
            assert len(finished.prompt_logprobs) == 6
            assert finished.prompt_logprobs[0] is None
            assert len(finished.hidden) == engine.info.hidden_size

    run(test)


def test_failures_are_raised_as_what_they_are() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        for kind, error in [("overloaded", Overloaded), ("out_of_pages", WeftError), ("never heard of", WeftError)]:
            engine.fail_next(kind, "because")
            async with rt.open(CALLER) as seq:
                with pytest.raises(error, match="because"):
                    await seq.append(PROMPT, PromptOutputs())
        engine.fail_next("overloaded", "full", retry_after_s=7.5)
        async with rt.open(CALLER) as seq:
            with pytest.raises(Overloaded) as refused:
                await tokens_of(seq.generate())
            assert refused.value.retry_after_s == 7.5
        engine.fail_next("invalid_request", "bad", param="seed")
        async with rt.open(CALLER) as seq:
            with pytest.raises(InvalidRequest) as caught:
                await tokens_of(seq.generate())
            assert caught.value.param == "seed"

    run(test)


def test_tokens_before_a_failure_are_given_first() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            generation = seq.generate()
            rt.flush()
            engine.step(2)
            engine.die()
            assert len(await anext(generation)) == 2
            with pytest.raises(EngineDead):
                await anext(generation)

    run(test, auto=False)


def test_a_failed_silent_append_fails_what_follows() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            seq.append(pack_tokens([1] * (engine.info.max_context + 1)))
            with pytest.raises(ContextTooLong):
                await tokens_of(seq.generate(stop=stop(1)))
            with pytest.raises(ContextTooLong):
                seq.append(PROMPT)

    run(test)


def test_silent_appends_do_not_pile_up() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            for _ in range(100):
                seq.append(PROMPT)
                await tokens_of(seq.generate(stop=stop(1)))
            assert rt.num_operations == 0

    run(test)


def test_appends_that_nothing_follows_are_forgotten() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            for _ in range(2 * MAX_SILENT):
                seq.append(PROMPT[:4])
                seq.truncate(0)
            for _ in range(100):
                await asyncio.sleep(0)
            assert rt.num_operations <= MAX_SILENT

    run(test)


def test_cancelling_oneself_is_an_end() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        for end in ("cancel", "truncate", "release", "hold"):
            async with rt.open(CALLER) as seq:
                seq.append(PROMPT)
                generation = seq.generate()
                assert await anext(generation)
                match end:
                    case "truncate":
                        seq.truncate(3)
                    case "hold":
                        seq.hold(5.0)
                    case _:
                        getattr(seq, end)()
                await tokens_of(generation)
                assert generation.ended
                assert generation.finished is None
                if end == "truncate":
                    assert engine.sequences[seq.id].tokens == list(b"pro")
                    assert len(await tokens_of(seq.generate(stop=stop(2)))) == 2
        await settle()
        assert [ttl_s for _, ttl_s in engine.held] == [5.0]

    run(test)


def test_being_cancelled_is_an_error() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            generation = seq.generate()
            rt.flush()
            engine._on_envelope(Envelope(1, [Cancelled(op=generation.op)]))
            with pytest.raises(errors.Cancelled, match="try again"):
                await tokens_of(generation)

    run(test, auto=False)


def test_every_exit_releases() -> None:
    async def leave(engine: FakeEngine, rt: Runtime, how: str) -> None:
        async with rt.open(CALLER) as seq, seq.fork():
            generation = seq.generate()
            assert await anext(generation)
            if how == "raise":
                raise KeyError(how)
            if how == "cancelled while waiting":
                async for _ in generation:
                    pass

    async def test(engine: FakeEngine, rt: Runtime) -> None:
        await leave(engine, rt, "return")
        with pytest.raises(KeyError):
            await leave(engine, rt, "raise")
        task = asyncio.create_task(leave(engine, rt, "cancelled while waiting"))
        await settle()
        assert len(engine.sequences) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        assert engine.sequences == {}
        assert sum(isinstance(command, Release) for command in engine.sent) == 6

    run(test)


def test_a_released_sequence_takes_nothing() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        seq = rt.open(CALLER)
        seq.release()
        seq.release()
        for use in (lambda: seq.append(PROMPT), seq.generate, seq.fork, seq.cancel, lambda: seq.truncate(0)):
            with pytest.raises(UnknownHandle):
                use()
        await settle()
        assert sum(isinstance(command, Release) for command in engine.sent) == 1

    run(test)


def test_forks_share_what_came_before_them() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            seq.append(PROMPT)
            first = seq.generate(stop=stop(2))
            child = seq.fork()
            async with child:
                assert len(await tokens_of(first)) == 2
                assert len(await tokens_of(child.generate(stop=stop(1)))) == 1
                assert engine.sequences[child.id].tokens[:8] == engine.sequences[seq.id].tokens
                assert engine.appended_tokens == len(b"prompt")

    run(test)


def test_death_fails_everything_at_once_and_a_restart_serves_again() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq, rt.open(CALLER) as waiting, rt.open(CALLER) as idle:
            tasks = [asyncio.create_task(tokens_of(seq.generate())) for seq in (seq, waiting)]
            await settle()
            engine.die("crashed")
            await settle()
            for task in tasks:
                with pytest.raises(EngineDead, match="crashed"):
                    task.result()
            with pytest.raises(EngineDead):
                rt.open(CALLER)
            engine.restart()
            # Sequences of the old engine are gone for good, also those that were idle.
            with pytest.raises(EngineDead):
                idle.append(PROMPT)
        async with rt.open(CALLER) as again:
            assert len(await tokens_of(again.generate(stop=stop(2)))) == 2
        # Nothing of the dead engine's was released: it no longer exists.
        await settle()
        assert sum(isinstance(command, Release) for command in engine.sent) == 1

    run(test)


def test_death_between_command_and_sending() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            generation = seq.generate()
            engine.die()
            with pytest.raises(EngineDead):
                await tokens_of(generation)

    run(test)


def test_an_engine_that_forgot_an_idle_sequence() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            await settle()
            engine.sequences.clear()  # as at the end of a lease, of which the client does not hear
            with pytest.raises(EngineDead, match="start again"):
                await tokens_of(seq.generate())

    run(test)


def test_what_an_engine_says_it_does_not_know_is_released_all_the_same() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        engine.fail_next("unknown_handle")
        async with rt.open(CALLER) as seq:
            with pytest.raises(EngineDead):
                await tokens_of(seq.generate())
            assert list(engine.sequences) == [seq.id]

    run(test)


def test_late_and_foreign_events_are_harmless() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            generation = seq.generate()
        events = [Token(generation.op, 1), Cancelled(op=generation.op), Token(10**9, 1)]
        rt._on_envelope(Envelope(1, [*events, Stats(stats=await engine.stats())]))

    run(test)


def test_other_events_are_passed_on() -> None:
    async def test() -> None:
        engine, seen = FakeEngine(), []
        Runtime(engine, byte_tokenizer(), on_event=seen.append)
        span = TraceSpan("r1", "queued", 1.0)
        engine._on_envelope(Envelope(0, [span]))
        assert seen == [span]

    asyncio.run(test())


def test_two_readers_of_one_generation_are_a_bug() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        async with rt.open(CALLER) as seq:
            generation = seq.generate()
            task = asyncio.create_task(tokens_of(generation))
            await settle()
            with pytest.raises(RuntimeError, match="two tasks"):
                await anext(generation)
            task.cancel()
            await settle()

    run(test, auto=False)


def test_a_command_that_cannot_travel_fails_alone() -> None:
    """One number of more than 64 bits must not keep what others said in the same turn from leaving."""

    async def test(engine: FakeEngine, rt: Runtime) -> None:
        plain = engine.send

        def send(commands: list[Command]) -> None:
            encode_commands(list(commands))  # as a socket does
            plain(commands)

        engine.send = send  # type: ignore[method-assign]
        async with rt.open(CALLER) as bad, rt.open(CALLER) as good:
            bad.append(PROMPT)
            good.append(PROMPT)
            wrong = bad.generate(SamplingParams(seed=2**70), stop(2))
            right = good.generate(SamplingParams(seed=1), stop(2))
            assert len(await tokens_of(right)) == 2
            with pytest.raises(InvalidRequest, match="cannot be encoded"):
                await tokens_of(wrong)

    run(test)
