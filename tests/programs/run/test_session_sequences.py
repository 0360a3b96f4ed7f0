"""Calls of a program on sequences: generations, forks, scores, holds and cancellation."""

import asyncio
import json
import struct

import numpy as np
import pytest

from tests.programs.help import settle
from tests.programs.run.sequence_calls import PROMPT, joined, opened
from tests.programs.sessions import Host, obj, run
from weft.abi.frames import EventKind
from weft.abi.operations import Op
from weft.config import EngineConfig
from weft.core.ids import pack_tokens, unpack_tokens
from weft.core.wire import Hold, Open, SetPriority
from weft.engine.inline import InlineEngine
from weft.programs.network.client import Network
from weft.programs.quota.accounts import Accounts
from weft.programs.run.messages import Hub
from weft.programs.run.model import ProgramModel
from weft.programs.run.services import Services
from weft.programs.runtime import Runtime
from weft.store.values import MemoryValueStore
from weft.testing.fake_engine import FakeEngine
from weft.tokenizers.load import load_tokenizer


def test_a_generation_gives_parts_and_how_it_ended() -> None:
    async def test(host: Host) -> None:
        host.engine.script(list(b"hello"))
        program = host.program()
        opened(program)
        call = program.ask(Op.SEQ_GENERATE, 1, 1, obj({"sampling": {"temperature": 0, "seed": 3}}))
        end = await program.end_of(call)
        assert joined(program, call) == ([*b"hello", 256], "hello")
        about = json.loads(end.blobs[0])
        assert about["reason"] == "stop"
        assert about["stop"] is None
        assert about["usage"]["num_output_tokens"] == 6
        assert program.kinds(call)[-1] == EventKind.RESULT
        assert program.session.usage().generated_tokens == 6
        assert program.session.usage().prompt_tokens == 6

    run(test)


def test_without_text_there_are_only_tokens() -> None:
    async def test(host: Host) -> None:
        host.engine.script(list(b"hi"))
        program = host.program()
        opened(program)
        call = program.ask(Op.SEQ_GENERATE, 1, 0, b"{}")
        await program.end_of(call)
        assert joined(program, call) == ([*b"hi", 256], "")

    run(test)


def test_tokens_of_one_message_are_one_part() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        call = program.ask(Op.SEQ_GENERATE, 1, 1, obj({"stop": {"max_tokens": 3}}))
        await settle()
        for _ in range(3):
            host.engine.step()
        assert len(program.parts(call)) == 3
        assert program.kinds(call) == [EventKind.PART] * 3 + [EventKind.RESULT]

    run(test, engine=FakeEngine(auto=False))


def test_a_generation_that_nobody_reads_along_comes_in_one_part() -> None:
    async def test(host: Host) -> None:
        host.engine.script(list(b"abcdef"))
        program = host.program()
        opened(program)
        call = program.ask(Op.SEQ_GENERATE, 1, 5, obj({"stop": {"max_tokens": 6}}))
        await settle()
        for _ in range(6):
            host.engine.step()
        assert program.kinds(call) == [EventKind.PART, EventKind.RESULT]
        assert program.parts(call)[0][:2] == [pack_tokens(list(b"abcdef")), b"abcdef"]

    run(test, engine=FakeEngine(auto=False))


def test_stop_strings_are_never_shown() -> None:
    async def test(host: Host) -> None:
        host.engine.script(list(b"onSTOPx"), list(b"on ST"), [*b"a", 257, *b"b"], [*b"a", 257, *b"b"])
        program = host.program()
        for number, (mode, text) in enumerate([(1, "on"), (1, "on ST"), (1, "ab"), (2, "a<|im_start|>b")], start=1):
            opened(program, number)
            call = program.ask(Op.SEQ_GENERATE, number, mode, obj({"stop": {"stop": ["STOP"]}}))
            await settle()
            shown = ""
            for part in program.parts(call):
                shown += part[1].decode()
                assert not shown.startswith("onS")
            assert shown == text

    run(test)


def test_log_probabilities_come_with_the_tokens() -> None:
    async def test(host: Host) -> None:
        host.engine.script(list(b"a"))
        program = host.program()
        opened(program)
        call = program.ask(Op.SEQ_GENERATE, 1, 1, obj({"sampling": {"logprobs": 2}, "stop": {"max_tokens": 1}}))
        await program.end_of(call)
        [[tokens, text, chosen, ids, logprobs]] = program.parts(call)
        assert (list(unpack_tokens(tokens)), text) == ([97], b"a")
        assert struct.unpack("<f", chosen) == (-0.5,)
        assert list(unpack_tokens(ids)) == [97, 98]
        assert struct.unpack("<2f", logprobs) == (-0.5, -1.25)

    run(test)


def test_what_is_asked_for_is_checked() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        for about in (
            b"{",
            b"[]",
            obj({"samplin": {}}),
            obj({"sampling": {"temp": 1}}),
            obj({"sampling": {"temperature": "hot"}}),
            obj({"stop": {"max": 1}}),
            obj({"grammar": {"kind": "sql", "text": ""}}),
        ):
            assert (await program.error(Op.SEQ_GENERATE, 1, 1, about))[0] == "invalid_request", about
        bias = obj({"sampling": {"logit_bias": {"5": 1.5}}, "stop": {"max_tokens": 1}})
        await program.result(Op.SEQ_GENERATE, 1, 0, bias)
        assert host.engine.sent[-1].sampling.logit_bias == {5: 1.5}

    run(test)


def test_a_fork_goes_on_by_itself() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        program.say(Op.SEQ_FORK, 1, 2)
        program.say(Op.SEQ_RELEASE, 1)
        [score, _, _] = await program.result(Op.SEQ_SCORE, 2, 0, pack_tokens([1, 2]))
        assert len(score) == 8
        [child] = host.engine.sequences.values()
        assert child.tokens == [*b"prompt", 1, 2]
        program.say(Op.SEQ_TRUNCATE, 2, 3)
        await settle()
        assert child.tokens == [*b"pro"]

    run(test)


def test_scores_are_padded_where_there_is_nothing_to_say() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        program.say(Op.SEQ_OPEN, 1, 0)
        chosen, ids, logprobs = await program.result(Op.SEQ_SCORE, 1, 2, pack_tokens([5, 6]))
        values = np.frombuffer(chosen, np.float32)
        assert np.isnan(values[0])
        assert values[1] == -0.5
        assert np.frombuffer(ids, np.int32).tolist() == [-1, -1, 6, 7]
        assert np.isnan(np.frombuffer(logprobs, np.float32)[:2]).all()

    run(test)


def test_a_sequence_is_held_for_others() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        program.say(Op.SEQ_HOLD, 1, 30.0)
        await settle()
        assert host.engine.held == [([*b"prompt"], 30.0)]
        assert isinstance(host.engine.sent[-1], Hold)
        program.say(Op.SEQ_APPEND, 1, PROMPT, call=1)
        assert program.errors(1) == ["unknown_handle"]
        opened(program, 2)
        program.say(Op.SEQ_HOLD, 2, float("nan"), call=2)
        assert program.errors(2) == ["invalid_request"]

    run(test)


def test_nobody_runs_earlier_than_its_caller_may() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        for number, priority in ((1, -100), (2, 0), (3, 5)):
            program.say(Op.SEQ_OPEN, number, priority)
        program.say(Op.SEQ_PRIORITY, 3, -7)
        await settle()
        assert [c.priority for c in host.engine.sent if isinstance(c, Open)] == [2, 2, 7]
        assert [c.priority for c in host.engine.sent if isinstance(c, SetPriority)] == [2]

    run(test)


def test_handles_of_nobody_and_of_others_are_errors_to_this_program_alone() -> None:
    async def test(host: Host) -> None:
        program, other = host.program(), host.program()
        opened(other, 1)
        silent = {Op.SEQ_APPEND: (PROMPT,), Op.SEQ_FORK: (9,), Op.SEQ_TRUNCATE: (0,), Op.SEQ_HOLD: (1.0,)}
        silent |= {Op.SEQ_RELEASE: (), Op.SEQ_CANCEL: (), Op.SEQ_PRIORITY: (1,), Op.SEQ_MASK: (b"",)}
        for call, (op, values) in enumerate(silent.items(), start=1):
            # A handle is a number of the program's own: another's means nothing, nor does the engine's.
            for forged in (1, 77, 2**32 - 1):
                program.say(op, forged, *values, call=call)
            assert program.errors(call) == ["unknown_handle"] * 3, op
        assert await program.error(Op.SEQ_GENERATE, 1, 1, b"{}") == ("unknown_handle", "")
        assert await program.error(Op.SEQ_DIST, 1, 5, b"") == ("unknown_handle", "")
        assert await program.error(Op.SEQ_SCORE, 1, 5, b"") == ("unknown_handle", "")
        opened(program, 1)
        program.say(Op.SEQ_OPEN, 1, 0, call=50)
        program.say(Op.SEQ_FORK, 1, 1, call=51)
        assert program.errors(50) == program.errors(51) == ["invalid_request"]
        program.say(Op.SEQ_RELEASE, 1)
        program.say(Op.SEQ_RELEASE, 1, call=52)
        assert program.errors(52) == ["unknown_handle"]
        assert (
            await other.end_of(other.ask(Op.SEQ_GENERATE, 1, 1, b'{"stop":{"max_tokens":2}}'))
        ).kind == EventKind.RESULT

    run(test)


def test_cancelling_a_call_tells_of_its_tokens_first() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        for steps in range(4):
            call = program.ask(Op.SEQ_GENERATE, 1, 1, b"{}")
            await settle()
            host.engine.step(steps)
            program.say(Op.CANCEL, call)
            program.say(Op.CANCEL, call)
            end = await program.end_of(call)
            assert program.error_in(end)[0] == "cancelled"
            tokens, text = joined(program, call)
            assert len(tokens) == len(text) == steps
            assert program.kinds(call).count(EventKind.ERROR) == 1
        [sequence] = host.engine.sequences.values()
        assert len(sequence.tokens) == len(PROMPT) // 4 + 6

    run(test, engine=FakeEngine(auto=False))


def test_whatever_ends_a_sequence_ends_its_calls_once() -> None:
    async def test(host: Host) -> None:
        ends = {Op.SEQ_RELEASE: (), Op.SEQ_CANCEL: (), Op.SEQ_TRUNCATE: (2,), Op.SEQ_HOLD: (1.0,)}
        for number, (op, values) in enumerate(ends.items(), start=1):
            for turns in range(3):
                program = host.program()
                opened(program, number)
                calls = [
                    program.ask(Op.SEQ_GENERATE, number, 1, b"{}"),
                    program.ask(Op.SEQ_SCORE, number, 1, pack_tokens([1])),
                ]
                await settle(turns)
                host.engine.step(turns)
                program.say(op, number, *values)
                for call in calls:
                    assert program.error_in(await program.end_of(call))[0] == "cancelled"
                await settle()
                for call in calls:
                    assert sum(kind != EventKind.PART for kind in program.kinds(call)) == 1
                program.close()

    run(test, engine=FakeEngine(auto=False))


def test_held_back_text_is_shown_when_nothing_can_stop_any_more() -> None:
    async def test(host: Host) -> None:
        host.engine.script(list(b"abST"))
        program = host.program()
        opened(program)
        call = program.ask(Op.SEQ_GENERATE, 1, 1, obj({"stop": {"stop": ["STOP"]}}))
        await settle()
        host.engine.step(4)
        assert joined(program, call)[1] == "ab"
        program.say(Op.SEQ_CANCEL, 1)
        await program.end_of(call)
        assert joined(program, call)[1] == "abST"

    run(test, engine=FakeEngine(auto=False))


def test_on_the_embedded_model() -> None:
    """Distributions, scores and text as a real engine gives them, and nothing left afterwards."""

    async def main() -> None:
        engine = InlineEngine.from_config(EngineConfig(device="cpu", threads=1, num_pages=200, max_context=256))
        await engine.wait_ready()
        host = Host(FakeEngine())
        host.rt = Runtime(engine, load_tokenizer("weft-tiny"))
        host.accounts = Accounts()
        host.model = ProgramModel("weft-tiny", host.rt)
        host.services = Services(
            model=host.model,
            models=lambda: [host.model],
            hub=Hub(),
            store=MemoryValueStore(),
            network=Network(),
            launcher=host.launcher,
        )
        program = host.program()
        [prompt] = await program.result(Op.TOKENIZE, 0, b"Once upon a time")
        program.say(Op.SEQ_OPEN, 1, 0)
        ids, logprobs = await program.result(Op.SEQ_DIST, 1, 5, prompt)
        likely = unpack_tokens(ids)
        assert len(likely) == 5
        assert np.frombuffer(logprobs, np.float32).tolist() == sorted(np.frombuffer(logprobs, np.float32))[::-1]
        program.say(Op.SEQ_FORK, 1, 2)
        call = program.ask(
            Op.SEQ_GENERATE, 1, 1, obj({"sampling": {"temperature": 0}, "stop": {"max_tokens": 8, "ignore_eos": True}})
        )
        await program.end_of(call)
        tokens, text = joined(program, call)
        assert tokens[0] == likely[0]
        assert await program.result(Op.DETOKENIZE, 1, pack_tokens(tokens)) == [text.encode()]
        chosen, top, _ = await program.result(Op.SEQ_SCORE, 2, 1, pack_tokens(tokens))
        assert list(unpack_tokens(top)) == tokens
        assert np.frombuffer(chosen, np.float32)[0] == pytest.approx(np.frombuffer(logprobs, np.float32)[0], abs=1e-4)
        ids, _ = await program.result(Op.SEQ_DIST, 1, 10**6, pack_tokens([1]))
        assert sorted(unpack_tokens(ids)) == list(range(engine.info.vocab_size)), (
            "all there are, for more than there are"
        )
        call = program.ask(
            Op.SEQ_GENERATE, 2, 1, obj({"grammar": {"kind": "regex", "text": "[0-9]{3}"}, "stop": {"max_tokens": 8}})
        )
        await program.end_of(call)
        assert joined(program, call)[1].isdecimal()
        program.close()
        await engine.drain()
        stats = await engine.stats()
        assert stats.num_sequences == 0
        host.model.close()
        await engine.close()

    asyncio.run(main())
